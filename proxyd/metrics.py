"""Numbers for Prometheus, and how late the event loop is. No label holds an execution, a call or any text.

The exposition format is a dozen lines, and the counters live in the core and the service already: a metrics library
would keep them a second time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from proxyd.core import Router
from proxyd.service import Service
from proxyd.state import State

EVERY_S = 0.05
KEPT = 1200  # samples: the last minute
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class LoopLag:
    """How much later than asked a timer rings: what every call on this loop has to wait besides its own work."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=KEPT)

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._late_s.append(max(0.0, loop.time() - due))

    def quantile_s(self, q: float) -> float:
        """Over the last minute; 0.0 before the first sample."""
        ordered = sorted(self._late_s)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


_Family = tuple[str, str, str, dict[str, Any]]  # name, kind, about, value by labels


def exposition(core: Router, service: Service, lag: LoopLag, now: float) -> bytes:
    """All families. Every sample names its shard: a port, by which Prometheus would tell them apart, is a new one after
    each start.
    """
    return "".join(_text(family, f'shard="{core.shard}"') for family in _families(core, service, lag, now)).encode()


def _families(core: Router, service: Service, lag: LoopLag, now: float) -> Iterator[_Family]:
    states = [call.state for call in core.calls.values()]
    calls = {state.value: states.count(state) for state in State}
    yield ("gyre_proxyd_calls", "gauge", "Open calls by state.", {f'state="{k}"': v for k, v in calls.items()})
    yield ("gyre_proxyd_calls_finished_total", "counter", "Answers of this life.", {"": core.finished})
    yield ("gyre_proxyd_calls_moved_total", "counter", "Changes of engine in mid-call.", {"": core.moved})
    tokens = {'kind="prompt"': service.prompt_tokens, 'kind="new_prompt"': service.new_prompt_tokens}
    tokens |= {'kind="sampled"': service.sampled_tokens}
    yield ("gyre_proxyd_tokens_total", "counter", "Tokens of finished calls.", tokens)
    yield ("gyre_proxyd_executions", "gauge", "Open executions.", {"": len(core.executions)})
    flying = {f'cell="{_escaped(c)}"': len(core.on_cell.get(c, ())) for c in core.engines}
    yield ("gyre_proxyd_in_flight", "gauge", "Calls at each engine.", flying)
    usable = {f'cell="{_escaped(e.cell)}"': int(core.usable(e, now)) for e in core.engines.values()}
    yield ("gyre_proxyd_routable", "gauge", "Whether an engine gets new calls.", usable)
    yield ("gyre_proxyd_log_trouble", "gauge", "1 while the call log cannot be written.", _trouble(service))
    lags = {f'quantile="{q}"': round(lag.quantile_s(q), 6) for q in (0.5, 0.99, 1.0)}
    yield ("gyre_proxyd_loop_lag_seconds", "gauge", "Lateness of the event loop in the last minute.", lags)


def _trouble(service: Service) -> dict[str, int]:
    return {"": int(bool(service.log_trouble))}


def _text(family: _Family, shard: str) -> str:
    name, kind, about, values = family
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    for labels, value in values.items():
        lines.append(f"{name}{{{','.join(filter(None, (shard, labels)))}}} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
