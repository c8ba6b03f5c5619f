"""One execution on one page, for a terminal, for other programs, or as an HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from gyre_base.rundir import RunDir
from gyre_cli import common

PARTS_SHOWN = 24
INSTRUCTION_CHARS = 1_200
GOOD = ("scored", "partial", "no_artifact")
FAILED = ("infra_failed", "evaluator_failed")
REASON_CHARS = 200


def history_of(run: RunDir, page: Any) -> Any:
    """The tree of its calls, or None if no call was recorded. The log has calls only: the outcome is told to it."""
    from gyre_base.runfile import Reward
    from trajtools.load import Stream
    from trajtools.tree import history

    if not any(run.path("calls").glob("*.gtr")):
        return None
    found = next((one for one in Stream(run.path("calls")).executions() if one.id == page.execution), None)
    if found is None:
        return None
    done = page.outcome or {"outcome": "unscored"}
    found.others.append(Reward(exec=page.execution, status=str(done["outcome"]), value=done.get("score")))
    return history(found)


def all_of(run: RunDir) -> list[dict[str, Any]]:
    """A row per execution, in the order of their names."""
    from gyre_exec.show import outcome_of
    from gyre_exec.story import names, stories

    told = {story.execution: story for story in stories(run)}
    rows = []
    for name in sorted({*told, *names(run)}):
        story, done = told.get(name), outcome_of(run.path("executions", name), told.get(name)) or {}
        row = {"execution": name, "task": story.task_id if story else "", "outcome": done.get("outcome", "")}
        rows.append({**row, **{key: done.get(key) for key in ("score", "calls", "wall_s", "waited_s", "error")}})
    if not rows:
        common.fail(f"nothing has run in {run.root} yet", common.NO)
    return rows


def failures(rows: list[dict[str, Any]], most: int = 5) -> list[str]:
    """The commonest reasons of failures that are nobody's score, each with an execution to look into."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["outcome"] in FAILED:
            words = (row["error"] or "no word").strip().splitlines()
            found.setdefault((row["outcome"], words[-1][:REASON_CHARS]), []).append(row["execution"])
    common_first = sorted(found.items(), key=lambda item: -len(item[1]))
    return [f"{len(names)} {outcome}, such as {names[0]}: {why}" for (outcome, why), names in common_first[:most]]


def facts(page: Any) -> list[tuple[str, str]]:
    """What it was."""
    order, done = page.order, page.outcome or {}
    version = f" {done['evaluator_version']}" if done.get("evaluator_version") else ""
    rows = [
        ("task", str(order.get("task", {}).get("id", "not recorded"))),
        ("group", f"{order.get('group', '-')}, attempt {order.get('attempt', '-')}, {order.get('purpose', '-')}"),
        ("executor", page.executor or "-"),
        ("outcome", str(done.get("outcome", "none: it has not ended, or its executor was lost"))),
        ("score", "-" if done.get("score") is None else common.plain(done["score"])),
        ("evaluator", f"{done.get('evaluator') or '-'}{version}"),
        ("harness", f"exit code {common.plain(done.get('exit_code'))}, {done.get('calls', 0)} answered calls"),
    ]
    if done.get("harness_errors"):
        rows.append(("errors shown", f"{done['harness_errors']} errors of ours reached the harness"))
    if done.get("error"):
        rows.append(("error", str(done["error"])))
    if page.others:
        rows.append(("other attempts", ", ".join(page.others)))
    return rows


def parts(page: Any) -> list[tuple[str, float]]:
    """Score parts, what failed first."""
    table = (page.outcome or {}).get("parts") or {}
    return sorted(table.items(), key=lambda item: (item[1], item[0]))


def clock_rows(page: Any) -> list[tuple[str, str, str]]:
    return [(what, "-" if s is None else duration(s), remark) for what, s, remark in page.clocks]


def progress_rows(page: Any) -> list[tuple[str, str]]:
    return [
        (duration(row["ran_s"]), row["verdict"] if row["score"] is None else common.plain(row["score"]))
        for row in page.progress
    ]


def duration(seconds: float) -> str:
    """0.29 s, 12.5 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def as_json(page: Any, told: Any) -> dict[str, Any]:
    import dataclasses

    body = {**dataclasses.asdict(page), "clocks": {what: s for what, s, _ in page.clocks}}
    return {**body, "tree": [line.as_json(page.execution) for line in told.lines()] if told else []}


# ---- terminal -----------------------------------------------------------------------------------------------------


def show(page: Any, told: Any) -> None:
    """On stdout; colours only on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line, style in lines(page, told):
        console.print(Text(line, style=style))


def lines(page: Any, told: Any) -> Iterator[tuple[str, str]]:
    """(line, style)."""
    yield page.execution, "bold"
    for what, value in facts(page):
        yield f"  {what:<22} {value}", _style_of(what, value)
    yield from _section("instruction", instruction(page).splitlines() or ["not recorded"])
    yield from _section(
        "clocks", [f"{what:<22} {value:>9}  {remark}".rstrip() for what, value, remark in clock_rows(page)]
    )
    table = parts(page)
    if table:
        yield f"\nscore parts ({sum(v >= 1 for _, v in table)} of {len(table)} in full)", "bold"
        for name, part in table[:PARTS_SHOWN]:
            yield f"  {common.plain(part):>6}  {name}", "" if part >= 1 else "red"
        if len(table) > PARTS_SHOWN:
            yield f"  … {len(table) - PARTS_SHOWN} more, none lower (--json has all)", "dim"
    if page.progress:
        yield from _section("scores while it ran", [f"{after:>9}  {score}" for after, score in progress_rows(page)])
    yield from _calls(told)
    yield from _workspace(page)
    for name in ("stdout", "stderr"):
        yield from _section(f"end of {name}", getattr(page, name).splitlines() or ["nothing"])


def instruction(page: Any) -> str:
    text: str = page.instruction.strip()
    return text if len(text) <= INSTRUCTION_CHARS else f"{text[:INSTRUCTION_CHARS]} …"


def _style_of(what: str, value: str) -> str:
    if what == "outcome":
        return "green" if value in GOOD else "red"
    return "red" if what in ("error", "errors shown") else ""


def _section(title: str, rows: list[str]) -> Iterator[tuple[str, str]]:
    yield f"\n{title}", "bold"
    for row in rows:
        yield f"  {row}", ""


def _calls(told: Any) -> Iterator[tuple[str, str]]:
    from trajtools.tree import terminal

    yield "\ncalls", "bold"
    if told is None:
        yield "  none recorded", ""
        return
    for row in terminal(told):
        yield f"  {row}", ""


def _workspace(page: Any) -> Iterator[tuple[str, str]]:
    yield f"\nworkspace against the task's own files ({page.state})", "bold"
    if page.changes is None:
        return
    if not page.changes:
        yield "  nothing changed", ""
    for change in page.changes:
        yield f"  {change.what} {change.path}" + (f": {change.note}" if change.note else ""), "bold"
        for line in change.lines:
            yield f"    {line}", {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
    if page.left_out_lines:
        yield f"  … {page.left_out_lines} more lines", "dim"


# ---- HTML ---------------------------------------------------------------------------------------------------------

STYLE = (
    "body{font:14px/1.5 Helvetica,Arial,sans-serif;max-width:1180px;margin:24px auto;padding:0 16px;color:#1c2733}"
    "h1{font-size:22px;margin:0 0 .2em}h2{font-size:15px;margin:1.8em 0 .4em;border-bottom:1px solid #e3e6eb}"
    "table{border-collapse:collapse}td{padding:2px 14px 2px 0;vertical-align:top}td:first-child{color:#55606e}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}pre{background:#f6f7f9;padding:10px 12px;margin:.3em 0;"
    "border-radius:6px;overflow-x:auto;font-size:12.5px;white-space:pre-wrap;overflow-wrap:anywhere}"
    ".badge{display:inline-block;padding:1px 10px;border-radius:10px;color:#fff;background:#b23b3b}"
    ".good{background:#2f7d4f}"
    ".add{color:#1d6b3a}.del{color:#a32f2f}.at{color:#2563a8}.parts{columns:3;list-style:none;padding:0;margin:0}"
    ".parts li{break-inside:avoid;overflow-wrap:anywhere}.bad{color:#a32f2f}svg{max-width:100%;height:auto}"
    "small{color:#55606e}"
)


def html(page: Any, told: Any) -> str:
    """The whole page as one file; all text is escaped, nothing is fetched."""
    done = page.outcome or {}
    outcome = str(done.get("outcome", "unfinished"))
    score = "" if done.get("score") is None else f" {common.plain(done['score'])}"
    badge = f'<span class="badge{" good" if outcome in GOOD else ""}">{escape(outcome + score)}</span>'
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in facts(page))
    clock = "".join(
        f'<tr><td>{escape(k)}</td><td class="n">{escape(v)}</td><td><small>{escape(r)}</small></td></tr>'
        for k, v, r in clock_rows(page)
    )
    sections = [
        f"<h1>{escape(page.execution)} {badge}</h1><table>{rows}</table>",
        f"<h2>instruction</h2><pre>{escape(instruction(page) or 'not recorded')}</pre>",
        f"<h2>clocks</h2><table>{clock}</table>",
        _html_parts(page),
        _html_progress(page),
        _html_calls(told),
        _html_workspace(page),
        *(f"<h2>end of {n}</h2><pre>{escape(getattr(page, n) or 'nothing')}</pre>" for n in ("stdout", "stderr")),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(page.execution)}</title><style>{STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _html_parts(page: Any) -> str:
    table = parts(page)
    if not table:
        return ""
    items = "".join(
        f'<li class="{"" if value >= 1 else "bad"}">{escape(common.plain(value))} {escape(name)}</li>'
        for name, value in table
    )
    whole = sum(value >= 1 for _, value in table)
    return f'<h2>score parts ({whole} of {len(table)} in full)</h2><ul class="parts">{items}</ul>'


def _html_progress(page: Any) -> str:
    if not page.progress:
        return ""
    cells = (f'<tr><td class="n">{escape(a)}</td><td>{escape(s)}</td></tr>' for a, s in progress_rows(page))
    return f"<h2>scores while it ran</h2><table>{''.join(cells)}</table>"


def _html_calls(told: Any) -> str:
    from trajtools import picture

    if told is None:
        return "<h2>calls</h2><p>none recorded</p>"
    return f"<h2>calls</h2>{picture.svg(told)}"


def _html_workspace(page: Any) -> str:
    out = [f"<h2>workspace against the task's own files <small>({escape(page.state)})</small></h2>"]
    for change in page.changes or ():
        note = f" <small>{escape(change.note)}</small>" if change.note else ""
        out.append(f"<p><b>{escape(change.what)} {escape(change.path)}</b>{note}</p>")
        if change.lines:
            out.append(f"<pre>{''.join(map(_html_line, change.lines))}</pre>")
    if page.changes == ():
        out.append("<p>nothing changed</p>")
    if page.left_out_lines:
        out.append(f"<p><small>… {page.left_out_lines} more lines</small></p>")
    return "".join(out)


def _html_line(line: str) -> str:
    kind = {"+": "add", "-": "del", "@": "at"}.get(line[:1], "")
    return f'<span class="{kind}">{escape(line)}</span>\n' if kind else f"{escape(line)}\n"


def write(page: Any, told: Any, target: Path) -> None:
    try:
        target.write_text(html(page, told), encoding="utf-8")
    except OSError as error:
        common.fail(f"cannot write {target}: {error.strerror}", common.USAGE)
