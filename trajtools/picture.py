"""A history as a picture: one bar per line, tokens from left to right, branches below what they leave.

Owns the SVG and the page around it. Self-contained: no script, no font, nothing fetched. Text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trajtools.tree import History, Line
from trajtools.words import short

WIDTH, LEFT, RIGHT, ROW, BAR = 1180, 20, 330, 26, 12
COLOURS = {
    "main": "#2563a8",
    "main-summary": "#7a4fa3",
    "sub-agent": "#1f8a6d",
    "sub-agent-summary": "#a8762a",
    "context": "#8a8f98",
}
FADED = "#c3c8d0"
MAX_LINES = 400  # a picture of more is no picture


def svg(told: History) -> str:
    """One execution as a whole SVG document."""
    body, height = _body(told, 64)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height + 46}" '
        f'viewBox="0 0 {WIDTH} {height + 46}" font-family="Helvetica, Arial, sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{_head(told)}{body}{_legend(height + 24)}</svg>\n'
    )


def html(histories: Sequence[History]) -> str:
    """All executions as one page."""
    parts = []
    for told in histories:
        rows = "".join(_table_row(line, told) for line in told.lines())
        parts.append(
            f"<section><h2>{escape(told.execution)}</h2>{svg(told)}"
            f"<details><summary>table</summary><table><tr>{_titles(told.unit)}</tr>{rows}</table></details></section>"
        )
    style = (
        "body{font:14px/1.45 Helvetica,Arial,sans-serif;margin:24px;color:#1c2733}h2{margin:1.4em 0 .1em}"
        "svg{max-width:100%;height:auto;border:1px solid #e3e6eb;border-radius:6px}"
        "table{border-collapse:collapse;margin:.6em 0}td,th{padding:2px 10px;text-align:right;"
        "border-bottom:1px solid #eef0f3}"
        "td:nth-child(-n+3),th:nth-child(-n+3){text-align:left}summary{cursor:pointer;color:#2563a8}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>trajtools tree</title>'
        f"<style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _titles(unit: str) -> str:
    names = ("line", "class", "agent", "calls", unit, "sampled", "trained", "fate", "left by")
    return "".join(f"<th>{name}</th>" for name in names)


def _table_row(line: Line, told: History) -> str:
    del told
    cells = (
        f"{'· ' * line.level}{line.id}", line.kind, line.agent, f"{len(line.calls):,}",
        f"{line.start:,} – {line.end:,}", f"{line.sampled:,}", f"{line.owned:,}", line.fate, line.left_by,
    )  # fmt: skip
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _head(told: History) -> str:
    breaks = ", ".join(f"{n} {kind}" for kind, n in told.breaks.items()) or "no breaks"
    return (
        f'<text x="{LEFT}" y="24" font-size="14" font-weight="bold" fill="#1c2733">{escape(told.title())}</text>'
        f'<text x="{LEFT}" y="43" fill="#55606e">{escape(breaks)}</text>'
    )


def _body(told: History, top: int) -> tuple[str, int]:
    """(bars, the axis and the branches, where they end)."""
    lines = list(told.lines())
    hidden, lines = len(lines) - MAX_LINES, lines[:MAX_LINES]
    longest = max((line.end for line in lines), default=1) or 1
    scale = (WIDTH - LEFT - RIGHT) / longest
    y_of = {line.id: top + 16 + i * ROW for i, line in enumerate(lines)}
    bottom = top + 16 + len(lines) * ROW
    parts = [_axis(longest, scale, top, bottom, told.unit)]
    for line in lines:
        if line.parent is not None and line.parent in y_of:
            x, above, here = LEFT + line.start * scale, y_of[line.parent] + BAR, y_of[line.id] + BAR / 2
            curve = f"M{x:.1f},{above:.1f} V{here - 6:.1f} q0,6 6,6"
            parts.append(f'<path d="{curve}" fill="none" stroke="#9aa3af" stroke-width="1.2"/>')
    parts.extend(_bar(line, y_of[line.id], scale, told.unit) for line in lines)
    if hidden > 0:
        parts.append(f'<text x="{LEFT}" y="{bottom + 12}" fill="#55606e">and {hidden:,} more lines</text>')
        bottom += ROW
    return "".join(parts), bottom


def _axis(longest: int, scale: float, top: int, bottom: int, unit: str) -> str:
    step = 10 ** (len(str(longest)) - 1)
    step = next(s for s in (step // 5, step // 2, step, step * 2) if s and longest / s <= 8) if longest > 8 else 1
    out = []
    for value in range(0, longest + 1, step):
        x = LEFT + value * scale
        label = f"{value:,}" + (f" {unit}" if value == 0 else "")
        out.append(f'<path d="M{x:.1f},{top} V{bottom}" stroke="#eceef2"/>')
        out.append(f'<text x="{x:.1f}" y="{top - 4}" font-size="10" fill="#8a8f98">{label}</text>')
    return "".join(out)


def _bar(line: Line, y: float, scale: float, unit: str) -> str:
    trained = line.fate == "kept" or unit != "tokens"
    colour = COLOURS.get(line.kind, COLOURS["context"])
    x, width = LEFT + line.start * scale, max((line.end - line.start) * scale, 2.0)
    tip = f"{line.kind} {line.agent}: {len(line.calls)} calls, {line.start:,} to {line.end:,}"
    fill = colour if trained else FADED
    out = [f'<g><title>{escape(tip)}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2.5" ']
    out.append(f'fill="{fill}" fill-opacity="{0.28 if trained else 0.6}"/>')
    for prompt, end, owned in line.marks:
        first = max(prompt, line.start)
        ink = colour if owned or unit != "tokens" else "#7c838d"
        size = max((end - first) * scale, 0.8)
        out.append(f'<rect x="{LEFT + first * scale:.1f}" y="{y}" width="{size:.1f}" height="{BAR}" fill="{ink}"/>')
    who = line.kind + (f" {short(line.agent)}" if line.agent not in ("main", "") else "")
    count = f"{len(line.calls)} call{'' if len(line.calls) == 1 else 's'}"
    why = f" · {line.left_by}" if line.left_by else ""
    fate = f" · {line.owned:,} trained" if line.owned else ""
    fate += f" · {line.fate}" if unit == "tokens" and line.fate != "kept" else ""
    label = escape(f"{who} · {count}{fate}{why}")
    halo = 'stroke="#ffffff" stroke-width="3" paint-order="stroke"'  # connectors run behind the text
    out.append(
        f'<text x="{x + width + 6:.1f}" y="{y + BAR - 2}" font-size="11" fill="#3a4552" {halo}>{label}</text></g>'
    )
    return "".join(out)


def _legend(y: float) -> str:
    out, x = [], float(LEFT)
    entries = [*COLOURS.items(), ("not trained", FADED)]
    for name, colour in entries:
        out.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="10" rx="2" fill="{colour}"/>')
        out.append(f'<text x="{x + 17:.0f}" y="{y + 9}" font-size="11" fill="#55606e">{name}</text>')
        x += 34 + 6.4 * len(name)
    out.append(f'<text x="{x:.0f}" y="{y + 9}" font-size="11" fill="#55606e">solid: sampled, light: context</text>')
    return "".join(out)
