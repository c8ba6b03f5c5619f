"""Other tools' records as records of a run file: token level where ids exist, else text level, never invented ids.

Owns recognising a format by its first object. What a reader has to leave out it counts in a note. docs/trajtools.md has
the table of formats and what each one can't tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from gyre_base.runblocks import Blocks
from gyre_base.runfile import Note, Record

FORMATS = (
    "gyre.run", "claude-code", "codex", "chat-log", "swe-agent", "mini-swe-agent", "openhands", "nemo-gym", "nemo-rl",
    "verifiers", "atif",
)  # fmt: skip
_MAX_WHOLE = 1 << 31


class UnknownFormat(ValueError):
    """Not a record that we can read; the text says what was seen."""


def recognise(file: BinaryIO, name: str, blocks: Blocks, path: Path | None) -> tuple[str, Iterator[Record]]:
    """(format, its records) of an open file; ("gyre.run", nothing) if it is one of ours. Raises UnknownFormat."""
    data = file.read(_MAX_WHOLE).lstrip(b"\xef\xbb\xbf")
    if not data.strip():
        return "gyre.run", iter(())
    whole = _parsed(data)
    objects = [_parsed(line) for line in data.splitlines() if line.strip()] if whole is None else [whole]
    first = next((o for o in objects if isinstance(o, dict)), None)
    if isinstance(first, dict) and isinstance(first.get("k"), str):
        return "gyre.run", iter(())
    for form, make in _readers(objects, first, whole, name, blocks, path):
        return form, _with_bad_lines(make, objects if whole is None else [])
    raise UnknownFormat(f"{name}: {_seen(data, whole, first)}; formats read here: {', '.join(FORMATS)}")


def _readers(
    objects: list[Any], first: Any, whole: Any, name: str, blocks: Blocks, path: Path | None
) -> Iterator[tuple[str, Callable[[], Iterator[Record]]]]:
    """The formats that fit, surest first."""
    from trajtools.readers import atif, chatlogs, coding, nemo, scaffolds, verifiers

    rows = whole if isinstance(whole, list) else objects
    row = next((r for r in rows if isinstance(r, dict)), None)
    if row is not None and atif.is_atif(row):
        yield "atif", lambda: atif.records(rows, name, blocks, path)
    if nemo.is_gym(row):
        yield "nemo-gym", lambda: nemo.gym_records(rows)
    if whole is not None and (rollouts := nemo.rl_rollouts(whole)) is not None:
        yield "nemo-rl", lambda: nemo.rl_records(rollouts)
    if scaffolds.is_sweagent(whole):
        yield "swe-agent", lambda: scaffolds.sweagent_records(whole, name, blocks)
    runs = [whole] if isinstance(whole, list) else objects
    if any(scaffolds.openhands_history(run) is not None for run in runs):
        yield "openhands", lambda: scaffolds.openhands_records(runs, name, blocks)
    if row is None:
        return
    if coding.is_codex(row):
        yield "codex", lambda: coding.codex_records(rows, name, blocks)
    if any(coding.is_claude(r) for r in rows[:20] if isinstance(r, dict)):
        yield "claude-code", lambda: coding.claude_records(rows, name, blocks, path)
    if verifiers.is_verifiers(row):
        yield "verifiers", lambda: verifiers.verifiers_records(rows, name, blocks)
    if scaffolds.is_mini(whole):
        yield "mini-swe-agent", lambda: scaffolds.mini_records(whole, name, blocks)
    if chatlogs.is_chat_log(row):
        yield "chat-log", lambda: chatlogs.chat_log_records(rows, name, blocks)


def _with_bad_lines(make: Callable[[], Iterator[Record]], objects: list[Any]) -> Iterator[Record]:
    bad = sum(o is None for o in objects)
    yield from make()
    if bad:
        yield Note(text=f"{bad} lines were not JSON", extra={"left_out": {"lines that are not JSON": bad}})


def _seen(data: bytes, whole: Any, first: Any) -> str:
    if isinstance(first, dict):
        return f"an object with the keys {', '.join(sorted(map(str, first))[:8])}, which no reader knows"
    if whole is not None:
        return f"JSON of the type {type(whole).__name__}"
    return f"not JSON: begins with {data[:24]!r}"


def _parsed(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
