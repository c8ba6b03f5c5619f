"""Cells over time as an SVG, one band per arm: plain text, no library."""

from __future__ import annotations

from html import escape

from cellctl.simulate.world import World
from gyre_base.vocabulary import Role

COLOUR = {Role.ROLLOUT: "#4c9f70", Role.TRAIN: "#7a4fb5", Role.TO_TRAIN: "#e3b23c", Role.TO_ROLLOUT: "#e3b23c"}
WIDTH, LEFT, ROW, GAP, LEVEL = 1100, 70, 14, 34, 46


def draw(worlds: list[World]) -> str:
    """All worlds (run with `trace=True`) under one time axis, the longest fills the width."""
    longest = max(w.now for w in worlds)
    scale = (WIDTH - LEFT - 10) / longest
    parts: list[str] = []
    top = GAP
    for world in worlds:
        parts.extend(_arm(world, top, scale))
        top += len(world.nodes) * ROW + LEVEL + GAP
    parts.extend(_axis(top - GAP + 6, scale, longest))
    legend = _legend(top + 10)
    size = f'width="{WIDTH}" height="{top + 40}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, *legend, "</svg>"]) + "\n"


def _arm(world: World, top: int, scale: float) -> list[str]:
    title = (
        f"{world.arm.name} ({world.arm.policy}): {world.now / 3600:.2f} h, idle {100 * world.meter.idle_share():.1f} %"
    )
    out = [f'<text x="{LEFT}" y="{top - 6}" font-weight="bold">{escape(title)}</text>']
    assert world.trace is not None
    for index, cell in enumerate(world.nodes):
        y = top + index * ROW
        out.append(f'<text x="4" y="{y + 10}">{cell} x{world.nodes[cell]}</text>')
        changes = [(0.0, Role.ROLLOUT), *((at, role) for at, name, role in world.trace.roles if name == cell)]
        for (begin, role), (end, _) in zip(changes, [*changes[1:], (world.now, Role.DOWN)], strict=True):
            x, width = LEFT + begin * scale, max(0.3, (end - begin) * scale)
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 2}" fill="{COLOUR[role]}"/>')
    out.append(_level(world, top + len(world.nodes) * ROW, scale))
    return out


def _level(world: World, top: int, scale: float) -> str:
    """The water level, thinned to one point per pixel; between two events it stands."""
    assert world.trace is not None
    most = max((level for _, level in world.trace.levels), default=1) or 1
    points: dict[int, float] = {}
    for at, level in world.trace.levels:
        points[round(LEFT + at * scale)] = top + LEVEL - 4 - (LEVEL - 8) * level / most
    corners: list[tuple[int, float]] = []
    for x, y in points.items():
        corners.extend([(x, corners[-1][1]), (x, y)] if corners else [(x, y)])
    path = " ".join(f"{x},{y:.1f}" for x, y in corners)
    label = f'<text x="4" y="{top + LEVEL // 2}">in flight</text>'
    return f'{label}<polyline points="{path}" fill="none" stroke="#2c6fbb"/>'


def _axis(top: int, scale: float, longest_s: float) -> list[str]:
    """About ten marks, at whole hours."""
    every_h = max(1, round(longest_s / 36000.0))
    out = []
    for hour in range(0, int(longest_s / 3600.0) + 1, every_h):
        x = LEFT + hour * 3600.0 * scale
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 5}" stroke="#555"/>')
        out.append(f'<text x="{x:.1f}" y="{top + 17}" fill="#555">{hour} h</text>')
    return out


def _legend(top: int) -> list[str]:
    words = (("serves", Role.ROLLOUT), ("trains", Role.TRAIN), ("turns", Role.TO_TRAIN))
    return [
        f'<rect x="{LEFT + 90 * i}" y="{top}" width="12" height="12" fill="{COLOUR[role]}"/>'
        f'<text x="{LEFT + 90 * i + 17}" y="{top + 10}">{word}</text>'
        for i, (word, role) in enumerate(words)
    ]
