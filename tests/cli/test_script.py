"""Job scripts as people write them are read like sbatch reads them."""

from __future__ import annotations

import pytest

from gyre_base.config import ConfigError
from gyre_cli import script


def parsed(tmp_path, text: str, *more: str) -> script.Script:
    path = tmp_path / "job.sbatch"
    path.write_text(text)
    return script.parse(path, more)


def test_long_and_short_options_in_any_form(tmp_path):
    text = """#!/bin/bash
#SBATCH -N 4 --ntasks-per-node=1 -t2-00:00:00 --no-kill --requeue  # a comment
#SBATCH --gres gpu:h100:8 --output="my log/%j.log"
module load cuda
#SBATCH --nodes=99
exec gyre up --config=a.toml --run 'runs/my run'
"""
    job = parsed(tmp_path, text)
    assert job.options == {
        "nodes": "4",
        "ntasks-per-node": "1",
        "time": "2-00:00:00",
        "no-kill": "",
        "requeue": "",
        "gres": "gpu:h100:8",
        "output": "my log/%j.log",
    }
    assert (job.nodes, job.gpus) == (4, 8)
    assert (job.argument("--config"), job.argument("--run")) == ("a.toml", "runs/my run")


@pytest.mark.parametrize(
    ("options", "nodes", "gpus"),
    [
        ("--nodes=2-4 --gpus-per-node=4", 2, 4),
        ("--nodes=2 --gpus=16", 2, 8),
        ("--gres=nvme:1,gpu:2", 1, 2),
        ("--gpus-per-node=a100:8", 1, 8),
        ("--nodes=3", 3, None),
    ],
)
def test_gpus_however_they_are_asked_for(tmp_path, options, nodes, gpus):
    job = parsed(tmp_path, f"#!/bin/bash\n#SBATCH {options}\nexec gyre up\n")
    assert (job.nodes, job.gpus) == (nodes, gpus)


def test_words_for_sbatch_win_over_the_script(tmp_path):
    job = parsed(tmp_path, "#!/bin/bash\n#SBATCH -N2 --time=10\nexec gyre up\n", "--nodes=3", "-p", "spot")
    assert (job.nodes, job.options["partition"], job.options["time"]) == (3, "spot", "10")


def test_the_start_is_found_among_other_commands(tmp_path):
    text = "#!/bin/bash\nexport A='x y\nz'\nsource env.sh\nexec /v/bin/python -u -m gyre_cli.gyre up --run r\n"
    assert parsed(tmp_path, text).argument("--run") == "r"
    assert parsed(tmp_path, "#!/bin/bash\ngyre status\n").command == ()


@pytest.mark.parametrize(("line", "word"), [("hetjob", "uneven"), ("nodes=4", "no option"), ("-N 4 stray", "stray")])
def test_a_header_that_sbatch_would_not_understand_is_named_by_line(tmp_path, line, word):
    with pytest.raises(ConfigError, match=rf"job.sbatch:2: .*{word}"):
        parsed(tmp_path, f"#!/bin/bash\n#SBATCH {line}\nexec gyre up\n")


def test_a_missing_script_says_how_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match="gyre init"):
        script.parse(tmp_path / "none.sbatch")
