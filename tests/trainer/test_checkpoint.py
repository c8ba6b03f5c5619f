"""Checkpoints: whole or not there, whatever dies, fills up or lies in the middle of a write; and beside the steps."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from celld.tiny import model as tiny
from celld.trainer import checkpoint
from gyre_base.ids import PolicyVersion
from tests.trainer.conftest import SMALL

ROOT = Path(__file__).parents[2]


def made(version: tuple[int, int], size: int = 3) -> checkpoint.Checkpoint:
    """Every number in it is the step."""
    array = np.full(size, version[1], dtype=np.float32)
    return checkpoint.Checkpoint(
        version=PolicyVersion(*version), next_batch=version[1], applied=(), optimizer_steps=version[1], config={},
        weights={"w": array}, moments={"exp_avg.w": array, "exp_avg_sq.w": array},
    )  # fmt: skip


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_only_the_newest_are_kept_and_a_damaged_one_is_passed_over(tmp_path):
    for version in ((0, 2), (0, 10), (1, 4)):
        checkpoint.save(tmp_path, made(version), keep=2)
    assert names(tmp_path) == ["0.10", "1.4"]
    for name in ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "config.json"):
        whole = (tmp_path / "1.4" / name).read_bytes()
        (tmp_path / "1.4" / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        back = checkpoint.newest(tmp_path)
        assert back is not None and back.version == PolicyVersion(0, 10)
        (tmp_path / "1.4" / name).write_bytes(whole)
    assert checkpoint.newest(tmp_path).version == PolicyVersion(1, 4)
    for name in ("1.4", "0.10"):
        (tmp_path / name / "ledger.json").write_text(json.dumps({"form": 99}))
    with pytest.raises(checkpoint.CheckpointError, match=r"model\.path"):
        checkpoint.newest(tmp_path)
    shutil.rmtree(tmp_path)
    assert checkpoint.newest(tmp_path) is None


def test_a_version_saved_again_takes_the_place_of_the_old_one(tmp_path):
    checkpoint.save(tmp_path, made((0, 2)), keep=2)
    checkpoint.save(tmp_path, dataclasses.replace(made((0, 2)), applied=("a",)), keep=2)
    assert checkpoint.newest(tmp_path).applied == ("a",)
    checkpoint.save(tmp_path, made((0, 3)), keep=2)
    assert names(tmp_path) == ["0.2", "0.3"]


def test_its_files_are_a_model_that_others_load(tmp_path, reference):
    weights = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    state = dataclasses.replace(made((0, 1)), weights=weights, config=SMALL.to_hf())
    loaded = tiny.load(checkpoint.save(tmp_path, state, keep=1)).state_dict()
    assert all(np.array_equal(loaded[name].numpy(), array) for name, array in weights.items())


KILLED = """
import sys
from pathlib import Path
from celld.trainer import checkpoint
from tests.trainer.test_checkpoint import made
print("ready", flush=True)
for step in range(int(sys.argv[2]), 10_000):
    checkpoint.save(Path(sys.argv[1]), made((0, step), 500_000), keep=2)
    print(step, flush=True)
"""


def test_a_kill_in_the_middle_of_a_write_costs_at_most_the_one_that_was_written(tmp_path):
    """Real processes, real kills, at any moment; what was reported durable is there, whole."""
    chance, reported = random.Random(1), 0
    for _ in range(5):
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(reported + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout.readline() == "ready\n"
            process.stdout.readline()
            time.sleep(chance.uniform(0, 0.3))
            process.kill()
            lines = process.stdout.read().split()
        reported = max(reported + 1, *(int(line) for line in lines), 0)
        back = checkpoint.newest(tmp_path)
        step = back.version.step
        assert step in (reported, reported + 1)  # durable, and its word may have been lost
        assert set(back.weights["w"]) == set(back.moments["exp_avg_sq.w"]) == {float(step)}
        assert [version.step for version, _ in checkpoint.versions(tmp_path)][:1] == [step]
        reported = step
    checkpoint.save(tmp_path, made((0, reported + 1)), keep=1)
    assert names(tmp_path) == [f"0.{reported + 1}"]  # what the dead left is gone


FULL = """
import resource, signal, sys
from pathlib import Path
from celld.trainer import checkpoint
from tests.trainer.test_checkpoint import made
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    checkpoint.save(Path(sys.argv[1]), made((0, 2), 500_000), keep=1)
except checkpoint.SaveFailed as error:
    print(error)
"""


def test_a_write_that_finds_no_room_leaves_the_one_before_and_says_so(tmp_path):
    checkpoint.save(tmp_path, made((0, 1)), keep=1)
    said = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, cwd=ROOT).stdout
    assert "0.2 is not written" in said and os.strerror(errno.EFBIG) in said
    assert names(tmp_path) == ["0.1"] and checkpoint.newest(tmp_path).version == PolicyVersion(0, 1)


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, made((0, 1)), keep=1)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(checkpoint.SaveFailed, match="0\\.2 needs"):
        checkpoint.save(tmp_path, made((0, 2), 1000), keep=1)
    assert names(tmp_path) == ["0.1"]


def test_a_file_that_reads_back_otherwise_gets_no_name(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, made((0, 1)), keep=1)
    sync = os.fsync

    def lying(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if path.endswith(checkpoint.OPTIMIZER):
            os.truncate(path, 100)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", lying)
    with pytest.raises(checkpoint.SaveFailed, match="reads back otherwise"):
        checkpoint.save(tmp_path, made((0, 2)), keep=1)
    assert names(tmp_path) == ["0.1"]


async def test_a_save_runs_beside_what_follows_and_holds_what_was_then(tmp_path):
    state, writer = made((0, 1), 2_000_000), checkpoint.Writer(tmp_path, keep=3)
    written = await writer.start(state)
    for part in (state.weights, state.moments):
        for array in part.values():
            array[:] = 7.0  # the next step
    assert not written.done()  # nothing was awaited since
    assert Path(await written) == tmp_path / "0.1"
    back = checkpoint.newest(tmp_path)
    assert set(back.weights["w"]) == set(back.moments["exp_avg.w"]) == {1.0}
    writer.close()


async def test_one_save_is_in_flight_at_most_and_the_next_waits_for_it(tmp_path):
    writer = checkpoint.Writer(tmp_path, keep=9)
    started = [await writer.start(made((0, step), 300_000)) for step in (1, 2, 3)]
    assert [task.done() for task in started] == [True, True, False]
    await started[-1]
    await writer.idle()
    for version, directory in checkpoint.versions(tmp_path):
        assert set(checkpoint.read(directory).weights["w"]) == {float(version.step)}
    writer.close()


async def test_a_failed_save_is_told_and_the_next_one_is_tried(tmp_path):
    root = tmp_path / "checkpoints"
    root.write_text("in the way")
    writer = checkpoint.Writer(root, keep=1)
    with pytest.raises(OSError):
        await (await writer.start(made((0, 1))))
    root.unlink()
    await (await writer.start(made((0, 2))))
    assert names(root) == ["0.2"]
    writer.close()
