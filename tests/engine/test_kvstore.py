"""Keys and values between engines: a prefix or nothing, whatever the other engine does."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celld.tiny.kvstore import PAGE_TOKENS, Found, Giver, Shape, Taker, page_digests
from celld.transfer.engine import installed
from celld.transfer.streams import StreamEngine
from tests.engine.calls import Caller, logprobs
from tests.engine.process import EngineProcess
from tests.engine.test_contract import prompt

pytestmark = pytest.mark.skipif(os.environ.get("GYRE_ENGINE") is not None, reason="of the tiny engine")
SHAPE = Shape(layers=2, heads=1, dimension=4)
needs_mooncake = pytest.mark.skipif(not installed(), reason="mooncake can't be imported: the extra and libibverbs1")


def values(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((tokens, 2, 2, 1, 4), dtype=np.float32)


class Pair:
    """One engine's giving side and another's taking side, in one process."""

    def __init__(self, folder: Path, budget_tokens: int = 1000) -> None:
        self.folder = folder
        self.engine = StreamEngine("127.0.0.1")
        self.giver = Giver(folder, "a", self.engine, SHAPE, budget_tokens * SHAPE.token_bytes)
        self.taker = Taker(folder, "b", StreamEngine("127.0.0.1", progress_s=0.3), SHAPE)

    def give(self, salt: str, tokens: list[int], seed: int = 0) -> None:
        self.giver.give(salt, tokens, lambda n: values(len(tokens), seed)[:n])

    def look(self, salt: str, tokens: list[int], have: int = 0) -> Found | None:
        answers: queue.Queue[Found | None] = queue.Queue()
        self.taker.look(salt, tokens, have, answers.put)
        return answers.get(timeout=20)

    def close(self) -> None:
        self.taker.close()
        self.engine.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=80))
def test_pages_are_equal_exactly_as_far_as_whole_pages_of_the_tokens_are(left: list[int], right: list[int]):
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    pages = zip(page_digests("s", left), page_digests("s", right), strict=False)
    assert sum(a == b for a, b in pages) == same // PAGE_TOKENS
    assert not set(page_digests("s", left)) & set(page_digests("t", left))


def test_the_longest_prefix_is_read_and_no_other_salt_has_it(pair: Pair):
    ids = prompt(100)
    pair.give("v", ids[:40], seed=1)
    pair.give("v", ids, seed=2)
    found = pair.look("v", [*ids[:70], 1, 2, 3])
    assert found is not None and found.tokens == 64
    assert np.array_equal(found.values, values(100, seed=2)[:64])
    assert pair.look("w", ids) is None and pair.look("v", prompt(100, seed=9)) is None
    assert pair.look("v", ids, have=90) is None  # less than a page more than there is already
    assert len(list(pair.folder.glob("*.kv"))) == 1  # the shorter string gave way to the longer


def test_a_string_without_a_salt_is_not_given(pair: Pair):
    pair.give("", prompt(100))
    assert not list(pair.folder.iterdir())


def test_the_oldest_give_way_to_the_budget_and_all_go_with_the_weights(tmp_path: Path):
    pair = Pair(tmp_path, budget_tokens=200)
    strings = [prompt(96, seed=n) for n in range(4)]
    for string in strings:
        pair.give("v", string)
    assert [pair.look("v", string) is not None for string in strings] == [False, False, True, True]
    assert pair.giver.held_bytes == 2 * 96 * SHAPE.token_bytes
    pair.give("v", prompt(300))  # larger than the budget: nothing is thrown away for it
    assert pair.look("v", strings[3]) is not None
    pair.giver.clear()
    assert pair.giver.held_bytes == 0 and pair.look("v", strings[3]) is None and not list(tmp_path.iterdir())
    pair.close()


def test_damaged_bytes_are_not_taken(pair: Pair):
    ids = prompt(64)
    pair.give("v", ids)
    (slot,) = pair.giver._shelf._slots
    slot.buffer[77] ^= 1
    assert pair.look("v", ids) is None


def test_what_another_network_offers_and_what_is_no_entry_is_passed_over(pair: Pair):
    ids = prompt(64)
    other = Giver(pair.folder, "c", pair.engine, Shape(layers=1, heads=1, dimension=8), 1 << 20)
    other.give("v", ids, lambda n: np.zeros((n, 1, 2, 1, 8), dtype=np.float32))
    (pair.folder / "d-1.kv").write_bytes(b"torn")
    assert pair.look("v", ids) is None
    pair.give("v", ids)
    assert pair.look("v", ids) is not None


def test_a_peer_that_is_gone_is_asked_once(pair: Pair):
    ids = prompt(64)
    pair.give("v", ids)
    pair.engine.close()
    assert pair.look("v", ids) is None
    assert pair.look("v", ids) is None and len(pair.taker._bad_peers) == 1 and not pair.taker._entries


def test_a_new_life_takes_back_what_the_old_one_offered(pair: Pair):
    pair.give("v", prompt(64))
    Giver(pair.folder, "a", pair.engine, SHAPE, 1 << 20)
    assert not list(pair.folder.iterdir())


@pytest.mark.parametrize("transport", ["socket", pytest.param("mooncake", marks=needs_mooncake)])
@pytest.mark.timeout(180)
async def test_a_prompt_is_read_from_a_living_engine_and_computed_when_that_is_stopped_or_dead(
    models: tuple[Path, Path], tmp_path: Path, transport: str
):
    """Real processes; the answers are the same whichever way the prompt came."""
    options = ("--weight-version", "0.0", "--context-length", "1024", "--kv-store", str(tmp_path / "kv"))
    options = (*options, "--kv-transport", transport)
    strings = [prompt(200, seed=n) for n in range(3)]
    with (
        EngineProcess(models[0], *options, "--kv-name", "a") as first,
        EngineProcess(models[0], *options, "--kv-name", "b") as second,
    ):
        async with Caller(first.url) as giving, Caller(second.url) as taking:
            expected = [await giving.generate(ids, cache_salt="v") for ids in strings]
            await giving.control.flush(5)
            await giving.control.release()  # as in a switch: what is offered stays
            got = [await taking.generate(strings[0], cache_salt="v")]
            os.kill(first.process.pid, signal.SIGSTOP)
            began = time.monotonic()
            got.append(await taking.generate(strings[1], cache_salt="v"))
            waited_s = time.monotonic() - began
            os.kill(first.process.pid, signal.SIGCONT)
            first.process.kill()
            first.process.wait()
            got.append(await taking.generate(strings[2], cache_salt="v"))
            assert await taking.metric("stored_tokens_total") == 192
    assert waited_s < 60
    assert [answer["meta_info"]["cached_tokens_details"]["storage"] for answer in got] == [192, 0, 0]
    for answer, right in zip(got, expected, strict=True):
        assert answer["output_ids"] == right["output_ids"]
        assert np.abs(np.subtract(logprobs(answer), logprobs(right))).max() <= 1e-5
