"""A finished call to its record in the run file, and records of an earlier life back to the tree. Pure.

Beside the run file's own keys a call carries `capture`: what the tree needs to go on after a restart (digests, no
text): `start` = digest of the request, `asked`, `root`, `waited_s`, `moved`, `purpose`, `named`.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from gyre_base.routing import NAME, RoutingShape, known
from gyre_base.runfile import Call, Logprobs, Note, Record, Sampling, Span, context_digest
from proxyd.capture import Forest, Node, Plan
from proxyd.chat import ChatModel, Piece
from proxyd.labels import Relabel, Root, label_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """What an unfinished call has so far, over all its submissions."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    resent: int = 0  # tokens that were sent again, to another engine
    reread: int = 0  # of these, those that it did not compute again
    routed: list[tuple[int, int, str]] = field(default_factory=list)  # submissions: first token, tokens, their experts


@dataclass(slots=True)
class Facts:
    """The circumstances of a finished call."""

    execution: str
    call: str
    seq: int
    t0: float
    t1: float
    finish: str
    temperature: float
    waited_s: float
    moved: int
    ill_formed: int
    named: str = ""  # the agent's id in the harness's headers


def call_record(
    facts: Facts, plan: Plan, completion: Piece, progress: Progress, routing: RoutingShape | None = None
) -> Call:
    """The record. Logprobs that an engine did not give are NaN: context, never a target. With `routing` it has the
    experts of each token; `capture.unrouted` counts the tokens of which no engine said them.
    """
    prompt = plan.prompt_ids()
    capture = {
        "start": plan.start.hex(),
        "asked": plan.asked,
        "root": plan.root.to_json() if plan.root is not None else None,
        "waited_s": facts.waited_s,
        "moved": facts.moved,
    }
    if progress.resent:
        capture["resent"] = [progress.resent, progress.reread]
    if facts.ill_formed:
        capture["ill_formed"] = facts.ill_formed
    if plan.spliced:
        capture["spliced"] = plan.spliced
    if plan.purpose != "turn":
        capture["purpose"] = plan.purpose
    if facts.named:
        capture["named"] = facts.named
    arrays = {}
    if routing is not None:
        rows, wrong = routing.spliced(len(progress.ids), progress.routed)
        if missing := int((~known(rows)).sum()):
            capture["unrouted"] = missing
        if wrong:
            log.warning("call %s: routing that can't be used: %s", facts.call, "; ".join(wrong))
        arrays[NAME] = rows
    return Call(
        exec=facts.execution,
        call=facts.call,
        seq=facts.seq,
        t0=facts.t0,
        t1=facts.t1,
        agent=plan.agent,
        label=label_of(plan.agent, plan.purpose),
        parent=plan.base.call if plan.base is not None else None,
        attempt=plan.attempt,
        finish=facts.finish,
        spans=tuple(progress.spans),
        sampling=Sampling(temperature=facts.temperature),
        context=context_digest(prompt),
        prompt_ids=prompt,
        completion_ids=np.frombuffer(completion.ids, np.int32),
        logprobs=_floats32(progress.logprobs),
        arrays=arrays,
        extra={"capture": capture},
    )


def _floats32(values: list[float]) -> Logprobs:
    try:
        return np.frombuffer(struct.pack(f"{len(values)}f", *values), np.float32)  # several times faster than numpy's
    except (OverflowError, struct.error):  # a number that float32 has none for
        return np.array(values, np.float32)


def relabel_note(execution: str, relabel: Relabel) -> Note:
    """What an earlier call turned out to be; readers apply it to the call's purpose and label."""
    about = {"call": relabel.call, "purpose": relabel.purpose, "label": relabel.label}
    return Note(text="relabel", exec=execution, extra=about)


def restore(records: Iterable[Record], chat: ChatModel, wanted: set[str]) -> dict[str, Forest]:
    """The trees of the wanted executions, as they were."""
    forests: dict[str, Forest] = {}
    for record in records:
        if isinstance(record, Note) and record.text == "relabel" and record.exec in forests:
            forests[record.exec].labels.relabelled(str(record.extra.get("call")))
        if isinstance(record, Call) and record.exec in wanted:
            forest = forests.setdefault(record.exec, Forest(chat))
            if record.call not in forest.calls:
                _restore_call(record, forest, chat)
    return forests


def _restore_call(call: Call, forest: Forest, chat: ChatModel) -> None:
    capture = call.extra.get("capture") or {}
    base = forest.calls.get(call.parent) if call.parent else None
    keep = base.tokens if base is not None else 0
    completion = Piece.of(call.completion_ids.tolist())
    parsed = chat.parse(completion.ids, call.call)
    try:
        start = bytes.fromhex(capture["start"])
        root = Root(*capture["root"]) if capture.get("root") else None
    except (KeyError, TypeError, ValueError) as error:
        log.warning("call %s of %s can't be continued: its capture data is broken (%r)", call.call, call.exec, error)
        start, root = b"", None
    node = Node(
        call=call.call,
        agent=call.agent,
        base=base,
        asked=bool(capture.get("asked")),
        start=start,
        tail=Piece.of(call.prompt_ids[keep:].tolist()),
        completion=completion,
        spoken=parsed.spoken,
        reasoning_tokens=parsed.reasoning_tokens,
        finish=call.finish or "stop",
        tokens=len(call.prompt_ids) + len(completion.ids),
        at=call.t1,
        waited_s=float(capture.get("waited_s") or 0.0),
    )
    forest.restored(node, root, call.attempt, str(capture.get("purpose") or "turn"))
    if capture.get("named"):
        forest.labels.named(call.agent, str(capture["named"]))
