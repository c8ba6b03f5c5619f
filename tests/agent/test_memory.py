"""The account of a cell's memory: what is counted, what there is, and a real cell that refuses to train."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from celld.agent import memory
from celld.tiny.model import TinyConfig, TinyQwen3, save
from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.bus import Client, Server
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir
from gyre_base.vocabulary import Role

MODEL = TinyConfig(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3)
CONFIG = configuration.from_tree({"engine": {"max_running_requests": 4, "context_length": 128}})


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(TinyQwen3(MODEL).initialise(0), folder)
    return folder


def changed(**sections: dict[str, Any]) -> configuration.Config:
    tree: dict[str, Any] = {"engine": {"max_running_requests": 4, "context_length": 128}}
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return configuration.from_tree(tree)


def test_sizes_are_those_of_the_model(model: Path):
    sizes = memory.Sizes.read(model)
    network = TinyQwen3(MODEL)
    count = sum(p.numel() for p in {id(p): p for p in network.parameters()}.values())
    assert (sizes.parameters, sizes.stored_bytes, sizes.layers) == (count, 4 * count, 3)
    assert sizes.kv_numbers == 2 * 3 * MODEL.num_key_value_heads * MODEL.head_dim


def test_the_core_needs_moments_and_copies_more_than_a_satellite_and_each_role_its_own(model: Path):
    sizes = memory.Sizes.read(model)
    weights = 4 * sizes.parameters
    core, satellite = (memory.need(Role.TRAIN, CONFIG, sizes, core=core) for core in (True, False))
    assert sum(core.values()) - sum(satellite.values()) == (2 + 3 + 3 - 1 + 1 + 4) * weights
    serving = memory.need(Role.ROLLOUT, CONFIG, sizes, core=False)
    assert {name for name in satellite if name not in serving} == {
        "rank: gradient sum",
        "rank: pending micro-step",
        "rank: activations",
        "engine: keys and values for others",
    }
    assert serving["engine: keys and values"] == 3 * 4 * 128 * 4 * sizes.kv_numbers
    assert serving["engine: weights"] == weights and "engine: weights" not in satellite


@pytest.mark.parametrize(
    ("change", "part", "size"),
    [
        ({"trainer": {"activation_gib": 2.5}}, "rank: activations", int(2.5 * memory.GIB)),
        ({"engine": {"kv_store": True, "kv_share_mib": 64}}, "engine: keys and values for others", 64 << 20),
        ({"engine": {"kv_store": False, "kv_share_mib": 64}}, "engine: keys and values for others", 0),
    ],
)
def test_what_the_user_tells_is_what_counts(model: Path, change: dict[str, Any], part: str, size: int):
    assert memory.need(Role.TRAIN, changed(**change), memory.Sizes.read(model), core=False)[part] == size


def test_ranks_that_share_the_tokens_have_copies_and_experts_are_fewer_where_they_are_shared(model: Path):
    sizes = dataclasses.replace(memory.Sizes.read(model), expert_parameters=1000)
    assert memory.Sizes.read(model).expert_parameters == 0

    def parts(**layout: int) -> dict[str, int]:
        return memory.need(Role.TRAIN, changed(trainer=layout), sizes, core=True)

    alone, four, shared = parts(), parts(context_parallel=4), parts(context_parallel=4, expert_parallel=2)
    for name in ("rank: weights", "rank: gradient", "rank: gradient sum"):
        assert four[name] == 4 * alone[name] and shared[name] == four[name] - 2 * 4 * 1000
    assert alone["rank: moments"] == four["rank: moments"] == shared["rank: moments"] == 2 * 4 * sizes.parameters
    assert four["rank: process"] == 4 * alone["rank: process"]
    assert four["rank: published snapshots"] == alone["rank: published snapshots"]
    tokens = max(CONFIG.trainer.micro_step_tokens, CONFIG.engine.context_length)
    assert four["rank: activations"] - alone["rank: activations"] == 3 * 4 * tokens * sizes.kv_numbers


def test_with_bf16_weights_and_snapshots_are_halved_and_what_is_summed_and_stepped_is_not(model: Path):
    sizes = memory.Sizes.read(model)
    wide, narrow = (memory.need(Role.TRAIN, changed(trainer={"dtype": d}), sizes, core=True) for d in ("fp32", "bf16"))
    for name in ("rank: weights", "rank: published snapshots", "agent: snapshot"):
        assert 2 * narrow[name] == wide[name]
    for name in ("rank: gradient", "rank: gradient sum", "rank: moments"):
        assert narrow[name] == wide[name]
    assert (wide["rank: masters"], narrow["rank: masters"]) == (0, 4 * sizes.parameters)
    assert narrow["rank: checkpoint copy"] == (2 + 4 + 8) * sizes.parameters  # as its files are long
    assert narrow["rank: activations"] < wide["rank: activations"]
    assert "rank: masters" not in memory.need(Role.TRAIN, changed(trainer={"dtype": "bf16"}), sizes, core=False)


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "width"),
    [("tiny", "cuda", "bf16", 4), ("sglang", "cpu", "bf16", 4), ("sglang", "cuda", "bf16", 2)],
)
def test_an_engine_holds_weights_in_what_it_computes_in(model: Path, kind: str, device: str, dtype: str, width: int):
    sizes = memory.Sizes.read(model)
    config = changed(engine={"kind": kind, "device": device}, trainer={"dtype": dtype})
    assert memory.need(Role.ROLLOUT, config, sizes, core=False)["engine: weights"] == width * sizes.parameters
    halved = dataclasses.replace(sizes, stored_bytes=2 * sizes.parameters)  # a bf16 directory, trained in fp32
    config = changed(engine={"kind": "sglang", "device": "cuda"})
    assert memory.need(Role.ROLLOUT, config, halved, core=False)["engine: weights"] == 2 * sizes.parameters


def test_the_bound_on_activations_grows_with_tokens_and_holds_for_one_long_execution(model: Path):
    sizes = memory.Sizes.read(model)
    small, large = (memory.activations(changed(trainer={"micro_step_tokens": n}), sizes) for n in (1000, 2000))
    assert large == 2 * small
    assert memory.activations(changed(engine={"context_length": 9000}), sizes) > large


def test_a_refusal_has_the_numbers_and_what_to_do():
    parts = {"rank: weights": 3 << 30, "rank: moments": 6 << 30}
    account = memory.Account(role=Role.TRAIN, place="RAM", parts=parts, there=8 << 30)
    assert not account.fits
    assert account.why().startswith(
        "train needs 9.0 GiB of RAM (rank: moments 6.0, rank: weights 3.0), this cell may have 8.0"
    )
    assert "cluster.cell_memory_gib" in account.why()
    assert memory.Account(role=Role.TRAIN, place="RAM", parts=parts, there=9 << 30).fits


def made_tree(root: Path, limits: dict[str, tuple[str, int, int]]) -> Path:
    """A kernel with 10 GiB free and cgroups of ours: path -> (limit, used, inactive file cache)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {10 << 20} kB\n")
    (root / "proc/self/cgroup").write_text("0::/slurm/job_1/step_0\n")
    for path, (limit, used, cache) in limits.items():
        folder = root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    return root


def test_free_memory_is_the_machines_or_what_the_tightest_cgroup_leaves(tmp_path: Path):
    assert memory.free_bytes(made_tree(tmp_path / "a", {})) == 10 << 30
    open_ = {"slurm/job_1/step_0": ("max", 7, 0)}
    assert memory.free_bytes(made_tree(tmp_path / "b", open_)) == 10 << 30
    tight = {"slurm/job_1": (str(4 << 30), 3 << 30, 1 << 29), **open_}
    assert memory.free_bytes(made_tree(tmp_path / "c", tight)) == (4 << 30) - (3 << 30) + (1 << 29)
    assert memory.free_bytes() > 0  # the real one


def test_gpu_memory_is_that_of_the_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$*" in *--id=0,1*) echo 81559; echo 81559;; *) echo 81559;; esac\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert memory.gpu_bytes() == 2 * 81559 << 20
    program.write_text("#!/bin/sh\nexit 9\n")
    assert memory.gpu_bytes() == 0


def test_on_gpus_tensors_are_held_against_their_memory_and_processes_against_ram(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    config = changed(model={"path": str(model)}, cluster={"cell_memory_gib": 0.001})
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 80 << 30)
    account = memory.Books(config, "c0").account(Role.TRAIN, {})
    assert account is not None and account.place == "GPU memory" and account.there == int(0.001 * memory.GIB)
    assert "rank: moments" in account.parts and "rank: checkpoint copy" not in account.parts


def test_measured_is_what_a_group_of_processes_holds():
    code = "import subprocess, sys; x = bytearray(64 << 20); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = memory.resident_bytes({"engine": [process.pid], "rank": []})
        process.kill()
    assert found["rank"] == 0 and 64 << 20 <= found["engine"] < 200 << 20


class FakeCellctl:
    """Hears what a cell says."""

    def __init__(self, run: RunDir, keys: Any) -> None:
        self.server = Server(run, keys, kind="cellctl", name="cellctl", life=1, bind="127.0.0.1")
        self.heard: list[Any] = []
        self.peer = b""

    async def listen(self) -> None:
        async for received in self.server:
            self.heard.append(received.message)
            if isinstance(received.message, m.Hello) and received.message.kind == "celld":
                self.peer = received.peer
                await self.server.send(received.peer, m.Done(), received.correlation)

    async def until(self, kind: type, **fields: Any) -> Any:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            for message in self.heard:
                if isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items()):
                    return message
            await asyncio.sleep(0.05)
        raise AssertionError(f"no {kind} {fields} in {[type(message).__name__ for message in self.heard]}")


def start_agent(run: RunDir) -> subprocess.Popen[bytes]:
    code = "import sys, asyncio; from celld.agent.daemon import run_agent; asyncio.run(run_agent(sys.argv[1], 'c0'))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, str(run.root)], env=environment)


@pytest.fixture
async def cell(model: Path, tmp_path: Path) -> AsyncIterator[tuple[RunDir, Any, FakeCellctl]]:
    """A real agent with its real engine and rank, which may have 100 MiB."""
    run = RunDir.create(tmp_path / "run")
    keys = make_keys(run)
    config = changed(model={"path": str(model)}, cluster={"cells": 1, "cell_memory_gib": 0.1})
    run.write_atomic("run.json", configuration.to_json(config))
    cellctl = FakeCellctl(run, keys)
    cellctl.server.start()
    listening = asyncio.get_running_loop().create_task(cellctl.listen())
    process = start_agent(run)
    yield run, keys, cellctl
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, 60)
    process.kill()
    process.wait()
    listening.cancel()
    cellctl.server.close()


@pytest.mark.timeout(600)
async def test_a_cell_that_can_not_hold_training_refuses_it_with_the_numbers_and_serves_on(
    cell: tuple[RunDir, Any, FakeCellctl],
):
    run, keys, cellctl = cell
    up = await cellctl.until(m.RoleChanged, role=Role.ROLLOUT)
    await cellctl.server.send(cellctl.peer, m.FlipCell(cell="c0", to=Role.TRAIN, epoch=1))
    refused = await cellctl.until(m.SwitchRefused, epoch=1)
    assert refused.why.startswith("train needs ") and "this cell may have 0.1" in refused.why
    await cellctl.until(m.RoleChanged, role=Role.ROLLOUT, epoch=1)
    celld = Client(run, keys, "celld-c0")
    (row,) = (await celld.ask(m.StatusRequest(), timeout_s=30)).rows
    celld.close()
    assert (row["role"], row["refused"], row["faults"]) == ("rollout", refused.why, 0)
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "temperature": 0.0}}
    key = {"Authorization": f"Bearer {keys.admin}"}
    async with (
        aiohttp.ClientSession(headers=key) as session,
        session.post(up.engine_url + "/generate", json=body) as answer,
    ):
        assert answer.status == 200
