"""An engine's stream of one submission, put together. Pure.

The totals in `meta_info` rule: a chunk may repeat what was sent (cumulative streams; an abort chunk repeats the last
id and carries every logprob), so lists are cut to what is new and never appended blindly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gyre_base.runfile import Span

T = TypeVar("T")


class BadStream(ValueError):
    """An engine said something that can't be a continuation. What was taken before stays good."""


@dataclass(slots=True)
class Sampled:
    """Tokens of one submission so far. `version` is what the engine last said it serves."""

    version: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: str = ""  # stop, length, abort; empty while it runs
    why: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    routed: str = ""  # experts of all of these tokens, as the engine wrote them

    def take(self, chunk: dict[str, Any]) -> None:
        """One chunk. Raises BadStream."""
        try:
            meta = chunk["meta_info"]
            total = int(meta["completion_tokens"])
            given_ids = chunk.get("output_ids") or []
            entries = meta.get("output_token_logprobs") or []
        except (KeyError, TypeError, ValueError) as error:
            raise BadStream(f"not a chunk of /generate: {error!r}") from None
        new = total - len(self.ids)
        if new < 0:
            raise BadStream(f"completion_tokens fell from {len(self.ids)} to {total}")
        fresh = given_ids if len(given_ids) == new else _newest(given_ids, new, total, "output_ids")
        scored = entries if len(entries) == new else _newest(entries, new, total, "output_token_logprobs")
        if [e[1] for e in scored] != fresh:
            raise BadStream("the logprobs are of other tokens than output_ids")
        self.ids += fresh
        logprobs = [e[0] for e in scored]
        try:
            sum(logprobs)  # all are numbers, which is nearly always so
        except TypeError:
            logprobs = [math.nan if p is None else float(p) for p in logprobs]
        self.logprobs += logprobs
        self.version = str(meta.get("weight_version") or self.version)
        self.prompt_tokens = meta.get("prompt_tokens", self.prompt_tokens)
        self.cached_tokens = meta.get("cached_tokens") or 0
        if (reason := meta.get("finish_reason")) is not None:
            self._finish(reason, meta)

    def _finish(self, reason: Any, meta: dict[str, Any]) -> None:
        self.finish = str(reason.get("type", "stop")) if isinstance(reason, dict) else str(reason)
        self.why = str(reason.get("message") or "") if isinstance(reason, dict) else ""
        self.routed = str(meta.get("routed_experts") or "")
        given = meta.get("weight_versions") or []
        self.spans = [Span(str(s["version"]), int(s["start"]), int(s["end"])) for s in given]

    def versions(self) -> list[Span]:
        """Spans that cover exactly the ids, whatever the engine said before it went."""
        count, at, out = len(self.ids), 0, []
        for span in self.spans:
            end = min(span.end, count)
            if span.start == at and end > at:
                out.append(Span(span.policy, at, end))
                at = end
        if at < count:
            out.append(Span(self.version, at, count))
        return out

    def verdict(self, asked: int, stop_ids: frozenset[int]) -> str:
        """stop or length if nothing more is to be sampled, else empty: the call goes on elsewhere."""
        if self.ids and self.ids[-1] in stop_ids:
            return "stop"
        if len(self.ids) >= asked:
            return "length"
        return self.finish if self.finish in ("stop", "length") else ""


def _newest(given: list[T], new: int, total: int, what: str) -> list[T]:
    """The last `new` entries of an incremental or cumulative list."""
    if len(given) < new or len(given) > total + 1:
        raise BadStream(f"{len(given)} {what} for {new} new tokens of {total}")
    return given[len(given) - new :] if new else []


def join_spans(spans: list[Span], more: list[Span], offset: int) -> list[Span]:
    """Spans of a call over several submissions. Neighbours of one version stay two: each is one submission."""
    return spans + [Span(s.policy, s.start + offset, s.end + offset) for s in more]
