"""Every message of gyre on one page. Frozen, tagged; direction and promise in each docstring.

Promises: *once* = at most once (a lost one is replaced by the next); *again* = at least once and idempotent, so the
sender repeats it until it is answered. A field typed `bytes` travels as a raw frame of its own, never inside msgpack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

from gyre_base.vocabulary import Outcome, Purpose, Role

T = TypeVar("T")
BY_TAG: dict[str, type] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(tag: str) -> Callable[[type[T]], type[T]]:
    """Make a class a message. A second class with the same tag is an error at import."""

    def register(cls: type[T]) -> type[T]:
        assert tag not in BY_TAG, f"two messages are called {tag}"
        made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        made.TAG = tag  # type: ignore[attr-defined]
        BY_TAG[tag] = made
        return made

    return register


# ---- any daemon -------------------------------------------------------------------------------------------------


@message("hello")
class Hello:
    """peer -> server, first on a connection, again after a reconnect. `holds` is what the peer still has
    (executions, leases).
    """

    kind: str
    name: str
    life: int
    pid: int
    slots: int = 0
    holds: tuple[str, ...] = ()
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)


@message("welcome")
class Welcome:
    """server -> peer. Answers `hello`; `life` is the server's."""

    life: int


@message("heartbeat")
class Heartbeat:
    """peer -> server every 2 s. Once. `progress` counts finished work (tokens, micro-steps, calls), `work` what it has
    in hand: a peer with work and without progress is stalled, one without work is idle. An executor's `work` is the
    number of executions that it holds.
    """

    kind: str
    name: str
    life: int
    progress: int = 0
    work: int = 0


@message("goodbye")
class Goodbye:
    """peer -> server. Once: a clean leave, so nobody waits for the heartbeat to run out."""

    kind: str
    name: str
    life: int


@message("stacks?")
class DumpStacks:
    """server -> peer. Once: say what every thread and task of yours is doing. Answered by `stacks` in any daemon."""


@message("stacks")
class Stacks:
    """peer -> server. `text` is for people."""

    text: str


@message("status?")
class StatusRequest:
    """CLI -> any daemon. Answered by `status`. `what` picks a view; an unknown view is refused."""

    what: str = "status"
    argument: str = ""


@message("status")
class StatusReply:
    """any daemon -> CLI. `rows` is one object per line of `--json`."""

    rows: tuple[dict[str, Any], ...]


@message("order")
class OperatorOrder:
    """CLI -> daemon: a person's wish (`flip`, `drain`, `freeze`, `thaw`, `stop`). Answered by `done` or `refused`."""

    verb: str
    argument: str = ""
    options: dict[str, str] = dataclasses.field(default_factory=dict)


@message("done")
class Done:
    """answer: carried out, or noted for the second time."""

    note: str = ""


@message("refused")
class Refused:
    """answer: not in this state, with the reason (exit code 4)."""

    why: str


# ---- the supervisor of a Slurm job ----------------------------------------------------------------------------------


@message("job")
class JobFacts:
    """supervisor -> cellctl, at the start of either and at each change. Again; answered by `done`.

    `began_at` and `ends_at` are s since the epoch, 0 = no limit; `window_s` is a person's save window, 0 = computed;
    `lost` are cells whose node is no longer in the job: nobody waits for them, and what they still say is not heard.
    """

    job: str
    restarts: int
    nodes: tuple[str, ...]
    began_at: float
    ends_at: float
    window_s: float = 0.0
    lost: tuple[str, ...] = ()


@message("leave")
class LeaveJob:
    """supervisor -> cellctl: the job ends soon. Dispatch and turn nothing more, save. Again; answered by `done`."""

    why: str


@message("cell.ending")
class CellEnding:
    """celld -> supervisor: this cell was told to end, and not by the supervisor. Again; answered by `done`."""

    cell: str
    why: str


# ---- cellctl <-> executors ----------------------------------------------------------------------------------------


@message("execution.order")
class ExecutionOrder:
    """cellctl -> executor. Again: the executor knows an execution by its id and starts it once.

    `task` is the task as in the task file; `limit_s` is the harness limit.
    """

    execution: str
    group: str
    task: dict[str, Any]
    attempt: int
    purpose: Purpose
    limit_s: float


@message("execution.cancel")
class CancelExecution:
    """cellctl -> executor. Again."""

    execution: str
    why: str


@message("execution.ended")
class ExecutionEnded:
    """executor -> cellctl. Once, and to a new cellctl: the harness is gone and calls no more, its score is to come.

    If this is lost, the execution counts as load until its outcome comes.
    """

    execution: str


@message("execution.finished")
class ExecutionFinished:
    """executor -> cellctl. Again, until `execution.noted`. `score` is None unless the outcome carries one.

    `waited_s` is time the infrastructure held its calls (credited to the harness); `harness_errors` counts errors that
    the harness was shown (0 in a healthy run: a role switch must never be seen).
    """

    execution: str
    outcome: Outcome
    score: float | None = None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    evaluator: str = ""
    evaluator_version: str = ""
    error: str = ""
    exit_code: int | None = None
    wall_s: float = 0.0
    waited_s: float = 0.0
    calls: int = 0
    harness_errors: int = 0


@message("execution.noted")
class ExecutionNoted:
    """cellctl -> executor. Once: the outcome is in cellctl's journal, the executor may forget it."""

    execution: str


# ---- cellctl <-> proxyd -------------------------------------------------------------------------------------------


@message("execution.open")
class OpenExecution:
    """cellctl -> its shard of proxyd, before the order goes out. Again. Fixes the sampling of its calls, whatever the
    harness asks for.
    """

    execution: str
    purpose: Purpose
    temperature: float
    paused: bool = False  # the newest word counts: calls are held with what they have, and their limit stands still


@message("execution.close")
class CloseExecution:
    """cellctl -> its shard of proxyd. Again. No further call of this execution is accepted; what runs is aborted."""

    execution: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """One line of the engine table. `order` is the cell's place in the fixed order: a later cell stays longer."""

    cell: str
    url: str
    version: str
    order: int
    slots: int
    serving: bool


@message("engines")
class EngineTable:
    """cellctl -> every shard of proxyd: the whole table, numbered. Again; an older number is ignored."""

    number: int
    engines: tuple[Engine, ...]


@message("cell.drain")
class DrainCell:
    """cellctl -> every shard of proxyd: stop routing to this cell, move its calls to others. Again; each answers with
    `cell.drained`.
    """

    cell: str
    epoch: int


@message("cell.drained")
class CellDrained:
    """proxyd -> cellctl: no call of this shard's is left there. Again. `moved_mid_generation` had sampled at least one
    token.
    """

    cell: str
    epoch: int
    moved: int
    moved_mid_generation: int
    seconds: float
    shard: int = 0


@message("engine.lost")
class EngineLost:
    """proxyd -> cellctl. Once: calls to this engine fail. cellctl decides."""

    cell: str
    url: str
    why: str


# ---- cellctl <-> celld --------------------------------------------------------------------------------------------


@message("cell.flip")
class FlipCell:
    """cellctl -> celld. Again; obeyed only if `epoch` is newer than the agent's. `version` = weights to serve (to
    rollout).
    """

    cell: str
    to: Role
    epoch: int
    version: str = ""


@message("cell.update")
class UpdateEngine:
    """cellctl -> celld: load `version` into a drained engine that stays in rollout. Again; answered by `cell.role`."""

    cell: str
    epoch: int
    version: str


@message("cell.role")
class RoleChanged:
    """celld -> cellctl, after `cell.flip` or `cell.update` and at start. Again. `phases_s` = seconds by phase of the
    switch.
    """

    cell: str
    role: Role
    epoch: int
    version: str
    engine_url: str = ""
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)


@message("cell.fault")
class CellFault:
    """celld -> cellctl: a child of the cell died or refused. Once. The agent restarts it and reports its role again."""

    cell: str
    what: str
    detail: str


@message("cell.refused")
class SwitchRefused:
    """celld -> cellctl: the order to train was not begun, because of `why`; the cell serves as before. Again."""

    cell: str
    epoch: int
    why: str


@message("save")
class SaveCheckpoint:
    """cellctl -> celld of the core -> its rank. Again; answered by `saved`."""

    why: str


@message("saved")
class CheckpointSaved:
    """rank -> celld -> cellctl, or rank -> cellctl for a save of its own. Again. `seconds` = what it took, 0 if it was
    there already.
    """

    version: str
    path: str
    seconds: float = 0.0


# ---- cellctl <-> trajd --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalExecution:
    """One member of a closed group, after all attempts."""

    execution: str
    outcome: Outcome
    score: float | None


@message("group.closed")
class GroupClosed:
    """cellctl -> trajd: membership is final. Again; answered by `group.packed`. `serial` orders groups for the whole
    run. `seconds`: its longest execution's. `closing` counts closed groups; after this one, `to_come` were dispatched
    and not closed.
    """

    group: str
    task: str
    serial: int
    dispatched_version: str
    executions: tuple[FinalExecution, ...]
    seconds: float = 0.0
    closing: int = 0
    to_come: int = 0


@message("group.packed")
class GroupPacked:
    """trajd -> cellctl. Again. `counted` = executions in the loss's divisor; `enough` is False if the group must be
    replaced.
    """

    group: str
    enough: bool
    counted: int
    micro_steps: int
    owned_tokens: int
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)


# ---- trainer ranks <-> trajd ---------------------------------------------------------------------------------------


@message("step.claim")
class ClaimMicroStep:
    """rank -> trajd. Answered by `step.lease`, `step.none`, `step.stale` or (core only) `batch.complete`.

    `version` is what the rank's weights are; `ids` are those already summed into its gradient for the open batch, so
    that a
    restarted trajd and a restarted rank agree.
    """

    cell: str
    life: int
    version: str
    core: bool
    batch: int = -1
    ids: tuple[str, ...] = ()


@message("step.lease")
class MicroStepLease:
    """trajd -> rank: compute this. `payload` is the packed executions (trajtools.pack), `layout` describes its
    arrays.
    """

    batch: int
    id: str
    base_version: str
    layout: dict[str, Any]
    payload: bytes


@message("step.none")
class NoMicroStep:
    """trajd -> rank: nothing to claim now; ask again after `wait_s`."""

    why: str
    wait_s: float


@message("step.stale")
class StaleWeights:
    """trajd -> rank: this batch trains from another version; pull it first."""

    version: str


@message("step.computed")
class MicroStepComputed:
    """rank -> trajd: this id is in the gradient sum of (cell, life). Again; answered by `done` or `refused` (then
    drop the sum).
    """

    batch: int
    id: str
    cell: str
    life: int


@message("step.returned")
class LeaseReturned:
    """rank -> trajd: stopped with a claim in doubt; a lease that came of it is free, the sum stands. Again; `done`."""

    cell: str
    life: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contribution:
    """Which cell holds the gradient sum of which micro-steps."""

    cell: str
    life: int
    ids: tuple[str, ...]


@message("batch.complete")
class BatchComplete:
    """trajd -> core rank: every micro-step is computed. The core pulls the sums, divides by `executions`, steps."""

    batch: int
    base_version: str
    executions: int
    contributions: tuple[Contribution, ...]
    staleness: dict[str, Any] = dataclasses.field(default_factory=dict)


@message("batch.lost")
class ContributionLost:
    """core rank -> trajd: this cell's sum can't be had; its ids are to be leased again. Again; answered by `done`."""

    batch: int
    cell: str
    life: int


@message("batch.applied")
class BatchApplied:
    """core rank -> trajd: the optimizer stepped with exactly these ids. Again; answered by `done`."""

    batch: int
    ids: tuple[str, ...]
    version: str
    weights_sum: float


@message("batch.retired")
class BatchesRetired:
    """core rank -> trajd: a durable checkpoint contains every batch below `below`. Again; answered by `done`."""

    below: int
    version: str


@message("ledger")
class Ledger:
    """core rank -> trajd at start: the checkpoint's word on what is trained. Again; answered by `done`. It wins over
    trajd's memory.
    """

    next_batch: int
    version: str
    applied: tuple[str, ...]


@message("step.done")
class StepDone:
    """core rank -> cellctl. Again. One optimizer step; `metrics` are plain numbers by name."""

    batch: int
    version: str
    metrics: dict[str, float]


# ---- rank <-> rank, celld <-> rank ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteSlot:
    """Bytes in a registered slot of another process, to be read one-sidedly: xxh3-64 of each chunk; a lease to give
    back.
    """

    peer: str
    address: int
    size: int
    chunk_bytes: int
    digests: tuple[int, ...]
    lease: int


@message("slot.done")
class SlotDone:
    """reader -> owner of a slot: read, or given up. At most once; time ends a lease too."""

    lease: int


@message("gradient?")
class PullGradient:
    """core rank -> the same rank of a satellite: your sum for this batch. Again: the satellite keeps it until it sees a
    newer base version.
    """

    batch: int
    life: int
    by: str = "bus"  # socket or mooncake: bytes in a slot, where the peer has that engine too
    rank: int = 0  # within the cell: parts of the model may be equally long, so that only this tells them apart


@message("gradient")
class GradientSum:
    """satellite rank -> core rank. fp32 little-endian, flat in parameter order; `digest` = xxh3-128 of payload.

    `weight_sum` = sum over the owned tokens really trained of 1/T_e; `stats` are sums that the core adds up for its
    metrics.
    """

    batch: int
    ids: tuple[str, ...]
    weight_sum: float
    stats: dict[str, float]
    digest: str
    payload: bytes  # empty if in `slot`
    slot: RemoteSlot | None = None


@message("weights?")
class PullWeights:
    """satellite rank or celld -> core rank. Answered by `weights` or `refused`. `have` = version already held."""

    have: str = ""
    by: str = "bus"  # socket or mooncake: bytes in a slot, where the core has that engine too


@message("weights")
class WeightsSnapshot:
    """core rank -> puller. `layout` = [[name, F32 or BF16, shape], ...] of tensors, one after another in payload; empty
    payload if `have` is current.
    """

    version: str
    layout: tuple[tuple[str, str, tuple[int, ...]], ...]
    digest: str
    payload: bytes  # empty if in `slot`
    slot: RemoteSlot | None = None


# ---- the ranks of one cell -------------------------------------------------------------------------------------------
# Orders of rank 0 to the others, numbered from 1; it does its own part meanwhile. Again; answered by `rank.done`, or by
# `refused`, and then every rank of the cell ends.


@message("rank.compute")
class ComputeMicroStep:
    """leader -> rank: forward and backward, beside the sum. `payload` and `layout` as in `step.lease`."""

    number: int
    batch: int
    id: str
    base_version: str
    layout: dict[str, Any]
    payload: bytes


@message("rank.add")
class AddMicroStep:
    """leader -> rank: trajd took what was computed last; it goes into the sum."""

    number: int
    id: str


@message("rank.drop")
class DropSum:
    """leader -> rank: the sum and what was computed last are void."""

    number: int


@message("rank.gather")
class GatherSums:
    """core's leader -> rank: pull the sum of each part from the same rank of its cell."""

    number: int
    batch: int
    parts: tuple[Contribution, ...]


@message("rank.step")
class StepBatch:
    """core's leader -> rank: divide what was gathered, clip, step the optimizer."""

    number: int
    batch: int
    base_version: str
    executions: int


@message("rank.take")
class TakeTensors:
    """leader -> rank: `layout` (as in `weights`) follows by broadcast; your part of it is your weights, or your
    `moments`."""

    number: int
    what: str
    layout: tuple[tuple[str, str, tuple[int, ...]], ...]
    steps: int = 0  # of the optimizer


@message("rank.give")
class GiveTensors:
    """leader -> rank: your part of the weights, of their fp32 `masters` or of the `moments`, by a collective of the
    cell."""

    number: int
    what: str


@message("rank.done")
class OrderDone:
    """rank -> leader. `here`: which parts were gathered; `stats` of a micro-step as far as this rank knows them."""

    number: int
    here: tuple[bool, ...] = ()
    stats: dict[str, float] = dataclasses.field(default_factory=dict)


# ---- celld <-> rank --------------------------------------------------------------------------------------------------


@message("rank.train")
class StartTraining:
    """celld -> rank: claim from now on. Again."""

    epoch: int


@message("rank.stop")
class StopTraining:
    """celld -> rank: finish the micro-step in hand, claim no more. Again; answered by `rank.state`. A gradient sum
    stays served.
    """

    epoch: int


@message("rank.state")
class RankState:
    """rank -> celld. Again. `training` says whether it claims; `version` its weights."""

    cell: str
    rank: int
    life: int
    training: bool
    version: str
    epoch: int
