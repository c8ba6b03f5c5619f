"""`gyre exec --task`: one execution as a newcomer types it, real processes all along."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess

import pytest
from tokenizers import Tokenizer

from gyre_cli.scripted import read_script
from tests.cli.conftest import EXAMPLE, ROOT, complains, make_run, say
from tests.cli.test_bad_input import TASK, configured
from tests.proxyd.fakes import World

TASKS = str(EXAMPLE / "tasks" / "heldout.jsonl")


def outcome(said: subprocess.CompletedProcess[str]) -> dict:
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)


def test_the_example_runs_against_its_script_and_is_on_a_page(tmp_path):
    done = outcome(say("gyre", "exec", "--task", TASKS, "--harness", "command", "--json", cwd=tmp_path))
    assert (done["execution"], done["outcome"], done["score"]) == ("heldout-0000-plain.0", "scored", 1.0)
    assert (done["calls"], done["harness_errors"], len(done["parts"])) == (3, 0, 16)
    page = say("gyre", "show", "heldout-0000-plain.0", "--run", "runs/exec", cwd=tmp_path).stdout
    assert "added m1.py" in page and "score parts (16 of 16 in full)" in page and "3 calls" in page
    again = say("gyre", "exec", "--task", f"{TASKS}:heldout-0001-plain", "--json", cwd=tmp_path)
    assert outcome(again)["score"] < 1.0  # that script answers another task
    assert outcome(say("gyre", "exec", "--task", TASKS, "--json", cwd=tmp_path))["execution"].endswith("plain.1")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_harbor_directory_runs_behind_walls(tmp_path):
    task = str(ROOT / "examples" / "harbor" / "greet")
    done = outcome(say("gyre", "exec", "--task", task, "--json", cwd=tmp_path))
    assert (done["outcome"], done["score"], done["evaluator"]) == ("scored", 1.0, "harbor")
    page = json.loads(say("gyre", "show", "greet", "--run", "runs/exec", "--json", cwd=tmp_path).stdout)
    assert page["instruction"].startswith("Write greet.py") and [c["path"] for c in page["changes"]] == ["greet.py"]


def test_a_command_of_ones_own_and_a_script_that_is_too_short(tmp_path):
    (tmp_path / "script.json").write_text('["nothing"]')
    agent = tmp_path / "agent.sh"
    agent.write_text('test -n "$OPENAI_BASE_URL" && echo "I was told: $1"\n')
    said = say(
        *("gyre", "exec", "--task", TASKS, "--script", "script.json", "--json", "--harness", "command"),
        *("--", "bash", "agent.sh"),
        cwd=tmp_path,
    )
    assert outcome(said)["outcome"] == "no_artifact"
    page = say("gyre", "show", "heldout-0000-plain", "--run", "runs/exec", cwd=tmp_path).stdout
    assert "I was told: Write m1.py" in page and "none recorded" in page


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "one of --name, --pool and --task"),
        (("--task", "none.jsonl"), "no such task: none.jsonl"),
        (("--task", f"{TASKS}:none"), "no task 'none' in"),
        (("--task", TASKS, "--harness", "magic"), "no harness is called 'magic'; there are: "),
    ],
)
def test_bad_usage_says_what_to_do(tmp_path, words, complaint):
    complains(say("gyre", "exec", *words, cwd=tmp_path), 2, complaint)


@pytest.mark.parametrize(("text", "complaint"), [("{}", "a JSON list"), ("[3]", "answer 1"), ("[", "cannot be read")])
def test_a_bad_script_is_named(tmp_path, text, complaint):
    (tmp_path / "s.json").write_text(text)
    complains(say("gyre", "exec", "--task", TASKS, "--script", str(tmp_path / "s.json"), cwd=tmp_path), 2, complaint)


def test_a_proxyd_that_can_not_start_is_said_at_once(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes((EXAMPLE / "tokenizer" / "tokenizer.json").read_bytes())
    (tmp_path / "gyre.toml").write_text('[model]\ntokenizer = "tokenizer"\n[tasks]\nharness = ["sleep"]\n')
    (tmp_path / "s.json").write_text('["x"]')
    words = ("--config", "gyre.toml", "--script", "s.json", "--", "sh", "-c", "sleep 600")
    said = say("gyre", "exec", "--task", TASKS, *words, cwd=tmp_path)
    complains(said, 1, "proxyd-0 ended with code 2", "chat_template")


async def test_a_task_runs_against_the_proxyd_of_a_run_and_leaves_it_as_it_was(tmp_path):
    encode = Tokenizer.from_file(str(EXAMPLE / "tokenizer" / "tokenizer.json")).encode
    answers = iter(read_script(EXAMPLE / "script.json"))
    harness = ["python", "-I", "-S", str(EXAMPLE / "start.py")]
    async with World(tmp_path / "run", EXAMPLE / "tokenizer", tasks={"harness": harness}) as world:
        stop = min(world.chat.stop_ids)
        engine = await world.engine("a", lambda _: [*encode(next(answers), add_special_tokens=False).ids, stop])
        await world.cellctl.serve(engine)
        words = ("gyre", "exec", "--task", TASKS, "--run", str(world.run.root), "--json")
        said = await asyncio.to_thread(say, *words)
        done = outcome(said)
        assert (done["outcome"], done["score"], done["calls"]) == ("scored", 1.0, 3)
        assert {call.exec for call in world.records() if hasattr(call, "completion_ids")} == {done["execution"]}
        status, _, _ = await world.chat_call(done["execution"], [{"role": "user", "content": "more"}])
        assert status in (401, 403)  # it is closed


def test_a_run_that_does_not_serve_does_not_answer(tmp_path):
    run = make_run(tmp_path / "run")
    said = say("gyre", "exec", "--task", TASKS, "--run", str(run), "--", "true")
    assert said.returncode == 3 and "proxyd-0 does not answer" in said.stderr


@pytest.mark.parametrize("command", ["exec", "up"])
def test_a_directory_with_other_things_in_it_never_becomes_a_run(tmp_path, command):
    (tmp_path / "place").mkdir(mode=0o755)
    (tmp_path / "place" / "thesis.tex").write_text("")
    words = ("--task", TASKS) if command == "exec" else ("--config", str(configured(tmp_path, [TASK])))
    said = say("gyre", command, *words, "--run", str(tmp_path / "place"))
    complains(said, 2, "place holds other files and is not a run directory; choose another with --run")
    assert [p.name for p in (tmp_path / "place").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "place").stat().st_mode & 0o777 == 0o755
