"""What is simulated: a cluster, a workload and its time laws, and arms that differ only in how cells are shared.

Profiles are TOML: shipped ones by name (`cellctl/profiles`), others by path. A wrong key names itself (ConfigError).
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gyre_base.config import ConfigError

T = TypeVar("T")
ABOVE_0 = {"median_h", "hard_factor", "limit_h", "slots_per_node", "slots"}
AT_LEAST_1 = {
    *("gpus_per_node", "steps", "groups_per_batch", "group_size", "tasks", "replica_nodes"),
    *("steps_per_burst", "train_cells", "tail_load"),
}


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Hours of an execution at nominal load: exp(median + task effect + rollout effect), some tasks harder by a
    factor.
    """

    median_h: float = 1.8
    task_sigma: float = 0.2
    rollout_sigma: float = 0.25
    hard_share: float = 0.0
    hard_factor: float = 1.0
    limit_h: float = 6.0  # overall wall-clock limit; the infrastructure's own pauses do not count
    harness_limit_h: float = 0.0  # a second limit on the execution's own work, at nominal load; 0 = none
    file: str = ""  # recorded durations instead of the model: see workload.py


@dataclass(frozen=True, kw_only=True)
class Laws:
    """How long things take."""

    train_node_h: float = 19.0  # node-hours of forward and backward per optimizer step
    load_slope: float = 0.2  # an execution takes 1 + slope * (load - 1) of its nominal time; load = executions / slots
    load_floor: float = 0.5  # below this load decoding gets no faster
    slots_per_node: float = 16.0
    replica_nodes: int = 4  # nodes that compute one micro-step together: a larger cell computes several at once
    size_share: float = 0.0  # of a micro-step's cost that grows with its execution's hours; the rest is equal
    drain_s: float = 1.5  # part of to_train_s: routing away and aborting
    to_train_s: float = 8.52
    to_rollout_s: float = 3.46
    join_s: float = 2.0  # a satellite pulls the parameters before its first micro-step
    step_s: float = 30.0  # gradients to the core, optimizer step, publishing
    pack_s: float = 5.0  # a closed group until its micro-steps can be claimed


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to share the nodes. `hours` are the published ones; `source`: fitted, published or derived (from
    percentages).
    """

    name: str
    policy: str
    nodes: tuple[int, ...]  # of each cell, core first
    steps_per_burst: int = 4
    look_ahead: float = 0.0  # batches in the pipeline beyond the burst's own
    standalone: int = 0  # so many of the last cells only ever serve
    train_cells: int = 1  # policy async
    streaming: bool = True
    slots: float = 1.0  # of the slots that engines have, for the water level: above 1 cells are lent sooner
    dispatch_order: str = "queue"  # this and the next six: options of the scheduler by their names in the configuration
    stagger_h: float = 0.0
    water_level: str = "count"
    tail_load: float = 1.0
    head_start: float = 0.0  # batches
    known: int = 0  # executions of every task that an earlier run recorded: what the forecast starts from
    order: str = "arrival"
    reserve_groups: int = 8
    hours: float = 0.0
    source: str = ""


def even(nodes: int, cells: int) -> tuple[int, ...]:
    """Cells that differ by at most one node, larger ones first: the last one, which holds the tail, is the smallest."""
    return tuple(nodes // cells + (i < nodes % cells) for i in range(cells))


def with_last(nodes: int, cells: int, last: int) -> tuple[int, ...]:
    """The same number of cells, the last one of this size."""
    return (*even(nodes - last, cells - 1), last)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What `python -m cellctl.simulate.fit` moves, and towards what: the arms' published hours and the published
    statistics.
    """

    arms: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()  # of durations and laws, as many as arms
    durations: tuple[str, ...] = ()  # solved for the statistics, as many as there are
    observed: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One published or own set-up."""

    name: str
    about: str = ""
    gpus_per_node: int = 8
    steps: int = 12  # measured steps; the run goes on, so the last ones are like the others
    groups_per_batch: int = 8
    group_size: int = 16
    tasks: int = 256  # different ones; a run that needs more groups comes back to them in a new order
    durations: Durations = field(default_factory=Durations)
    laws: Laws = field(default_factory=Laws)
    arms: tuple[Arm, ...] = ()
    fit: Fit = field(default_factory=Fit)

    def arm(self, name: str) -> Arm:
        for one in self.arms:
            if one.name == name:
                return one
        raise ConfigError(f"profile {self.name} has no arm {name!r}: {', '.join(a.name for a in self.arms)}")

    def changed(self, **values: float) -> Profile:
        """With some numbers of `durations` or `laws` replaced."""
        durations = {k: v for k, v in values.items() if k in _names(Durations)}
        laws = {k: v for k, v in values.items() if k in _names(Laws)}
        return dataclasses.replace(
            self,
            durations=replaced(self.durations, durations),
            laws=replaced(self.laws, laws),
        )


def replaced(instance: T, values: dict[str, float]) -> T:
    """`dataclasses.replace` with names that are only known at run time."""
    return dataclasses.replace(instance, **typing.cast("dict[str, Any]", values))  # type: ignore[type-var]


def _names(cls: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def shipped() -> list[str]:
    """Names of the profiles in the package."""
    folder = resources.files("cellctl") / "profiles"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(name: str) -> Profile:
    """A shipped profile by name or a file. Raises ConfigError."""
    folder = resources.files("cellctl") / "profiles"
    source = folder / f"{name}.toml" if name in shipped() else Path(name)
    try:
        stem = name if name in shipped() else Path(name).stem
        return from_tree({"name": stem, **tomllib.loads(source.read_text())})
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ConfigError(f"no profile {name!r}: neither a file nor one of {', '.join(shipped())}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not TOML: it is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from None


def from_tree(tree: dict[str, Any]) -> Profile:
    arms = _table(tree, "arms")
    durations = _build(Durations, _table(tree, "durations"), "durations")
    laws = _build(Laws, _table(tree, "laws"), "laws")
    fit = _build(Fit, _table(tree, "fit"), "fit")
    built = tuple(_build(Arm, {"name": name, **_table(arms, name)}, f"arms.{name}") for name in list(arms))
    made: Profile = _build(Profile, {**tree, "durations": durations, "laws": laws, "arms": built, "fit": fit}, "")
    for part, where in (
        (made, ""),
        (durations, "durations."),
        (laws, "laws."),
        *((a, f"arms.{a.name}.") for a in built),
    ):
        _check(part, where)
    return made


def _check(part: Any, where: str) -> None:
    """Numbers that nothing could be simulated with. Raises ConfigError."""
    for name in _names(type(part)) & (ABOVE_0 | AT_LEAST_1):
        value, least = getattr(part, name), 1 if name in AT_LEAST_1 else 0
        if value < least or value <= 0:
            raise ConfigError(f"{where}{name} must be {f'at least {least}' if least else 'above 0'}, not {value:g}")
    for name in _names(type(part)) - ABOVE_0 - AT_LEAST_1:
        value = getattr(part, name)
        if isinstance(value, int | float) and value < 0:
            raise ConfigError(f"{where}{name} must not be below 0, but is {value:g}")
    if isinstance(part, Arm) and (not part.nodes or min(part.nodes) < 1):
        raise ConfigError(f"{where}nodes must name the nodes of each cell, at least 1 each, not {list(part.nodes)}")


def _is_plain(value: Any) -> bool:
    """As TOML has it; what is built already is not."""
    return isinstance(value, str | int | float | list | dict)


def _table(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """Take a table out of the tree; {} if it is not there."""
    found = tree.pop(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{key} must be a table, not {found!r}")
    return found


def _build(cls: Any, tree: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        dotted = f"{where}.{key}" if where else key
        if key not in hints:
            raise ConfigError(f"unknown key {dotted}; known: {', '.join(sorted(hints))}")
        try:
            values[key] = msgspec.convert(value, hints[key]) if _is_plain(value) else value
        except msgspec.ValidationError as error:
            raise ConfigError(f"{dotted}: {error}") from None
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None
