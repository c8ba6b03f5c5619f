"""Gain over whole-pool switching against the number of cells, as an SVG: one line per site, the bars are its range."""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 360, 60, 44, 24, 150
COLOURS = ("#2c6fbb", "#7a4fb5", "#4c9f70", "#e3b23c", "#b5484f")


def draw(lines: dict[str, list[dict[str, Any]]]) -> str:
    """`lines`: by name, rows of `plan.break_even`."""
    rows = [row for line in lines.values() for row in line]
    most_cells: int = max(row["cells"] for row in rows)
    top: float = max(1.1, *(row["range"][1] for row in rows)) + 0.05
    floor: float = min(0.95, *(row["range"][0] for row in rows))

    def x(cells: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (cells - 1) / max(1, most_cells - 1)

    def y(gain: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - gain) / (top - floor)

    size = f'width="{WIDTH}" height="{HEIGHT}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    out.append('<rect width="100%" height="100%" fill="white"/>')
    for tenth in range(int(floor * 10) + 1, int(top * 10) + 1):
        at, width = y(tenth / 10), 1.5 if tenth == 10 else 0.5
        line = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"'
        out.append(f'<line {line} stroke="#999" stroke-width="{width}"/>')
        out.append(f'<text x="{LEFT - 32}" y="{at + 4:.1f}">{tenth / 10:.1f}</text>')
    for cells in sorted({row["cells"] for row in rows}):
        out.append(f'<text x="{x(cells) - 3:.1f}" y="{HEIGHT - BOTTOM + 18}">{cells}</text>')
    out.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">cells (one cell is whole-pool switching)</text>')
    out.append(f'<text x="8" y="{TOP - 8}">gain over colocate</text>')
    for number, (name, line_rows) in enumerate(lines.items()):
        out.extend(_line(name, line_rows, COLOURS[number % len(COLOURS)], x, y))
    return "\n".join([*out, "</svg>"]) + "\n"


def _line(name: str, rows: list[dict[str, Any]], colour: str, x: Any, y: Any) -> list[str]:
    points = " ".join(f"{x(r['cells']):.1f},{y(r['gain_over_colocate']):.1f}" for r in rows)
    out = [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for r in rows:
        at, (low, high) = f"{x(r['cells']):.1f}", r["range"]
        out.append(f'<line x1="{at}" x2="{at}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke="{colour}"/>')
        out.append(f'<circle cx="{at}" cy="{y(r["gain_over_colocate"]):.1f}" r="3" fill="{colour}"/>')
    last = rows[-1]
    out.append(
        f'<text x="{x(last["cells"]) + 8:.1f}" y="{y(last["gain_over_colocate"]) + 4:.1f}" fill="{colour}">'
        f"{escape(name)}</text>"
    )
    return out
