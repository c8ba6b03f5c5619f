"""`gyre submit`: what would go wrong with a planned job, and the hand-over to sbatch. What can't be known here, the
nodes themselves, is `gyre doctor`'s.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from gyre_base import saving
from gyre_base.config import Config, ConfigError
from gyre_cli import checks, common, findings, listing, planning, probe, registry, runs, slurm
from gyre_cli.findings import Finding, Level, fail, note, ok, warn
from gyre_cli.planning import SIGNAL_EARLY_S, Measured, Plan
from gyre_cli.script import Script

MAX_SOCKET_PATH_BYTES = 107  # what the kernel takes
SOCKET_IN_RUN = "executions/" + "x" * 24 + "/harness/relay.sock"  # the deepest one a walled workspace opens


def examine(plan: Plan, gpu_memory_gib: float | None) -> list[Finding]:
    """Everything that can be known here, in the order of the start."""
    measured = planning.measure(plan.run)
    return [
        *of_config(plan),
        of_start(plan.script),
        *of_headers(plan.script),
        of_cells(plan),
        of_bind(plan),
        *of_run(plan.run),
        of_paths(plan),
        of_container(plan.config),
        *of_gpus(plan),
        *of_memory(plan, gpu_memory_gib),
        of_signal(plan, measured),
        *of_time(plan, measured),
        *of_slurm(plan),
    ]


def of_config(plan: Plan) -> list[Finding]:
    try:
        runs.check(plan.config, here=False)
    except ConfigError as error:
        return [fail("configuration", str(error), f"edit {plan.config_file}")]
    out = [ok("configuration", f"{plan.config_file}: model, tasks and harness are there")]
    if plan.unused:
        words = f"the run goes on with what it was started with; not used: {checks.listed(list(plan.unused))}"
        out.append(warn("configuration", words, "another run directory starts anew"))
    return out


def of_start(job: Script) -> Finding:
    words = [word for word in job.command if word != "exec"]
    program = words[0]
    if not (os.access(program, os.X_OK) if "/" in program else shutil.which(program)):
        return fail("process start", f"{program} can't be run", "gyre init --force writes the present interpreter")
    if job.command[0] != "exec":
        do = f"write `exec {program} ...`: else the shell gets Slurm's warning and keeps it"
        return fail("process start", "the supervisor is not the batch process", do)
    return ok("process start", " ".join(words[:5]))


def of_headers(job: Script) -> list[Finding]:
    """The options without which a fault costs the run."""
    have = job.options
    missing = [
        (key, why)
        for key, why in (
            ("requeue", "the job does not come back after the time limit"),
            ("no-kill", "one lost node ends the whole job"),
        )
        if key not in have
    ]
    out = [fail("job script", f"no --{key}: {why}", f"add #SBATCH --{key}") for key, why in missing]
    signal = have.get("signal", "")
    if not signal:
        out.append(warn("job script", "no --signal: only gyre's own clock warns", "add #SBATCH --signal=B:USR1@180"))
    elif not signal.startswith("B:"):
        do = f"write --signal=B:{signal.partition(':')[2] or signal}"
        out.append(fail("job script", f"--signal={signal} reaches engines and ranks, which die of it", do))
    if have.get("open-mode") != "append":
        out.append(warn("job script", "the next life writes over this one's log", "add #SBATCH --open-mode=append"))
    return out or [ok("job script", "requeue, no-kill, signal and log as they should be")]


def of_cells(plan: Plan) -> Finding:
    cells, nodes = plan.config.cluster.cells, plan.script.nodes
    if cells < nodes:
        words = f"{nodes} nodes for {cells} cells: a cell has one node, so {nodes - cells} would stand idle"
        return fail("cells", words, f"set cluster.cells = {nodes}, or ask for {cells} nodes")
    gpus = plan.script.gpus
    most = -(-cells // nodes)
    if gpus and most > gpus:
        return fail(
            "cells", f"{most} cells share {gpus} GPUs of a node", f"set cluster.cells to at most {nodes * gpus}"
        )
    if cells == 1:
        words = "one cell has nobody to lend to: the whole pool switches"
        return note("cells", words, "two cells on one node are enough for elastic training")
    return ok("cells", f"{cells} on {nodes} node{'s' * (nodes > 1)}")


def of_bind(plan: Plan) -> Finding:
    bind = plan.config.cluster.bind
    if bind == "auto":
        return ok("addresses", "each daemon on its node's own")
    if plan.script.nodes > 1:
        words = f"cluster.bind is {bind}: the same address on {plan.script.nodes} nodes"
        return fail("addresses", words, 'set cluster.bind = "auto"')
    return note("addresses", f"cluster.bind is {bind}")


def of_run(run: Path) -> list[Finding]:
    """Whether the run directory can be made or goes on, and whether the nodes will see it."""
    present = next(folder for folder in (run, *run.parents) if folder.exists())
    if not present.is_dir():
        return [fail("run directory", f"{present} is a file", "choose another with --run")]
    if not os.access(present, os.W_OK):
        return [fail("run directory", f"{present} can't be written", "choose another with --run")]
    out = [ok("run directory", f"{run} {'goes on' if (run / 'run.json').exists() else 'will be made'}")]
    kind, source = probe.mount_of(present)
    if kind in checks.LOCAL_TYPES:
        words = f"{kind} of {source} belongs to this machine alone"
        out.append(fail("run directory", words, "choose one on a file system that all nodes mount"))
    elif str(run).startswith(("/tmp/", "/var/tmp/", "/dev/shm/")):
        do = "a node's own /tmp is another folder; `gyre doctor --nodes 2 --folder DIR` tells"
        out.append(warn("run directory", f"{run} looks local", do))
    if listing.supervised(run / "lives" / "supervisor.lock"):
        out.append(fail("run directory", "somebody works on this run already", "gyre stop, or choose another --run"))
    return out


def of_paths(plan: Plan) -> Finding:
    longest = len(str(plan.run / SOCKET_IN_RUN).encode())
    if longest <= MAX_SOCKET_PATH_BYTES:
        return ok("path lengths", f"sockets need {longest} of {MAX_SOCKET_PATH_BYTES} bytes")
    words = f"a socket in the run directory has {longest} bytes, {MAX_SOCKET_PATH_BYTES} is the most"
    do = f"choose a run directory whose path is {longest - MAX_SOCKET_PATH_BYTES} bytes shorter"
    return (note if plan.config.tasks.workspace == "plain" else fail)("path lengths", words, do)


def of_container(config: Config) -> Finding:
    images = [word for word in config.cluster.python if word.endswith((".sif", ".sqsh"))]
    options = (word.partition("=")[2] for word in config.cluster.srun_options if word.startswith("--container-image="))
    images += [image for image in options if image.startswith("/")]
    gone = [image for image in images if not Path(image).exists()]
    if gone:
        return fail(
            "container", f"no such image: {checks.listed(gone)}", "build it (docs/cluster.md), or gyre init --image"
        )
    return ok("container", checks.listed(images) if images else "none: the nodes run this very interpreter")


def of_gpus(plan: Plan) -> list[Finding]:
    """Whether a cell has the GPUs that its engine wants, and whether it has more than anybody uses."""
    have, wanted, ranks = planning.gpus_per_cell(plan), planning.engine_gpus(plan.config), plan.config.trainer.ranks
    if wanted > have:
        words = f"engine.tensor_parallel is {wanted} and a cell has {have} GPUs"
        return [fail("GPUs", words, "ask for more GPUs per node, set fewer cells, or a smaller tensor_parallel")]
    if have and ranks > have:
        words = f"a cell has {have} GPUs and {ranks} trainer ranks, each of which wants one of its own"
        factors = "trainer.tensor_parallel, pipeline_parallel or context_parallel"
        do = f"ask for more GPUs per node, set fewer cells, or a smaller {factors}"
        return [fail("GPUs", words, do)]
    used = max(wanted, ranks)
    if wanted and have > used:
        words = f"a cell has {have} GPUs; its engine works on {wanted} and its ranks on {ranks}"
        return [warn("GPUs", words, f"cluster.cells = {plan.script.nodes * (plan.script.gpus or 0) // used} uses all")]
    return []


def of_memory(plan: Plan, gpu_memory_gib: float | None) -> list[Finding]:
    rows = planning.memory_rows(plan)
    if not rows:
        return [note("memory", "not known: no safetensors files in model.path")]
    on_gpus = [row for row in rows if row["gpus"]]
    if not on_gpus:
        return [ok("memory", "no GPUs asked for: each role lives in the node's memory")]
    if gpu_memory_gib is None:
        return [note("memory", "see the plan; not judged", "say --gpu-memory GIB of one GPU")]
    over = [f"{r['role']} {r['per_gpu_gib']:.1f} GiB" for r in on_gpus if r["per_gpu_gib"] > gpu_memory_gib]
    if over:
        do = "larger engine.tensor_parallel, shorter engine.context_length, smaller trainer.micro_step_tokens or model"
        return [fail("memory", f"more than a GPU's {gpu_memory_gib:.0f} GiB: {checks.listed(over)}", do)]
    tightest = max(on_gpus, key=lambda row: float(row["per_gpu_gib"]))
    return [ok("memory", f"{tightest['role']} needs most: {tightest['per_gpu_gib']:.1f} of {gpu_memory_gib:.0f} GiB")]


def of_signal(plan: Plan, measured: Measured) -> Finding:
    """Slurm's warning must leave time for a save."""
    text = plan.script.options.get("signal", "").rpartition("@")[2]
    lead_s = float(text) if text.isdigit() else 0.0
    if measured.save_s is None:
        words = f"{lead_s:.0f} s before the limit; no save was measured yet"
        return note("warning time", words, "submit checks it again when one was")
    need_s = saving.MARGIN * measured.save_s + saving.ENDING_S
    if lead_s < need_s:
        words = f"{lead_s:.0f} s before the limit, and a save took {measured.save_s:.0f} s"
        return fail("warning time", words, f"write --signal=B:USR1@{round(need_s + SIGNAL_EARLY_S)}")
    return ok("warning time", f"{lead_s:.0f} s; a save took {measured.save_s:.1f} s")


def of_time(plan: Plan, measured: Measured) -> list[Finding]:
    """The limit against what one life needs, and against what a lost core costs."""
    limit_s = slurm.seconds(plan.script.options.get("time", ""))
    budget = planning.time_budget(plan, measured)
    if limit_s is None:
        return [note("time limit", "the partition's own", "say one: gyre saves before it and requeues")]
    if budget["work_s"] is not None and budget["work_s"] <= 0:
        words = f"{listing.duration(limit_s)} is used up by starting, saving and ending"
        return [fail("time limit", words, "ask for more: --time")]
    out = [ok("time limit", f"{listing.duration(limit_s)}, of it {listing.duration(budget['work_s'])} for work")]
    limit_execution_s = plan.config.tasks.harness_limit_s
    if limit_execution_s > limit_s:
        words = f"an execution may take {listing.duration(limit_execution_s)}: longer than a life of the job"
        out.append(note("executions", words, "cluster.executor_partition lets them live on while the job is requeued"))
    if measured.step_s is not None:
        lost_s = min(plan.config.trainer.checkpoint_every_steps * measured.step_s, budget["save_every_s"])
        out.append(ok("checkpoints", f"a lost core costs at most {listing.duration(lost_s)} of training"))
    return out


def of_slurm(plan: Plan) -> list[Finding]:
    """sbatch's own word, the partition's, and the queue's."""
    if not slurm.here():
        return [fail("Slurm", "not here", "submit on a login node of the cluster; everything above was checked")]
    out = []
    try:
        queued = [job for job in slurm.my_jobs() if job.run == str(plan.run) or job.id == registry.job_of(plan.run)]
        if queued:
            words = f"job {queued[0].id} of this run is {queued[0].state.lower()} already"
            out.append(fail("queue", words, f"scancel {queued[0].id}, or choose another --run"))
        out += of_partition(plan)
    except slurm.SlurmError as error:
        out.append(warn("queue", str(error), "try again; `scontrol ping` says whether the controller is up"))
    return [*out, of_test_only(plan)]


def of_partition(plan: Plan) -> list[Finding]:
    """The job's partition and that of the executors' own jobs."""
    records = slurm.partitions()
    default = next((name for name, record in records.items() if record.get("Default") == "YES"), "")
    name = plan.script.options.get("partition") or default
    out = checks.of_partition(name, records[name]) if name in records else []  # sbatch names an unknown one
    executors = plan.config.cluster.executor_partition
    if executors and executors not in records:
        do = f"set cluster.executor_partition to one of {checks.listed(sorted(records), most=8)}"
        out.append(fail("executors", f"no partition is called {executors}", do))
    elif executors:
        out += checks.of_partition(executors, records[executors])
    return out


def of_test_only(plan: Plan) -> Finding:
    """`sbatch --test-only`: whether this cluster could ever run it."""
    try:
        words = test_only(plan)
    except slurm.SlurmError as error:
        return fail("sbatch", str(error), "edit the script's header; `sinfo` shows what there is")
    return ok("sbatch", words)


def test_only(plan: Plan) -> str:
    """When and where the job would start, in Slurm's words. Raises SlurmError."""
    text = slurm.call_both("sbatch", "--test-only", *plan.more, str(plan.script.path), cwd=plan.script.path.parent)
    return text.replace("sbatch: ", "").strip()


# ---- the command ----------------------------------------------------------------------------------------------------


def command(plan: Plan, *, dry_run: bool, as_json: bool, gpu_memory_gib: float | None) -> int:
    """The exit code. On stdout the job's id, or the plan with all findings; else findings go to stderr."""
    found = examine(plan, gpu_memory_gib)
    if dry_run:
        rows = planning.plan_rows(plan)
        common.print_json(rows) if as_json else planning.show_plan(rows)
        findings.show(found, as_json=as_json)
        refused = findings.failed(found)
        click.echo(f"would be {'refused' if refused else 'submitted'}: {findings.summary(found)}", err=True)
        return common.NO if refused else 0
    for finding in found:
        if finding.level in (Level.FAIL, Level.WARN):
            click.echo(f"{finding.level.value}: {finding.check}: {finding.found}; {finding.do}", err=True)
    if findings.failed(found):
        common.fail("not submitted; `gyre submit --dry-run` shows everything", common.REFUSED)
    ident = hand_over(plan)
    registry.note(plan.run, job=ident)
    common.print_json([{"job": ident, "run": str(plan.run)}]) if as_json else click.echo(ident)
    click.echo(
        f"job {ident}; `gyre status` lists your runs, `gyre status --run {plan.run}` looks into this one", err=True
    )
    return 0


def hand_over(plan: Plan) -> str:
    """The new job's id. Raises SlurmError."""
    words = ("sbatch", "--parsable", *plan.more, str(plan.script.path))
    return slurm.call(*words, timeout_s=60.0, cwd=plan.script.path.parent).strip().partition(";")[0]
