"""A profile of the simulator lived through by the real daemons in scaled time: `gyre emulate` and bench.elastic.

The run directory gets a workload (hours of every task's executions, drawn as the simulator draws them), a tokenizer
that knows bytes, and a configuration in which engines and trainers only take time. Everything else is the real thing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from cellctl.simulate import profile as profiles
from cellctl.simulate import workload
from cellctl.simulate.profile import Arm, Profile
from cellctl.simulate.run import with_policy
from cellctl.simulate.world import World, scheduler_tree
from celld import emulate
from gyre_base import config as configuration
from gyre_base.config import ClusterConfig, Config, ConfigError
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir
from gyre_cli import common, lived, runs

CALLS = 4  # of an execution: each costs the real path once, and only at the next one can it change its engine
TOKENS_PER_H = 128.0
STREAM_TOKENS = 8  # every 225 s of the profile: signs of life well within the stall time
PATIENCE_S = 60.0  # of the profile: how long a call that is open at the limit is waited for
MICRO_STEPS = 3.0  # the longest micro-step so many times over is a stall, if that is more than the setting says
REAL = "real"  # what it bounds takes real time here, too
PROFILE = "profile"  # stays in the profile's seconds: engines and trainers scale it themselves
# Every setting that is a time: scaled like the profile, but to no less than these seconds, which the machine needs.
TIMES: dict[str, float | str] = {
    "cluster.heartbeat_s": 0.25,  # a faster one would be a load of its own
    "cluster.peer_timeout_s": 10.0,  # a process can wait so long for a busy core or disk
    "cluster.stall_s": 10.0,
    "cluster.executor_idle_s": REAL,  # of a pool in Slurm, as the next two
    "cluster.dead_man_s": REAL,
    "cluster.save_window_s": REAL,
    "scheduler.stagger_s": 0.0,
    "tasks.harness_limit_s": 0.0,
    "tasks.open_call_s": 0.0,
    "tasks.overall_limit_s": 60.0,  # a fault is found in real time
    "tasks.grace_s": REAL,  # processes end here as fast as anywhere, and evaluators take as long
    "tasks.evaluation_limit_s": REAL,
    "tasks.progress_every_s": 0.0,
    **dict.fromkeys(("emulate.to_train_s", "emulate.to_rollout_s", "emulate.join_s", "emulate.step_s"), PROFILE),
    "emulate.execution_node_s": PROFILE,
}
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
    root = root.absolute()  # its files are named to harnesses, which run elsewhere
    run = RunDir.create_new(root)
    make_keys(run)
    model, tasks, hours = root / "model", root / "tasks.jsonl", root / "hours"
    write_model(model)
    work = workload.make(profile.durations, seed)
    numbers = range(profile.tasks)
    groups = (work.group(task, 0, profile.group_size) for task in numbers)
    hours.write_text("".join(" ".join(f"{h:.6f}" for h in group) + "\n" for group in groups))
    tasks.write_text("".join(json.dumps(_task(task)) + "\n" for task in numbers))
    config = scaled(configuration.from_tree(_tree(profile, arm, seed, root, seconds_per_hour)))
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
    execution_node_s = laws.train_node_h * 3600.0 / (profile.groups_per_batch * profile.group_size)
    stall_s = max(ClusterConfig.stall_s, MICRO_STEPS * execution_node_s / min(arm.nodes))
    return {
        **tree,
        "cluster": {**tree["cluster"], "stall_s": stall_s, "executors": 2},
        "model": {"path": str(root / "model"), "served_name": "emulated"},
        "engine": {"kind": "emulate", "context_length": 1 << 20, "stream_interval": STREAM_TOKENS},
        "emulate": {
            "time_scale": scale,
            "tokens_per_h": TOKENS_PER_H,
            "load_slope": laws.load_slope,
            "load_floor": laws.load_floor,
            "to_train_s": laws.to_train_s,
            "to_rollout_s": laws.to_rollout_s,
            "join_s": laws.join_s,
            "step_s": laws.step_s,
            "execution_node_s": execution_node_s,
            "nodes": list(arm.nodes),
        },
        "rollout": {"max_new_tokens": 1 << 19},
        "trainer": {"micro_step_tokens": 1, "checkpoint_every_steps": 1000},  # an execution is a micro-step
        "tasks": {
            "train": str(root / "tasks.jsonl"),
            "harness": program,
            "harness_limit_s": profile.durations.limit_h * 3600.0,
            "open_call_s": PATIENCE_S,
            "concurrent_per_executor": 1 << 12,
            "snapshots": False,
        },
    }


def scaled(config: Config) -> Config:
    """The same with its times as `TIMES` says. Raises KeyError for a time that nobody has decided on."""
    tree = dataclasses.asdict(config)
    for dotted in configuration.keys():
        section, _, name = dotted.partition(".")
        if name.endswith("_s") and not isinstance(least := TIMES[dotted], str) and tree[section][name]:
            tree[section][name] = max(least, tree[section][name] * config.emulate.time_scale)
    return configuration.from_tree(tree)


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
    found = lived.live(made, config, profile.steps, one.name, lambda line: click.echo(line, err=True))
    return {
        **dataclasses.asdict(found),
        "predicted_hours": predicted,
        "predicted_mean_staleness": sum(world.staleness) / len(world.staleness),
    }
