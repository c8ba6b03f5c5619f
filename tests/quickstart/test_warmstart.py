"""The warm start: learns what is masked in, repeats itself from a seed, stops at its plateau."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path

import pytest
import torch

from celld import warmstart
from celld.tiny.model import TinyConfig, TinyQwen3, load
from celld.warmstart import Transcript, WarmStartConfig
from tests.quickstart.conftest import QUICKSTART

SHAPE = TinyConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
CONFIG = WarmStartConfig(max_steps=60, decay_steps=20, evaluate_every_steps=10, batch_rows=8, learning_rate=1e-2)


def copies(count: int, offset: int = 0) -> list[Transcript]:
    """a, 0, a: the last token repeats the first, and is the only one learned."""
    return [Transcript((1 + (i + offset) % 30, 0, 1 + (i + offset) % 30), (0, 0, 1)) for i in range(count)]


def write(path: Path, transcripts: list[Transcript]) -> Path:
    lines = [json.dumps({"ids": t.ids, "mask": t.mask}) + "\n" for t in transcripts]
    path.write_text("".join(lines))
    return path


def run(place: Path, config: WarmStartConfig = CONFIG) -> warmstart.Figures:
    place.mkdir()
    train, validation = write(place / "t.jsonl", copies(90)), write(place / "v.jsonl", copies(30))
    tokenizer = place / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    return warmstart.warm_start(train, validation, place / "out", SHAPE, config, tokenizer)


def test_it_learns_and_writes_a_directory_with_figures(tmp_path: Path) -> None:
    figures = run(tmp_path / "a")
    assert figures.validation_loss < 0.5 * math.log(30)
    written = json.loads((tmp_path / "a" / "out" / "warmstart.json").read_text())
    assert written["validation_loss"] == figures.validation_loss and written["config"]["seed"] == 7
    assert (tmp_path / "a" / "out" / "tokenizer.json").read_text() == "{}"
    again = warmstart.validation_loss(load(tmp_path / "a" / "out"), copies(30))
    assert again == pytest.approx(figures.validation_loss)


def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not(tmp_path: Path) -> None:
    few = WarmStartConfig(max_steps=8, decay_steps=4, evaluate_every_steps=4)
    other = WarmStartConfig(max_steps=8, decay_steps=4, evaluate_every_steps=4, seed=8)
    for name, config in (("a", few), ("b", few), ("c", other)):
        run(tmp_path / name, config)
    a, b, c = ((tmp_path / name / "out" / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_only_masked_tokens_are_learned_and_padding_never_is() -> None:
    model = TinyQwen3(SHAPE).initialise(0)
    short, long = Transcript((1, 2, 3), (0, 1, 0)), Transcript((4, 5, 6, 7, 8), (0, 0, 1, 0, 1))
    total, count = warmstart.loss_sum(model, [short, long])
    logp_short = model(torch.tensor([short.ids])).log_softmax(-1)[0]
    logp_long = model(torch.tensor([long.ids])).log_softmax(-1)[0]
    expected = -(logp_short[0, 2] + logp_long[1, 6] + logp_long[3, 8])
    assert count == 3
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)


def test_a_plateau_is_reached_after_patience_evaluations_without_gain() -> None:
    plateau = warmstart.Plateau(patience=2, min_gain=0.1)
    assert [plateau.reached(loss) for loss in (5.0, 4.0, 3.9, 3.0, 2.9, 2.8)] == [False] * 5 + [True]


def test_a_flat_stretch_above_the_ceiling_is_not_the_plateau() -> None:
    plateau = warmstart.Plateau(patience=2, min_gain=0.1, ceiling=3.0)
    losses = (5.0, 5.0, 5.0, 5.0, 3.0, 3.0, 2.9)
    assert [plateau.reached(loss) for loss in losses] == [False] * 6 + [True]


def test_the_floor_is_what_the_writer_chose_by_chance() -> None:
    assert warmstart.floor([Transcript((1, 2, 3), (0, 1, 1), 2.0), Transcript((1, 2), (0, 1), 1.0)]) == 1.0


def test_a_run_that_never_comes_near_the_floor_says_so(tmp_path: Path) -> None:
    tmp_path.joinpath("t.jsonl").write_text('{"ids": [1, 0, 1], "mask": [0, 0, 1], "nats": 0.000001}\n')
    few = WarmStartConfig(max_steps=4, decay_steps=2, evaluate_every_steps=1, patience=1, learning_rate=1e-6)
    figures = warmstart.warm_start(tmp_path / "t.jsonl", tmp_path / "t.jsonl", tmp_path / "out", SHAPE, few)
    assert (figures.steps, figures.reached_plateau) == (4, False)


def test_the_rate_rises_holds_and_decays_to_its_final_share() -> None:
    config = WarmStartConfig(learning_rate=1.0, rise_steps=2, decay_steps=4, final_share=0.2)
    assert [warmstart.learning_rate(config, step, None) for step in (0, 1, 50)] == [0.5, 1.0, 1.0]
    decay = [warmstart.learning_rate(config, step, 50) for step in (50, 51, 52, 53, 54)]
    assert decay == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])


def test_each_pass_shows_every_transcript_once_and_about_in_file_order() -> None:
    transcripts = [Transcript((i, 0), (0, 1)) for i in range(50)]
    shown = [row.ids[0] for batch in islice(warmstart.batches(transcripts, 8, seed=1), 7) for row in batch]
    assert sorted(shown) == list(range(50))
    early = [row.ids[0] for batch in islice(warmstart.batches(transcripts, 2, seed=1), 16) for row in batch]
    assert max(early) < 32


@pytest.mark.parametrize("line", ['{"ids": [1, 2], "mask": [1]}', '{"ids": [1, 2], "mask": [0, 0]}'])
def test_a_malformed_transcript_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.jsonl").write_text('{"ids": [1, 2], "mask": [0, 1]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:2: mask"):
        warmstart.read_transcripts(tmp_path / "t.jsonl")


def test_the_shape_follows_the_tokenizer() -> None:
    shape = warmstart.shape_for(QUICKSTART / "tokenizer", SHAPE)
    content = json.loads((QUICKSTART / "tokenizer" / "tokenizer.json").read_text())
    end = next(token["id"] for token in content["added_tokens"] if token["content"] == "<|im_end|>")
    assert shape.vocab_size % 32 == 0 and 0 <= shape.vocab_size - 1 - max(t["id"] for t in content["added_tokens"]) < 32
    assert (shape.eos_token_id, shape.hidden_size) == (end, SHAPE.hidden_size)
