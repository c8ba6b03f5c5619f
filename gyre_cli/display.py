"""The live view of a run: a panel on a terminal, a line every few seconds elsewhere. Goes to stderr; stdout is for
data.
"""

from __future__ import annotations

import sys
import time
from typing import Any

ROLE_STYLE = {"rollout": "green", "train": "magenta", "to-train": "yellow", "to-rollout": "yellow"}
LINE_EVERY_S = 10.0
BARS = "▁▂▃▄▅▆▇█"


class Display:
    """Call `update(rows)` with the scheduler's status; use as a context manager."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._title, self._quiet = title, quiet
        self._tty = sys.stderr.isatty() and not quiet
        self._live: Any = None
        self._started = time.monotonic()
        self._last_line = 0.0
        self._scores: list[float] = []
        self._step = -1
        self._alarms: set[str] = set()  # that stand and were told

    def __enter__(self) -> Display:
        if self._tty:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line of its own above the panel."""
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def update(self, rows: list[dict[str, Any]]) -> None:
        run = rows[0]
        if run["step"] != self._step and run.get("score") is not None:
            self._step = run["step"]
            self._scores.append(run["score"])
        standing = {row["alarm"]: row["what"] for row in rows if "alarm" in row}
        for name in standing.keys() - self._alarms:
            self.say(f"alarm: {name}: {standing[name]}")
        self._alarms = set(standing)
        if self._live is not None:
            self._live.update(self._panel(rows), refresh=True)
        elif not self._quiet and time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line = time.monotonic()
            print(one_line(rows, time.monotonic() - self._started), file=sys.stderr, flush=True)

    def _panel(self, rows: list[dict[str, Any]]) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        run = rows[0]
        facts = Table.grid(padding=(0, 2))
        facts.add_row("phase", Text(run["run"], style="bold"), "policy", run["policy"], "elapsed", self._elapsed())
        facts.add_row(
            "step",
            f"{run['step']}/{run['steps']} (burst to {run['burst_end']})",
            "switches",
            f"{run['switches']:g}, {run['moved_mid_generation']:g} calls moved mid-generation",
            Text("E[d]"),
            f"{run['mean_staleness']:.2f}",
        )
        cells = Table(box=None, padding=(0, 2))
        for column in ("cell", "role", "for", "version", "why"):
            cells.add_column(column, no_wrap=column != "why")
        for row in rows[1:]:
            if "cell" in row:
                style = ROLE_STYLE.get(row["role"], "red")
                cells.add_row(
                    row["cell"], Text(row["role"], style=style), f"{row['since_s']:.0f} s", row["version"], row["why"]
                )
        level = Text.assemble(
            ("water level ", ""),
            (f"{run['water_level']:>4}", "cyan"),
            (f" of {run['serving_slots']} serving slots", ""),
        )
        score = Text(f"score of the last groups {format_score(run['score'])}  {spark(self._scores[-60:])}")
        bar = Table.grid()  # a grid ends its line, a bare bar does not
        bar.add_row(ProgressBar(total=run["steps"], completed=run["step"], width=60))
        return Panel(Group(facts, bar, level, cells, score, Text(run["forecast"], style="dim")), title=self._title)

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._started)
        return f"{seconds // 60}:{seconds % 60:02d}"


def format_score(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"


def spark(values: list[float]) -> str:
    """Scores in [0, 1] as a row of bars."""
    return "".join(BARS[min(len(BARS) - 1, int(max(0.0, v) * len(BARS)))] for v in values)


def one_line(rows: list[dict[str, Any]], elapsed_s: float) -> str:
    """The same for a log file."""
    run = rows[0]
    roles = " ".join(f"{r['cell']}={r['role']}" for r in rows[1:] if "cell" in r)
    return (
        f"[{elapsed_s:5.0f} s] {run['run']} step {run['step']}/{run['steps']} level {run['water_level']} "
        f"score {format_score(run['score'])} switches {run['switches']:g} {roles}"
    )
