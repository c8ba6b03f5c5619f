"""Configuration: one frozen tree, read from TOML, written resolved as JSON beside the run.

A comment says what a number trades. A wrong key names the nearest right one. Units come last in names.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_base.reserve import ORDERS


class ConfigError(ValueError):
    """A key or a value that can't be used; says which and what would do (exit code 2)."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Cells and where daemons listen."""

    cells: int = 3  # core first, then satellites; with 1 the policy falls back to whole-pool switching
    bind: str = "auto"  # where daemons listen; auto = the node's own address in a Slurm job, else 127.0.0.1
    executors: int = 1  # executor processes; each holds many executions
    heartbeat_s: float = 2.0  # between two signs of life of a daemon
    peer_timeout_s: float = 20.0  # silence that counts as lost: lower finds faults sooner, higher rides out swaps
    stall_s: float = 600.0  # work in hand, nothing done for so long: alarm with stacks; engines and ranks start anew
    python: tuple[str, ...] = ()  # runs Python on the nodes of a job, as in a container; empty = this interpreter
    srun_options: tuple[str, ...] = ()  # more words for each step of a job, such as ["--container-image=gyre.sqsh"]
    executor_partition: str = ""  # Slurm partition of the executors' own jobs; empty = beside the supervisor
    executor_options: tuple[str, ...] = ()  # more options of these jobs, such as ["mem=16G", "time=60"] (in minutes)
    executors_max: int = 0  # the pool grows to so many with the dispatched work; 0 = always `executors`
    executor_idle_s: float = 120.0  # an executor beyond `executors` that held nothing for so long goes
    transport: str = "auto"  # of weights and gradients: bus, socket, mooncake; auto = mooncake on RDMA, else socket
    transfer_protocol: str = "tcp"  # of transport = "mooncake": tcp or rdma
    cell_memory_gib: float = 0.0  # a cell may have so much where its tensors lie; 0 = what is free and what it holds
    dead_man_s: float = 60.0  # a node that hears nothing of the supervisor stops its work; lower than a lost node costs
    min_cells: int = 1  # with fewer cells left than this the job is requeued rather than going on
    save_window_s: float = 0.0  # before the job's end the run saves and leaves; 0 = from the measured time of a save


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """When GPUs change hands."""

    policy: str = "elastic"  # elastic | colocate | async
    slots_per_cell: int = 48  # executions one rollout cell serves well; the water level is compared with their sum
    steps: int = 60  # optimizer steps of the run
    steps_per_burst: int = 2  # m: more overlaps better and raises mean staleness, (m - 1) / 2
    groups_per_batch: int = 4  # groups per optimizer step
    group_size: int = 16  # executions per task; advantages are relative to them
    look_ahead_groups: int = -1  # groups dispatched beyond the burst: more overlap, staler; -1 = policy's own
    staleness_bound: int = 0  # steps of older work that a dispatch may queue behind; 0 = no bound
    cell_slots: tuple[int, ...] = ()  # one number per cell where cells are uneven; empty = slots_per_cell each
    standalone_cells: int = 0  # the last cells only ever serve: they carry the tail while a pool trains
    streaming: bool = True  # train batches as they come; False: a pool turns when the whole burst is ready
    dispatch_order: str = "queue"  # longest: of a dispatch, tasks that are forecast to take longest go first
    stagger_s: float = 0.0  # a dispatch is spread over so long, so that time limits do not coincide; costs idle slots
    water_level: str = "count"  # work: an execution that is forecast to end soon counts for a part of one
    tail_load: float = 1.0  # executions per slot that the last serving cell may carry: above 1 it holds a longer tail
    forecast_from: str = ""  # durations of an earlier run (JSON lines, by task): a forecast that knows tasks at once
    head_start_groups: int = 0  # of the next burst, before this one's last step: less waiting for the longest, staler
    async_train_cells: int = 1  # policy async: the first cells train for ever
    retry_budget: int = 2  # re-dispatches of one execution after infrastructure failures
    seed: int = 0  # order of tasks


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy and its tokenizer (Hugging Face layout)."""

    path: str = ""  # directory with config.json and model.safetensors
    tokenizer: str = ""  # directory with tokenizer.json and chat_template.jinja; empty = path
    served_name: str = "gyre-policy"  # what harnesses are told the model is called
    family: str = "auto"  # how it thinks and calls tools: a name of proxyd/families; auto = by its chat template


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The rollout engine of a cell."""

    kind: str = "tiny"  # tiny: the embedded CPU engine; sglang: the real one; emulate: takes the time of [emulate]
    max_running_requests: int = 64
    context_length: int = 2048  # tokens; longer prompts get the dialect's own context error
    stream_interval: int = 16  # tokens per chunk from engine to proxy; larger costs less CPU per token
    threads: int = 1
    python: str = ""  # sglang: interpreter of the environment that has it; empty = this one
    device: str = "cuda"  # sglang: cuda or cpu
    tensor_parallel: int = 1  # sglang: GPUs of one engine
    kv_store: bool = False  # engines read each other's KV, so that a call that moves is not prefilled again
    kv_share_mib: int = 256  # tiny: of KV that others may read, kept while this engine's memory is released
    routed_experts: bool = False  # sglang, a mixture of experts: tokens are trained by the experts that sampled them
    options: dict[str, str] = field(default_factory=dict)  # sglang: its own options by name; they win; true is a flag


@dataclass(frozen=True, kw_only=True)
class ProxydConfig:
    """The request router. Fixed for the life of a run: an execution's shard follows from its name and this number."""

    shards: int = 1  # processes that share the executions: one more takes another core and its part of each engine


@dataclass(frozen=True, kw_only=True)
class EmulateConfig:
    """engine.kind = "emulate": engines and trainers that only take time (`gyre emulate` writes this from a profile)."""

    time_scale: float = 1.0  # seconds that pass for one second of the profile
    tokens_per_h: float = 128.0  # tokens of an execution per nominal hour: the grain of its progress
    load_slope: float = 0.0  # a token takes 1 + slope * (load - 1) of its nominal time
    load_floor: float = 0.5  # below this load decoding gets no faster
    to_train_s: float = 8.52  # an engine lets go of its memory; seconds of the profile, like all below
    to_rollout_s: float = 3.46  # an engine takes new weights
    join_s: float = 2.0  # a satellite pulls the weights
    step_s: float = 30.0  # optimizer step and publishing
    execution_node_s: float = 275.0  # node-seconds of forward and backward of one execution
    nodes: tuple[int, ...] = ()  # of each cell, core first; empty = 1 each


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling of trained calls, whatever the harness asks for: then the recorded logprob is the behaviour logprob."""

    temperature: float = 1.0
    max_new_tokens: int = 256
    durability: str = "fdatasync"  # fdatasync survives a node, write survives a process
    delivery: str = "durable"  # durable: content goes out when the call is on disk; live: as it is sampled


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Loss and optimizer (DESIGN 8)."""

    lr: float = 5e-4
    lr_final: float = 1e-4  # linear from `lr` over the second half of the run
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    ratio_cap: float = 5.0  # r_t = min(exp(logp - b), cap)
    sequence_clip_low: float = 0.995
    sequence_clip_high: float = 1.005
    reading: str = "behaviour"  # s against recorded logprobs; proximal: against the version before the batch
    micro_step_tokens: int = 4096  # more runs faster, less spreads better over cells
    activation_gib: float = 0.0  # what one backward pass keeps, where you know better; 0 = a bound from the model
    checkpoint_every_steps: int = 10
    checkpoints_kept: int = 2
    dtype: str = "fp32"  # of weights and states: bf16 halves them; sums, masters and log-probabilities stay fp32
    piece_tokens: int = 16_384  # a longer micro-step is computed in such pieces: little memory, a third more time
    threads: int = 1  # of each rank
    tensor_parallel: int = 1  # ranks of every cell that share each layer: divides heads, key/value heads, vocabulary
    pipeline_parallel: int = 1  # stages of every cell, each with its share of the layers: divides their number
    context_parallel: int = 1  # ranks of every cell that share each micro-step's tokens: divides its memory and time
    expert_parallel: int = 1  # of those the ranks that share the experts too: divides context_parallel and the experts

    @property
    def ranks(self) -> int:
        """Processes that train in one cell."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel


@dataclass(frozen=True, kw_only=True)
class TrajectoryConfig:
    """What of an execution is trained (DESIGN 6)."""

    jmax: int = 5  # 0 = no bound
    rule: str = "greedy"  # greedy: most new tokens within the best class; draw: the paper's random draw
    min_valid: int = 2  # executions with a valid outcome that a group needs
    eps: float = 1e-6  # added to the group's standard deviation
    order: str = "arrival"  # of groups in a burst: shuffle and stratified mix short and long ones, and wait for them
    reserve_groups: int = 8  # that shuffle and stratified hold back at most: more mixes better and trains later
    shuffle_advantages: bool = False  # control arm of bench.learning: advantages permuted within the group


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Where tasks come from and how they run."""

    train: str = ""  # JSONL of {id, instruction, workspace, evaluator}
    heldout: str = ""  # same form; measured, never trained
    harness: tuple[str, ...] = ()  # command; the instruction is its last argument
    harness_env: dict[str, str] = field(default_factory=dict)
    harness_limit_s: float = 120.0
    open_call_s: float = 60.0  # a call open at the limit is waited for at most so long: only its answer tells its wait
    overall_limit_s: float = 86_400.0  # from its start, waits included: then it is an infrastructure failure
    grace_s: float = 5.0  # between the warning signal (TERM) at a limit and the end of all its processes
    evaluation_limit_s: float = 20.0
    workspace: str = "plain"  # plain: a directory, for trusted toy models only; bwrap, apptainer, pyxis: walls
    image: str = ""  # file, directory or name for walled workspaces whose task names none; empty: this machine
    images: str = ""  # a directory with images by name (`/` and `:` as `_`) for tasks that name one
    visible: tuple[str, ...] = ()  # more files and directories of this machine that a walled workspace shows, read-only
    disk_mib: int = 4096  # of one execution (also its largest file); more ends it and what is there is scored
    processes: int = 512  # of one execution at once; more ends it likewise
    printed_mib: int = 8  # kept of stdout, of stderr and of the transcript of one execution, before compression
    snapshots: bool = True  # every workspace as it was scored, in workspaces.git: a group shares what is equal
    keep_workspaces: bool = False  # True leaves the directories where they are, too
    progress_every_s: float = 0.0  # scores running workspaces so often, as a metric only; 0 = never
    concurrent_per_executor: int = 160  # executions one executor runs at once


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out tasks before the first and after the last step."""

    tasks: int = 128  # 0 = none
    sampled: bool = True  # at rollout.temperature
    greedy: bool = True


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole tree."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    proxyd: ProxydConfig = field(default_factory=ProxydConfig)
    emulate: EmulateConfig = field(default_factory=EmulateConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    trajectories: TrajectoryConfig = field(default_factory=TrajectoryConfig)
    tasks: TaskConfig = field(default_factory=TaskConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


CHOICES = {
    "scheduler.policy": ("elastic", "colocate", "async"),
    "cluster.transport": ("auto", "bus", "socket", "mooncake"),
    "cluster.transfer_protocol": ("tcp", "rdma"),
    "engine.kind": ("tiny", "sglang", "emulate"),
    "engine.device": ("cuda", "cpu"),
    "rollout.durability": ("fdatasync", "write"),
    "rollout.delivery": ("durable", "live"),
    "trainer.dtype": ("fp32", "bf16"),
    "trainer.reading": ("behaviour", "proximal"),
    "trajectories.rule": ("greedy", "draw"),
    "trajectories.order": ORDERS,
    "scheduler.dispatch_order": ("queue", "longest"),
    "scheduler.water_level": ("count", "work"),
    "tasks.workspace": ("plain", "bwrap", "apptainer", "pyxis"),
}
MAX_SHARDS = 256
AT_LEAST: dict[str, float] = {
    "cluster.cells": 1,
    "cluster.executors": 1,
    "cluster.executors_max": 0,
    "tasks.progress_every_s": 0,
    "cluster.heartbeat_s": 0.05,
    "cluster.dead_man_s": 5,
    "cluster.cell_memory_gib": 0,
    "trainer.activation_gib": 0,
    "cluster.min_cells": 1,
    "cluster.save_window_s": 0,
    "scheduler.slots_per_cell": 1,
    "scheduler.steps": 1,
    "scheduler.steps_per_burst": 1,
    "scheduler.groups_per_batch": 1,
    "scheduler.group_size": 1,
    "scheduler.retry_budget": 0,
    "scheduler.look_ahead_groups": -1,
    "scheduler.staleness_bound": 0,
    "scheduler.standalone_cells": 0,
    "scheduler.async_train_cells": 1,
    "proxyd.shards": 1,
    "rollout.temperature": 0.01,
    "emulate.time_scale": 1e-6,
    "emulate.tokens_per_h": 1.0,
    "trajectories.jmax": 0,
    "trajectories.reserve_groups": 0,
    "scheduler.stagger_s": 0.0,
    "scheduler.tail_load": 1.0,
    "scheduler.head_start_groups": 0,
    "tasks.harness_limit_s": 0.1,
    "tasks.overall_limit_s": 0.1,
    "tasks.grace_s": 0,
    "tasks.evaluation_limit_s": 0.1,
    "tasks.disk_mib": 1,
    "tasks.processes": 1,
    "tasks.printed_mib": 0,
    "trainer.checkpoint_every_steps": 1,
    "trainer.checkpoints_kept": 1,
    "trainer.context_parallel": 1,
    "trainer.expert_parallel": 1,
    "trainer.piece_tokens": 1,
    "trainer.pipeline_parallel": 1,
    "trainer.tensor_parallel": 1,
}


def load(path: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read a TOML file; relative paths in it are relative to it. Raises ConfigError."""
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no configuration at {path}; `gyre init` writes one") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not TOML: it is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    for dotted, value in (overrides or {}).items():
        _put(tree, dotted, value)
    return from_tree(tree, base=path.parent)


def from_tree(tree: dict[str, Any], base: Path | None = None) -> Config:
    """A checked Config from nested dicts. Raises ConfigError naming the key."""
    config = _build(Config, tree, "")
    _check(config)
    return _absolute(config, base) if base is not None else config


def from_json(text: str) -> Config:
    """The resolved form that `to_json` wrote."""
    return from_tree(json.loads(text))


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def keys(cls: Any = Config, prefix: str = "") -> list[str]:
    """Every dotted key."""
    out: list[str] = []
    hints = typing.get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        kind = hints[spec.name]
        dotted = f"{prefix}{spec.name}"
        out.extend(keys(kind, f"{dotted}.") if dataclasses.is_dataclass(kind) else [dotted])
    return out


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value


def _build(cls: Any, tree: Any, prefix: str) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"{prefix.rstrip('.')} is a section, not a value: write [{prefix.rstrip('.')}]")
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            raise ConfigError(_unknown(f"{prefix}{key}"))
    values = {}
    for key, value in tree.items():
        kind = hints[key]
        dotted = f"{prefix}{key}"
        values[key] = (
            _build(kind, value, f"{dotted}.") if dataclasses.is_dataclass(kind) else _value(kind, value, dotted)
        )
    return cls(**values)


def _unknown(dotted: str) -> str:
    near = difflib.get_close_matches(dotted, keys(), n=1, cutoff=0.5) or [
        k for k in keys() if k.rsplit(".", 1)[-1] == dotted.rsplit(".", 1)[-1]
    ]
    hint = f", did you mean {near[0]}?" if near else "; `gyre init` writes every key with a comment"
    return f"unknown key {dotted}{hint}"


def _value(kind: Any, value: Any, dotted: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if isinstance(value, list | tuple) and all(type(v) is item for v in value):
            return tuple(value)
        raise ConfigError(f"{dotted} must be a list of {'strings' if item is str else 'whole numbers'}, not {value!r}")
    if typing.get_origin(kind) is dict:
        if isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
            return dict(value)
        raise ConfigError(f"{dotted} must be a table of strings, not {value!r}")
    if isinstance(kind, types.UnionType) or not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{dotted} must be {kind.__name__}, not {value!r}")
    return value


def _check(config: Config) -> None:
    for dotted, allowed in CHOICES.items():
        value = _get(config, dotted)
        if value not in allowed:
            raise ConfigError(f"{dotted} must be one of {', '.join(allowed)}, not {value!r}")
    for dotted, least in AT_LEAST.items():
        value = _get(config, dotted)
        if value < least:
            raise ConfigError(f"{dotted} must be at least {least:g}, not {value}")
    _check_cells(config)
    _check_shards(config)


def _check_shards(config: Config) -> None:
    """A request id has two digits for its shard, and each shard needs room for a call at an engine."""
    shards, room = config.proxyd.shards, config.engine.max_running_requests
    if shards > MAX_SHARDS:
        raise ConfigError(f"proxyd.shards must be at most {MAX_SHARDS}, not {shards}")
    if 0 < room < shards:
        raise ConfigError(
            f"engine.max_running_requests ({room}) is shared by proxyd.shards ({shards}): each needs at least one"
        )


def _check_cells(config: Config) -> None:
    """Numbers that only make sense together."""
    cells, scheduler = config.cluster.cells, config.scheduler
    if scheduler.cell_slots and len(scheduler.cell_slots) != cells:
        raise ConfigError(
            f"scheduler.cell_slots must have one number per cell ({cells}), not {len(scheduler.cell_slots)}"
        )
    if any(slots < 1 for slots in scheduler.cell_slots):
        raise ConfigError("scheduler.cell_slots must be at least 1 each")
    if config.engine.kind == "emulate" and config.trainer.ranks > 1:
        raise ConfigError(
            "an emulated trainer is one process: trainer.tensor_parallel, pipeline_parallel and context_parallel need "
            "another engine.kind"
        )
    if config.engine.routed_experts and config.engine.kind != "sglang":
        raise ConfigError(
            f"engine.routed_experts needs engine.kind = sglang: {config.engine.kind} serves no mixture of experts"
        )
    if config.emulate.nodes and len(config.emulate.nodes) != cells:
        raise ConfigError(f"emulate.nodes must have one number per cell ({cells}), not {len(config.emulate.nodes)}")
    if scheduler.standalone_cells >= cells:
        raise ConfigError(f"scheduler.standalone_cells must leave a cell that trains: at most {cells - 1}")
    if scheduler.policy == "async" and cells > 1 and scheduler.async_train_cells >= cells:
        raise ConfigError(f"scheduler.async_train_cells must leave a cell that serves: at most {cells - 1}")


def _get(config: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


def _absolute(config: Config, base: Path) -> Config:
    def fixed(text: str) -> str:
        return str((base / text).resolve()) if text else text

    model = dataclasses.replace(config.model, path=fixed(config.model.path), tokenizer=fixed(config.model.tokenizer))
    python = config.engine.python  # a link of an environment must stay one: it says which environment
    python = str((base / python).absolute()) if "/" in python else python
    tasks = dataclasses.replace(
        config.tasks,
        train=fixed(config.tasks.train),
        heldout=fixed(config.tasks.heldout),
        image=fixed(config.tasks.image) if (base / config.tasks.image).exists() else config.tasks.image,
        images=fixed(config.tasks.images),
        visible=tuple(fixed(path) for path in config.tasks.visible),
    )
    scheduler = dataclasses.replace(config.scheduler, forecast_from=fixed(config.scheduler.forecast_from))
    engine = dataclasses.replace(config.engine, python=python)
    return dataclasses.replace(config, model=model, tasks=tasks, scheduler=scheduler, engine=engine)
