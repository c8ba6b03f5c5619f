"""A request that echoes a recorded history gets its exact ids, however lossy; a real difference is a branch."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.capture import Forest, Node, Plan
from proxyd.chat import ChatModel, Piece
from proxyd.conversation import Conversation, Message, ToolCall

SYSTEM, TASK = Message("system", "You write modules."), Message("user", "Write f1.py")


def spelled(chat: ChatModel, text: str, *, ended: bool = True) -> Piece:
    """Ids that a tokenizer would not choose: one token per byte, so that encoding again is seen."""
    ids = [i for char in text for i in chat.encode(char)] if "<" not in text else by_byte(chat, text)
    return Piece.of([*ids, chat.end_id] if ended else ids)


def by_byte(chat: ChatModel, text: str) -> list[int]:
    out: list[int] = []
    for part in re.split(r"(</?tool_call>|</?think>)", text):
        special = chat.tokenizer.token_to_id(part) if part.startswith("<") else None
        out += [special] if special is not None else [i for char in part for i in chat.encode(char)]
    return out


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class Execution:
    """Asks, answers, and knows what the ids must be."""

    def __init__(self, chat: ChatModel) -> None:
        self.chat, self.forest, self.count = chat, Forest(chat), 0

    def ask(self, messages: list[Message], tools: bytes = b"") -> tuple[str, Plan]:
        self.count += 1
        call = f"k{self.count}"
        return call, self.forest.plan(call, Conversation(tuple(messages), tools))

    def turn(self, messages: list[Message], answer: str, *, ended: bool = True) -> tuple[Node, Plan]:
        call, plan = self.ask(messages)
        return self.answer(call, plan, answer, ended=ended), plan

    def answer(self, call: str, plan: Plan, answer: str, *, ended: bool = True) -> Node:
        completion = spelled(self.chat, answer, ended=ended)
        spoken = self.chat.parse(completion.ids, call).spoken
        return self.forest.finished(call, plan, completion, spoken, "stop" if ended else "length")


def echo(node: Node) -> Message:
    return Message("assistant", node.spoken.text, node.spoken.calls)


def whole(plan: Plan, node: Node) -> list[int]:
    return [*plan.prompt_ids().tolist(), *node.completion.ids]


def test_a_growing_history_reuses_every_sampled_id(chat: ChatModel) -> None:
    run = Execution(chat)
    history = [SYSTEM, TASK]
    before: list[int] = []
    for turn in range(5):
        node, plan = run.turn(history, call_text("read_file", {"path": f"f{turn}.md"}))
        assert plan.prompt_ids().tolist()[: len(before)] == before
        assert json.loads(f"[{plan.prompt_json().decode()}]") == plan.prompt_ids().tolist()
        before = whole(plan, node)
        history += [echo(node), Message("tool", "spec", call_id=node.spoken.calls[0].id)]
    assert plan.keep + len(plan.tail.ids) == plan.prompt_tokens and plan.base is not None


def test_an_answer_that_was_cut_off_is_closed_by_the_next_prompt(chat: ChatModel) -> None:
    run = Execution(chat)
    node, plan = run.turn([SYSTEM, TASK], "half an ans", ended=False)
    _, after = run.ask([SYSTEM, TASK, echo(node), Message("user", "go on")])
    tail = chat.decode(after.tail.ids)
    assert after.base is node and tail.startswith("<|im_end|>\n<|im_start|>user\ngo on")
    assert after.prompt_ids().tolist()[: after.keep] == whole(plan, node)


def test_siblings_with_equal_calls_are_told_apart_by_the_ids_we_issued(chat: ChatModel) -> None:
    run = Execution(chat)
    same = call_text("read_file", {"path": "f1.md"})
    first, _ = run.turn([SYSTEM, TASK], same)
    second, plan = run.turn([SYSTEM, TASK], same)
    assert (plan.attempt.of, plan.attempt.n) == ("k1", 1)
    for node in (first, second):
        _, after = run.ask([SYSTEM, TASK, echo(node), Message("tool", "x", call_id=node.spoken.calls[0].id)])
        assert after.base is node


def test_answers_that_stand_in_a_new_context_keep_their_ids(chat: ChatModel) -> None:
    run = Execution(chat)
    node, _ = run.turn([SYSTEM, TASK], call_text("read_file", {"path": "f1.md"}))
    kept = [echo(node), Message("tool", "spec", call_id=node.spoken.calls[0].id)]
    _, plan = run.ask([SYSTEM, Message("user", "Summary: nothing yet."), *kept])
    assert plan.base is None and plan.spliced == 1
    ids, own = plan.prompt_ids().tolist(), list(node.completion.ids)
    assert any(ids[at : at + len(own)] == own for at in range(len(ids)))


def test_calls_of_a_harness_that_issues_its_own_ids_match_by_their_content(chat: ChatModel) -> None:
    run = Execution(chat)
    node, _ = run.turn([SYSTEM, TASK], call_text("f", {"b": 1, "a": "x"}))
    theirs = ToolCall("theirs", "f", '{"a":"x","b":1}')
    _, plan = run.ask([SYSTEM, TASK, Message("assistant", "", (theirs,)), Message("tool", "r", call_id="theirs")])
    assert plan.base is node
    changed = replace(theirs, arguments='{"a":"x","b":1.5}')
    _, plan = run.ask([SYSTEM, TASK, Message("assistant", "", (changed,)), Message("tool", "r", call_id="theirs")])
    assert plan.base is None


def test_other_tools_are_another_history(chat: ChatModel) -> None:
    run = Execution(chat)
    node, _ = run.turn([SYSTEM, TASK], "ok")
    _, plan = run.ask([SYSTEM, TASK, echo(node), Message("user", "go")], tools=b'[{"type": "function"}]')
    assert plan.base is None and plan.agent.id == "main", "the same agent all the same: its first texts are equal"


def test_what_continued_an_answer_is_found_after_a_twin_of_it_was_sampled(chat: ChatModel) -> None:
    run = Execution(chat)
    first, _ = run.turn([SYSTEM, TASK], "Done.")
    history = [SYSTEM, TASK, echo(first), Message("user", "sure?")]
    child, _ = run.turn(history, "Yes.")
    twin, _ = run.turn([SYSTEM, TASK], "Done.")
    _, plan = run.ask([*history, echo(child), Message("user", "really?")])
    assert plan.base is child and child.base is first
    _, plan = run.ask([SYSTEM, TASK, echo(twin), Message("user", "another way")])
    assert plan.base is twin, "of two that an echo can't tell apart, the newest"


def test_a_kept_turn_in_a_new_context_stays_what_it_was_when_its_words_are_said_again(chat: ChatModel) -> None:
    run = Execution(chat)
    run.turn([SYSTEM, TASK], "Done.")
    kept = [SYSTEM, Message("user", "Summary."), Message("assistant", "Done."), Message("user", "go on")]
    node, _ = run.turn(kept, "Going.")
    run.turn([SYSTEM, Message("user", "else")], "Done.")
    _, plan = run.ask([*kept, echo(node), Message("user", "and?")])
    assert plan.base is node


# ---- random histories -----------------------------------------------------------------------------------------------

LOSSY: dict[str, Callable[[Message, random.Random], Message]] = {
    "as it was": lambda m, r: m,
    "blanks": lambda m, r: replace(m, text=m.text.strip()),
    "spacing": lambda m, r: with_arguments(m, lambda a: json.dumps(a, indent=1)),
    "order": lambda m, r: with_arguments(m, lambda a: json.dumps(dict(sorted(a.items(), reverse=True)))),
    "numbers": lambda m, r: with_arguments(m, lambda a: json.dumps({k: as_float(v) for k, v in a.items()})),
    "texts": lambda m, r: with_arguments(m, lambda a: json.dumps({k: as_text(v) for k, v in a.items()})),
    "defaults": lambda m, r: with_arguments(m, lambda a: json.dumps({"replace_all": False, **a})),
    "line ends": lambda m, r: with_arguments(m, lambda a: json.dumps({k: stripped(v) for k, v in a.items()})),
}
REAL: dict[str, Callable[[Message, random.Random], Message]] = {
    "another word": lambda m, r: replace(m, text=m.text + "never said", calls=m.calls),
    "another argument": lambda m, r: with_arguments(m, lambda a: json.dumps({**a, "path": "elsewhere.md"})),
    "another tool": lambda m, r: replace(m, calls=tuple(replace(c, name="rm") for c in m.calls), text=m.text + "!"),
    "a call less": lambda m, r: replace(m, calls=m.calls[1:], text=m.text + "." if not m.calls else m.text),
}


def with_arguments(message: Message, change: Callable[[dict[str, Any]], str]) -> Message:
    if not message.calls:
        return message
    return replace(message, calls=tuple(replace(c, arguments=change(json.loads(c.arguments))) for c in message.calls))


def as_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def stripped(value: Any) -> Any:
    return "\n".join(line.rstrip() for line in value.split("\n")) if isinstance(value, str) else value


def random_answer(rng: random.Random) -> str:
    text = rng.choice(["", "I look. ", " so\n", "Done"])
    calls = [
        call_text("write_file", {"path": f"f{rng.randrange(9)}.md", "n": rng.randrange(99), "text": "a  \nb é"})
        for _ in range(rng.choice([0, 1, 1, 2]))
    ]
    return "\n".join([text, *calls]) if text else "\n".join(calls) or "nothing"


def random_new(node: Node, rng: random.Random) -> list[Message]:
    results = [Message("tool", f"result {rng.randrange(99)}", call_id=c.id) for c in node.spoken.calls]
    if rng.random() < 0.3 or not results:
        results.append(Message("user", f"say {rng.randrange(10**6)}"))
    return results


def twins(one: Node | None, other: Node) -> bool:
    """Whether an echo can't tell two answers apart: the same request, the same words, no ids."""
    if one is None or one.start != other.start or one.spoken.calls or other.spoken.calls:
        return False
    return one.spoken.text.strip() == other.spoken.text.strip()


@given(seed=st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_lossy_echoes_continue_and_real_edits_branch(chat: ChatModel, seed: int) -> None:
    rng = random.Random(seed)
    run = Execution(chat)
    node, plan = run.turn([SYSTEM, TASK], random_answer(rng))
    known = [([SYSTEM, TASK], node, whole(plan, node))]
    for _ in range(8):
        history, base, ids = rng.choice(known)
        said, new = echo(base), random_new(base, rng)
        if rng.random() < 0.75:
            request = [*history, LOSSY[rng.choice(list(LOSSY))](said, rng), *new]
            node, plan = run.turn(request, random_answer(rng))
            assert plan.base is base or twins(plan.base, base), "a lossy echo was taken for another history"
            if plan.base is base:
                assert plan.prompt_ids().tolist()[: len(ids)] == ids
            rest = [*chat.filler(base.completion.ids).ids, *(i for p in chat.units(new) for i in p.ids)]
            assert plan.tail.ids.tolist() == [*rest, *chat.opening.ids]
        else:
            edited = REAL[rng.choice(list(REAL))](said, rng)
            if edited.calls == said.calls and edited.text == said.text:
                continue
            request = [*history, edited, *new]
            node, plan = run.turn(request, random_answer(rng))
            assert plan.base is not base and not twins(plan.base, base), "a real difference was taken for an echo"
        known.append((request, node, whole(plan, node)))


@given(seed=st.integers(0, 10**9))
@settings(max_examples=25, deadline=None)
def test_an_edit_of_an_earlier_message_is_a_branch_from_before_it(chat: ChatModel, seed: int) -> None:
    rng = random.Random(seed)
    run = Execution(chat)
    history, nodes, ends = [SYSTEM, TASK], [], []
    for _ in range(4):
        node, _ = run.turn(history, random_answer(rng))
        nodes.append(node)
        history = [*history, echo(node), *random_new(node, rng)]
        ends.append(len(history))
    place = rng.randrange(3)  # the messages after answer `place` change
    at = ends[place] - 1
    edited = [*history[:at], replace(history[at], text="something else"), *history[at + 1 :]]
    _, plan = run.ask(edited)
    assert plan.base is nodes[place]
    assert plan.spliced == 3 - place, "later answers stand in a new context with their own ids"
