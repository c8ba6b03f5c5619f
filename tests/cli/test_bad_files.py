"""Every command, every file that it takes, every way in which a file can be wrong: one line and the right exit code,
never a traceback.

The table is made from the commands themselves, so a new command or option is in it from its first day.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import ROOT
from tests.cli.test_help import PROGRAMS

USAGE = 2
RECORD = ROOT / "tests" / "trajtools" / "data" / "nemogym_rollout.jsonl"
LONG_NAME = "n" * 300
SHOWN_CHARS = 700  # of an error: one line that a person reads, with a path in it

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 20 + b"\n" + b"\xff\xfe\x80" * 100,
    "nothing but NUL": b"\0" * 4096,
    "text": b"hello world\n",
    "other encoding": 'id = "café"\n'.encode("latin1"),
    "null": b"null\n",
    "a number": b"3\n",
    "a list": b"[]\n",
    "a list of wrong things": b'[1, "x", null, {}]\n',
    "too deep": b"[" * 100_000 + b"\n",
    "a huge line": b'{"k":"call","x":"' + b"a" * 300_000 + b"\n",
    "a later version": b'{"k":"run","schema":"gyre.run/9"}\n',
    "a call of nothing": b'{"k":"call"}\n',
    "a call of wrong things": b'{"k":"call","exec":3,"call":[],"prompt_ids":"x","completion_ids":[1e9],"logprobs":1}\n',
    "no character": b'{"id":"\\ud800","instruction":"\\ud800","k":"exec","exec":"\\ud800","tag":"\\ud800"}\n',
    "wrong types": json.dumps(
        {
            **{"id": 3, "instruction": [], "workspace": 5, "evaluator": "x", "exec": {}, "value": "NaN", "kind": 7},
            **{"hours": "many", "task": 4, "duration_s": [1, "x"], "at": "x", "event": 3, "commands": {}, "model": 1},
        }
    ).encode()
    + b"\n",
    "a journal of wrong things": b'{"at": "x", "event": {"tag": "cell.flip", "cell": 3}, "commands": [3]}\n',
    "settings of wrong things": b"model = 3\nscheduler.steps = []\ntasks = 'x'\narms = 3\nkind = 7\n",
}
PLACES = ("missing", "a folder", "below a file", "a name too long")
OUTPUTS = {"out", "side", "svg", "html", "curve", "image"}  # written, not read
OUTPUT_PLACES = ("a folder", "below a file", "a name too long", "in no folder")
MADE = {("gyre", name) for name in ("up", "quickstart", "emulate", "init", "exec")}  # they make what --run names
BEGIN = {("gyre", name) for name in ("quickstart", "emulate", "exec")}  # and begin to work in it

# What else a command must be told before it looks at the file in question.
MORE: dict[tuple[str, ...], list[str]] = {
    ("cellctl", "flip"): ["c0", "--to", "train"],
    ("cellctl", "drain"): ["c0"],
    ("cellctl", "undrain"): ["c0"],
    ("cellctl", "pause"): ["g00000-00.0"],
    ("cellctl", "resume"): ["g00000-00.0"],
    ("proxyd", "drain"): ["c0"],
    ("proxyd", "undrain"): ["c0"],
    ("cellctl", "simulate"): ["--profile", "qwengyre-122b", "--arm", "E0", "--seeds", "1", "--steps", "1"],
    ("cellctl", "plan"): ["--gpus", "8", "--seeds", "1"],
    ("celld", "run"): ["--cell", "c0"],
    ("trajd", "intake"): ["--listen", "unix:/nowhere/x"],
    ("trajd", "send"): ["--to", "unix:/nowhere/x"],
    ("trajtools", "score"): ["-o", "{free}", "--set", "e=1"],
    ("trajtools", "convert"): ["-o", "{free}"],
    ("trajtools", "repair"): ["-o", "{free}"],
    ("gyre", "rescore"): ["--evaluator", "task"],
    ("gyre", "emulate"): ["--profile", "nobody", "--run", "{free}"],
    ("gyre", "submit"): ["--dry-run"],
    ("gyre", "exec"): ["--task", str(ROOT / "examples" / "quickstart" / "tasks" / "heldout.jsonl")],
    ("gyre", "init"): ["{free}"],
}
ARGUMENTS: dict[str, list[str]] = {  # of commands whose files come first
    "source": [str(RECORD)],
    "left": [str(RECORD)],
    "right": [str(RECORD)],
    "folder": ["{free}"],
    "run_dir": ["{free}"],
    "paths": [str(RECORD)],
    "journal": [str(RECORD)],
}


def leaves() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    def below(words: tuple[str, ...], group: click.Group) -> Iterator[tuple[tuple[str, ...], click.Command]]:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                yield from below((*words, name), command)
            else:
                yield (*words, name), command

    for program in PROGRAMS:
        yield from below((program,), importlib.import_module(f"gyre_cli.{program}").main)


def takes_a_file(parameter: click.Parameter) -> bool:
    word = parameter.make_metavar(click.Context(click.Command("x")))
    return isinstance(parameter.type, click.Path) or bool({"DIR", "FILE", "PATH"} & set(re.split(r"\W+", word)))


TABLE = [(words, p) for words, command in leaves() for p in command.params if takes_a_file(p)]


def make(kind: str, folder: Path) -> Path:
    if kind in CONTENTS:
        path = folder / "given"
        path.write_bytes(CONTENTS[kind])
        return path
    (folder / "file").write_text("x")
    (folder / "folder").mkdir()
    return {
        "missing": folder / "none",
        "a folder": folder / "folder",
        "below a file": folder / "file" / "below",
        "a name too long": folder / LONG_NAME,
        "in no folder": folder / "no" / "such" / "file",
    }[kind]


def line(
    words: tuple[str, ...], command: click.Command, parameter: click.Parameter, path: Path, free: Path
) -> list[str]:
    """The words after the program's name."""
    more = [word.format(free=free) for word in MORE.get(words, [])]
    if isinstance(parameter, click.Option):
        for spelled in parameter.opts:
            if spelled in more:
                del more[(at := more.index(spelled)) : at + 2]
        positional = [p for p in command.params if isinstance(p, click.Argument) and p.name in ARGUMENTS]
        for other in positional:
            more += [word.format(free=free) for word in ARGUMENTS[other.name or ""]]
        return [*words[1:], *more, parameter.opts[-1], str(path)]
    if words == ("gyre", "init"):
        return [*words[1:], str(path)]
    before = [str(RECORD)] if parameter.name == "right" else []
    after = [str(RECORD)] if parameter.name == "left" else []
    return [*words[1:], *more, *before, str(path), *after]


def complaint(said: Result, path: Path) -> str:
    """Why this is no good answer to a file like that; empty if it is one."""
    if said.exception is not None and not isinstance(said.exception, SystemExit):
        return f"a traceback: {said.exception!r:.300}"
    if said.exit_code not in (0, 1, 2, 3, 4):
        return f"exit code {said.exit_code}"
    last = said.stderr.splitlines()[-1] if said.stderr else ""
    if said.exit_code == USAGE and not last.lower().startswith("error: "):
        return f"no word on what to do: {said.stderr!r:.300}"
    if len(last.replace(str(path), "PATH")) > SHOWN_CHARS:
        return f"nobody reads this: {last:.100} ... ({len(last)} characters)"
    if last.count(str(path)) > 1 or "[Errno" in last or "None:" in last:
        return f"not said in words: {last:.400}"
    return ""


@pytest.mark.parametrize(("words", "parameter"), TABLE, ids=lambda x: " ".join(x) if isinstance(x, tuple) else x.name)
def test_no_wrong_file_makes_a_traceback(words, parameter, tmp_path, monkeypatch):
    command = dict(leaves())[words]
    output = parameter.name in OUTPUTS or (words[:2] in MADE and parameter.name in ("run_dir", "run", "path"))
    kinds = OUTPUT_PLACES if output else (*CONTENTS, *PLACES)
    if parameter.name == "run_dir":
        kinds = ("empty", "a folder", "below a file", "a name too long")
    if parameter.name == "run_dir" and words in BEGIN:
        kinds = ("empty", "below a file", "a name too long")  # not those that would do
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GYRE_RUN", raising=False)
    bad = []
    for number, kind in enumerate(kinds):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        path = make(kind, folder)
        before = path.read_bytes() if kind in CONTENTS else None
        arguments = line(words, command, parameter, path, folder / "free")
        said = CliRunner().invoke(importlib.import_module(f"gyre_cli.{words[0]}").main, arguments)
        why = complaint(said, path)
        if before is not None and path.read_bytes() != before:
            why = why or "the file was changed"
        if os.environ.get("SHOW"):
            print(f"{kind}: {said.exit_code} {said.stderr.strip()[-300:]!r} {said.stdout.strip()[:100]!r}")
        if why:
            bad.append(f"{kind}: {why}\n    {' '.join((words[0], *arguments)).replace(str(tmp_path), '')[:200]}")
    assert not bad, "\n".join(bad)
