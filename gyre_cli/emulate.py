"""A profile of the simulator lived through by the real daemons in scaled time: `gyre emulate` and bench.elastic.

The run directory gets a workload (hours of every task's executions, drawn as the simulator draws them), a tokenizer
that knows bytes, and a configuration in which engines and trainers only take time. Everything else is the real thing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import click

from cellctl.simulate import profile as profiles
from cellctl.simulate import workload
from cellctl.simulate.profile import Arm, Profile
from cellctl.simulate.run import with_policy
from cellctl.simulate.world import World, scheduler_tree
from celld import emulate
from gyre_base import config as configuration
from gyre_base.clock import WallClock
from gyre_base.config import Config, ConfigError
from gyre_base.journal import read
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir
from gyre_cli import common, quickstart, runs
from gyre_cli.supervisor import Supervisor

CALLS = 4  # of an execution: each costs the real path once, and only at the next one can it change its engine
TOKENS_PER_H = 128.0
PATIENCE_S = 60.0  # of the profile: how long a call that is open at the limit is waited for
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (messages[0].content + '\\n' if messages[0].role == 'system' else '') }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def prepare(profile: Profile, arm: Arm, seed: int, root: Path, seconds_per_hour: float) -> tuple[RunDir, Config]:
    """A run directory that lives one arm of a profile. Raises ConfigError, RunDirError."""
    run = RunDir.create_new(root)
    make_keys(run)
    model, tasks, hours = root / "model", root / "tasks.jsonl", root / "hours"
    write_model(model)
    work = workload.make(profile.durations, seed)
    numbers = range(profile.tasks)
    groups = (work.group(task, 0, profile.group_size) for task in numbers)
    hours.write_text("".join(" ".join(f"{h:.6f}" for h in group) + "\n" for group in groups))
    tasks.write_text("".join(json.dumps(_task(task)) + "\n" for task in numbers))
    config = configuration.from_tree(_tree(profile, arm, seed, root, seconds_per_hour))
    needed = config.scheduler.steps * config.scheduler.groups_per_batch
    if needed > profile.tasks:
        raise ConfigError(f"profile {profile.name} needs {needed} tasks and has {profile.tasks}; set tasks = {needed}")
    runs.check(config)
    run.write_atomic("run.json", configuration.to_json(config))
    runs.point_latest(run)
    return run, config


def _task(number: int) -> dict[str, Any]:
    evaluator = {"command": ["/bin/cp", "{workspace}/score.json", "{out}"], "name": "emulated"}
    return {"id": f"t{number}", "instruction": str(number), "workspace": {}, "evaluator": evaluator}


def _tree(profile: Profile, arm: Arm, seed: int, root: Path, seconds_per_hour: float) -> dict[str, Any]:
    laws, scale = profile.laws, seconds_per_hour / 3600.0
    tree = scheduler_tree(profile, arm, seed)
    harness = Path(emulate.__file__).with_name("harness.py")
    program = [sys.executable, "-I", "-S", str(harness), str(TOKENS_PER_H), str(CALLS), str(root / "hours")]
    per_batch = profile.groups_per_batch * profile.group_size
    return {
        **tree,
        "cluster": {**tree["cluster"], "peer_timeout_s": 10.0, "executors": 2},
        "model": {"path": str(root / "model"), "served_name": "emulated"},
        "engine": {"kind": "emulate", "context_length": 1 << 20, "stream_interval": 1 << 20},
        "emulate": {
            "time_scale": scale,
            "tokens_per_h": TOKENS_PER_H,
            "load_slope": laws.load_slope,
            "load_floor": laws.load_floor,
            "to_train_s": laws.to_train_s,
            "to_rollout_s": laws.to_rollout_s,
            "join_s": laws.join_s,
            "step_s": laws.step_s,
            "execution_node_s": laws.train_node_h * 3600.0 / per_batch,
            "nodes": list(arm.nodes),
        },
        "rollout": {"max_new_tokens": 1 << 19},
        "trainer": {"micro_step_tokens": 1, "checkpoint_every_steps": 1000},  # an execution is a micro-step
        "tasks": {
            "train": str(root / "tasks.jsonl"),
            "harness": program,
            "harness_limit_s": profile.durations.limit_h * seconds_per_hour,
            "open_call_s": PATIENCE_S * scale,
            "concurrent_per_executor": 1 << 12,
            "snapshots": False,
        },
    }


def write_model(folder: Path) -> None:
    """A byte-level tokenizer without merges, a chat template, and a config.json that says how many ids there are."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(letters) + len(SPECIAL), "emulated": True}))


def chosen(name: str, arm: str | None, policy: str | None, steps: int | None, seconds: float) -> tuple[Profile, Arm]:
    """The profile and the arm that are asked for. Raises ConfigError."""
    profile = profiles.load(name)
    if steps:
        profile = dataclasses.replace(profile, steps=steps)
    if not profile.arms:
        raise ConfigError(f"profile {name} has no arm to live")
    if seconds <= 0:
        raise ConfigError("--seconds-per-hour must be above 0")
    one = profile.arm(arm) if arm else profile.arms[0]
    return profile, with_policy(dataclasses.replace(profile, arms=(one,)), (policy,))[0] if policy else one


def run(
    root: str, *, name: str, arm: str | None, policy: str | None, steps: int | None, seed: int, seconds: float
) -> dict[str, Any]:
    """Live one arm in a new run directory; what was measured beside what the simulator says of it."""
    if Path(root).exists():
        common.fail(f"{root} exists; an emulated run is lived in one go: name another --run", common.REFUSED)
    profile, one = chosen(name, arm, policy, steps, seconds)
    world = World(profile, one, seed).run()
    predicted = world.now / 3600.0
    words = f"{one.name}: {predicted:.2f} h by the simulator, about {predicted * seconds / 60.0:.1f} minutes here"
    click.echo(words, err=True)
    made, config = prepare(profile, one, seed, Path(root), seconds)
    lived = live(made, config, profile.steps, one.name, lambda line: click.echo(line, err=True))
    return {
        **dataclasses.asdict(lived),
        "predicted_hours": predicted,
        "predicted_mean_staleness": sum(world.staleness) / len(world.staleness),
    }


# ---- a run of it ----------------------------------------------------------------------------------------------------


class Interrupted(RuntimeError):
    """Ended by a signal before the last measured step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lived:
    """What was measured of one live arm. Seconds really passed; overheads are shares of the time they lie in."""

    arm: str
    seconds: float  # from the first dispatch to the last measured step
    hours: float  # the same in the profile's time
    mean_staleness: float
    switches: int
    overhead_executions: float  # of the executions' time: not in an engine, while engines served
    overhead_training: float  # of the micro-steps' time: not computing
    overhead_switching: float  # of the cells' time: switches beyond what the profile says


def live(run: RunDir, config: Config, steps: int, arm: str, say: Callable[[str], None]) -> Lived:
    """Start everything, stop after so many optimizer steps, read what was measured. Raises RunFailed, Interrupted."""
    watch = Watch(run, steps, arm, say)

    async def serve() -> None:
        watch.supervisor = Supervisor(run, config, watch.look)
        await watch.supervisor.serve()
        await asyncio.gather(*watch.asking)

    asyncio.run(serve())
    if not watch.results:
        raise Interrupted(f"{arm}: stopped at step {watch.step} of {steps}")
    return measure(run, config, steps, arm, watch)


class Watch:
    """Looks on while a run lives; asks the engines now and then what they did, and ends the run at the last step."""

    supervisor: Supervisor

    def __init__(self, run: RunDir, steps: int, arm: str, say: Callable[[str], None]) -> None:
        self._run, self._steps, self._arm, self._say = run, steps, arm, say
        self.step = -1
        self.asking: list[asyncio.Future[None]] = []
        self.served: list[tuple[float, float]] = []  # (when, seconds that engines had spent on requests)
        self.results: dict[str, Any] = {}

    def look(self, rows: list[dict[str, Any]]) -> None:
        """With every status of the scheduler, about once a second."""
        step, level = rows[0]["step"], rows[0]["water_level"]
        if step != self.step:
            self.step = step
            self._say(f"{self._arm}: step {step} of {self._steps}, {level} executions in flight")
        if not self.asking or self.asking[-1].done():
            urls = [row["url"] for row in rows if row.get("cell") and row["url"]]
            self.asking.append(asyncio.ensure_future(self._ask(urls, step >= self._steps)))

    async def _ask(self, urls: list[str], is_last: bool) -> None:
        try:
            at = WallClock().now()
            self.served.append((at, sum(await asyncio.gather(*map(request_seconds, urls)))))
            if is_last and not self.results:
                rows = await quickstart.rows(self._run, "cellctl", "results")
                self.results = {row["kind"]: row["rows"] for row in rows}
        finally:
            if is_last:
                self.supervisor.stopping.set()


async def request_seconds(url: str) -> float:
    """Seconds that an emulated engine has spent on requests, summed over requests."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    line = next(line for line in text.splitlines() if line.startswith("sglang:request_seconds_total"))
    return float(line.split()[-1])


def measure(run: RunDir, config: Config, steps: int, arm: str, watch: Watch) -> Lived:
    """The figures, from the scheduler's journal and its results, and from the engines' counters."""
    measured = watch.results["steps"][:steps]
    ended = measured[-1]["at"]
    until, request_s = max(pair for pair in watch.served if pair[0] <= ended)
    began, in_flight_s = _executions(run.path("journal", "cellctl.jsonl"), until)
    seconds = ended - began
    scale = config.emulate.time_scale
    computing, talking = (sum(row[name] for row in measured) for name in ("computing_s", "talking_s"))
    turns = watch.results["switches"]
    beyond = sum(_beyond_profile_s(turn, config) for turn in turns)
    return Lived(
        arm=arm,
        seconds=seconds,
        hours=seconds / scale / 3600.0,
        mean_staleness=sum(row["staleness_mean"] for row in measured) / len(measured),
        switches=len(turns),
        overhead_executions=1.0 - request_s / in_flight_s,
        overhead_training=talking / (computing + talking),
        overhead_switching=beyond / (config.cluster.cells * seconds),
    )


def _executions(journal: Path, until: float) -> tuple[float, float]:
    """(when the first was dispatched, their seconds from dispatch to the scheduler's note of their end)."""
    began: dict[str, float] = {}
    first, seconds = 0.0, 0.0
    for entry in read(journal):
        for command in entry.commands:
            if command["tag"] == "execution.order":
                began.setdefault(command["execution"], entry.at)
                first = first or entry.at
        if entry.at > until:
            break
        if entry.event["tag"] == "execution.finished" and entry.event["execution"] in began:
            seconds += entry.at - began.pop(entry.event["execution"])
    return first, seconds + sum(max(0.0, until - at) for at in began.values())


def _beyond_profile_s(turn: dict[str, Any], config: Config) -> float:
    """Of a switch: its seconds without what the profile says and without the micro-step that was in hand."""
    laws = config.emulate
    if turn["to"] == "train":
        return float(turn["seconds"]) - laws.to_train_s * laws.time_scale
    in_hand_s = float(turn["phases_s"].get("rank", 0.0))
    return float(turn["seconds"]) - laws.to_rollout_s * laws.time_scale - in_hand_s
