"""Transcripts of the scheduler: events above the line, commands below it. `make golden` rewrites them; you review
the diff.

A transcript's first line says what matters. Event lines: `time tag key=value ...`; values are JSON where they are
not plain words. `with section.key=value ...` changes the configuration.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cellctl.core import Scheduler, Start
from gyre_base import wire
from gyre_base.journal import command_json

FOLDER = Path(__file__).resolve().parent.parent / "golden" / "scheduler"
TREE = {
    "cluster": {"cells": 3},
    "scheduler": {"steps": 2, "steps_per_burst": 2, "group_size": 2, "groups_per_batch": 1, "slots_per_cell": 2},
    "evaluation": {"tasks": 0},
}
SILENT = {"wake", "execution.open", "execution.close", "execution.noted"}


def parse(line: str) -> tuple[float, dict]:
    at, tag, *pairs = line.split()
    fields: dict = {"tag": tag}
    for pair in pairs:
        key, _, text = pair.partition("=")
        try:
            fields[key] = text if key == "version" else json.loads(text)
        except ValueError:
            fields[key] = text
    return float(at), fields


def changed(events: list[str]) -> dict:
    """The configuration with what lines such as `with cluster.cells=2` change of it."""
    tree = {section: dict(keys) for section, keys in TREE.items()}
    for word in (word for line in events if line.startswith("with ") for word in line.split()[1:]):
        dotted, _, text = word.partition("=")
        section, _, key = dotted.partition(".")
        tree[section][key] = json.loads(text)
    return tree


def told(command: dict) -> str:
    shown = (
        {**command, "engines": [f"{e['cell']}:{'serves' if e['serving'] else 'leaves'}" for e in command["engines"]]}
        if "engines" in command
        else command
    )
    words = [
        f"{k}={json.dumps(v) if not isinstance(v, str) else v}" for k, v in shown.items() if k not in ("peer", "tag")
    ]
    return f"-> {command.get('peer', 'shell')} {command['tag']} {' '.join(words)}".rstrip()


def play(events: list[str]) -> list[str]:
    core = Scheduler()
    core.handle(Start(config=changed(events), train=("t0", "t1"), heldout=()), 0.0)
    out: list[str] = []
    for line in events:
        if line.startswith("with "):
            continue
        at, fields = parse(line)
        commands = [command_json(c) for c in core.handle(wire.from_json(fields), at)]
        core.check()
        out.append(f"{at:g}")
        out.extend(told(c) for c in commands if c["tag"] not in SILENT)
    return out


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda p: p.stem)
def test_transcript(path, request):
    head, _, rest = path.read_text().partition("\n")
    above, _, below = rest.partition("----\n")
    events = [line for line in above.splitlines() if line.strip()]
    got = "\n".join(play(events)) + "\n"
    if request.config.getoption("--rewrite-golden"):
        path.write_text(f"{head}\n{above}----\n{got}")
    else:
        assert got == below, head
