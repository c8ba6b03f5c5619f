"""What each named harness is started with, whole, as goldens (`--rewrite-golden` rewrites); no program is needed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gyre_base.config import Config, ConfigError
from gyre_cli.harness import KNOWN
from gyre_exec.harness import ADAPTERS, Launch, adapter_for, showing
from gyre_exec.harnesses import mini_swe_agent, programs, qwen_code
from gyre_exec.tasks import from_dict
from tests.cli.conftest import complains, say

GOLDEN = Path(__file__).parents[1] / "golden" / "harness"
TASK = {"id": "t", "instruction": "Write greet.py", "workspace": {}, "evaluator": {"command": ["true"]}}
NAMED = sorted(set(ADAPTERS) - {"command"})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder for programs, and a node that is always at one place."""
    monkeypatch.setenv("GYRE_HARNESS_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(qwen_code.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(mini_swe_agent.sys, "base_prefix", "/usr")
    return tmp_path / "cache"


@pytest.fixture
def installed(cache):
    """As if all were installed: the stamp is what counts."""
    for name in NAMED:
        program = __import__(f"gyre_exec.harnesses.{name.replace('-', '_')}", fromlist=["PROGRAM"]).PROGRAM
        program.folder().mkdir(parents=True)
        (program.folder() / programs.STAMP).touch()
    return cache


def launch_in(folder: Path) -> Launch:
    task = from_dict(TASK, folder="/tasks", where="here")
    return Launch(
        execution="t.0",
        task=task,
        workspace=Path("/workspace"),
        folder=Path("/harness"),
        host_folder=folder,
        base_url="http://127.0.0.1:4000/x/t.0",
        token="TOKEN",
        model="gyre-policy",
        start_folder="/here",
        context_tokens=65536,
        max_new_tokens=4096,
    )


def described(name: str, words: tuple[str, ...], env: dict[str, str], folder: Path, cache: Path) -> str:
    """Command line, environment and settings files as text, without the places of this machine."""
    adapter, launch = adapter_for((name, *words), env), launch_in(folder)
    adapter.prepare(launch)
    lines = ["shows", *adapter.visible(), "", "argv", *adapter.argv(launch), "", "env"]
    lines += [f"{key}={value}" for key, value in sorted(adapter.env(launch).items())]
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        lines += ["", f"file {path.relative_to(folder)}", path.read_text().rstrip()]
    return "\n".join(lines).replace(str(cache), "CACHE") + "\n"


@pytest.mark.parametrize("name", NAMED)
def test_what_a_named_harness_is_started_with(name, installed, tmp_path, pytestconfig):
    (tmp_path / "folder").mkdir()
    text = described(name, ("--more", "words"), {"LANG": "de_DE.UTF-8", "OWN": "1"}, tmp_path / "folder", installed)
    golden = GOLDEN / f"{name}.txt"
    if pytestconfig.getoption("--rewrite-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert "LANG=de_DE.UTF-8" in text and "OWN=1" in text, "the user's environment wins"


@pytest.mark.parametrize("name", NAMED)
def test_preparing_twice_is_preparing_once(name, installed, tmp_path):
    (tmp_path / "folder").mkdir()
    first = described(name, (), {}, tmp_path / "folder", installed)
    assert described(name, (), {}, tmp_path / "folder", installed) == first


def test_settings_of_a_strange_model_name_are_still_settings(installed, tmp_path):
    import tomllib
    from dataclasses import replace

    strange = replace(launch_in(tmp_path), model='a "quoted" \\ name')
    for name, file, read in (
        ("codex", "home/config.toml", lambda text: tomllib.loads(text)["model"]),
        ("qwen-code", "home/.qwen/settings.json", lambda text: json.loads(text)["model"]["name"]),
        (
            "opencode",
            "home/.config/opencode/opencode.json",
            lambda text: json.loads(text)["model"].removeprefix("gyre/"),
        ),
    ):
        adapter_for((name,), {}).prepare(strange)
        assert read((tmp_path / file).read_text()) == strange.model


@pytest.mark.parametrize("name", NAMED)
def test_a_harness_that_is_not_installed_says_which_command_installs_it(name, cache):
    with pytest.raises(ConfigError, match=f"gyre harness install {name}"):
        showing(Config(), adapter_for((name,), {}))


def test_without_node_qwen_code_says_so(installed, monkeypatch):
    monkeypatch.setattr(qwen_code.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="node"):
        showing(Config(), adapter_for(("qwen-code",), {}))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_exec_with_a_missing_harness_is_one_line_and_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("GYRE_HARNESS_HOME", str(tmp_path / "nothing"))
    tasks = str(Path(__file__).parents[2] / "examples" / "quickstart" / "tasks" / "heldout.jsonl")
    complains(say("gyre", "exec", "--task", tasks, "--harness", "codex", cwd=tmp_path), 2, "gyre harness install codex")


# ---- installing ---------------------------------------------------------------------------------------------------


def fake_npm(monkeypatch, code: int = 0, makes: str = "") -> list[list[str]]:
    asked: list[list[str]] = []

    def run(command, **_):
        asked.append(command)
        if makes:
            target = Path(command[command.index("--prefix") + 1]) / makes
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("")
        return subprocess.CompletedProcess(command, code, "", "one\ntwo\nthree\nE404 not there")

    monkeypatch.setattr(programs.subprocess, "run", run)
    return asked


PROGRAM = programs.Program(harness="h", package="@p/h", version="1.2", file="node_modules/h/run")


def test_an_installation_that_ends_is_stamped_and_not_done_again(cache, monkeypatch):
    asked = fake_npm(monkeypatch, makes=PROGRAM.file)
    assert PROGRAM.install() == PROGRAM.folder() / PROGRAM.file == PROGRAM.install()
    assert len(asked) == 1 and asked[0][-1] == "@p/h@1.2" and PROGRAM.found()


@pytest.mark.parametrize(("code", "makes", "why"), [(1, "", "E404 not there"), (0, "other", "another platform")])
def test_one_that_fails_leaves_no_stamp_and_says_why(cache, monkeypatch, code, makes, why):
    fake_npm(monkeypatch, code, makes)
    with pytest.raises(programs.HarnessMissing, match=why):
        PROGRAM.install()
    assert not PROGRAM.found()


def test_one_that_was_interrupted_is_begun_again(cache, monkeypatch):
    PROGRAM.folder().mkdir(parents=True)
    (PROGRAM.folder() / "half").touch()
    fake_npm(monkeypatch, makes=PROGRAM.file)
    PROGRAM.install()
    assert not (PROGRAM.folder() / "half").exists()


def test_the_commands_know_every_adapter(tmp_path, monkeypatch):
    monkeypatch.setenv("GYRE_HARNESS_HOME", str(tmp_path))
    assert sorted(name.replace("_", "-") for name in KNOWN) == NAMED
    rows = [json.loads(line) for line in say("gyre", "harness", "list", "--json", cwd=tmp_path).stdout.splitlines()]
    assert sorted(r["harness"] for r in rows) == NAMED and not any(r["installed"] for r in rows)
    complains(say("gyre", "harness", "install", "nothing", cwd=tmp_path), 2, "codex")
