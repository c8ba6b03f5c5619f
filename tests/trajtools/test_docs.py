"""The pages say what is so: the examples of the run file are one valid file, the commands of the page run."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import orjson
from click.testing import CliRunner

from gyre_base.runcodec import KINDS
from gyre_base.runfile import LABELS, RunReader
from gyre_base.vocabulary import Outcome
from gyre_cli.trajtools import main
from trajtools.breaks import KINDS as BREAKS
from trajtools.readers import FORMATS

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE, PAGE = (ROOT / "docs" / name for name in ("run-file.md", "trajtools.md"))


def test_the_examples_of_the_run_file_are_one_valid_file_with_every_kind_in_both_forms():
    lines = re.findall(r"```json\n(.*?)\n```", RUN_FILE.read_text(), re.DOTALL)
    reader = RunReader(io.BytesIO("\n".join([*lines, ""]).encode()))
    records = list(reader.records())
    assert not reader.report.bad and not reader.report.unknown_kinds
    assert len(records) == len(lines)
    assert set(reader.report.records) == set(KINDS)
    objects = [orjson.loads(line) for line in lines]
    forms = {(o.get("level", "token"), "base" in o) for o in objects if o["k"] == "call"}
    assert forms == {(level, delta) for level in ("token", "text") for delta in (False, True)}
    delta = next(x.record for x in records if getattr(x.record, "call", "") == "c2" and hasattr(x.record, "prompt_ids"))
    assert delta.prompt_ids.tolist() == [11, 12, 13, 21, 22, 2, 31, 32]


def test_the_run_file_page_names_every_label_and_outcome():
    text = RUN_FILE.read_text()
    assert all(f"`{word}`" in text for word in (*LABELS, *(o.value for o in Outcome)))


def test_the_page_has_every_command_format_and_kind_of_break():
    text = PAGE.read_text()
    assert all(f"| `{name}` |" in text for name in main.commands)
    assert all(f"`{name}`" in text for name in (*FORMATS, *BREAKS))


def test_the_commands_of_the_page_run(tmp_path):
    [block] = re.findall(r"```console\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    for line in block.splitlines():
        words = shlex.split(line.removeprefix("$ trajtools "))
        words = [w.replace("OUT/", f"{tmp_path}/").replace("tests/", f"{ROOT}/tests/") for w in words]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, (line, done.output)
