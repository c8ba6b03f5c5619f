"""The judgements of `gyre doctor`: facts in, findings out. Pure; what to do is said for the reader, not for the site's
admin, and says so where only the admin can (docs/admin.md).
"""

from __future__ import annotations

import re
from typing import Any

from gyre_base.config import Config
from gyre_cli.findings import Finding, fail, note, ok, warn

TESTED = "22.05"
OVERLAP = (20, 11)
SKEW_WARN_S, SKEW_FAIL_S = 1.0, 30.0
NOFILE, NPROC = 16384, 4096
SHM_BYTES = 2**30
ADMIN = "ask the site's admin (docs/admin.md)"
LOCAL_TYPES = ("tmpfs", "ramfs", "overlay", "devtmpfs")
WALLS = {"bwrap": "bwrap", "apptainer": "apptainer", "pyxis": "enroot"}  # tasks.workspace: the program behind it
UNLIMITED = -1  # resource.RLIM_INFINITY


def listed(items: list[str], most: int = 4) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


# ---- Slurm's settings -----------------------------------------------------------------------------------------------


def of_settings(settings: dict[str, str]) -> list[Finding]:
    """What `scontrol show config` says, as far as a run depends on it."""
    return [
        of_version(settings.get("SLURM_VERSION", "")),
        of_requeue(settings),
        of_kill_wait(settings),
        of_preemption(settings),
        of_lost_nodes(settings),
        of_proctrack(settings),
        of_memory(settings),
        of_accounting(settings),
        of_expansion(settings),
    ]


def of_version(version: str) -> Finding:
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if len(numbers) == 2 and numbers < OVERLAP:
        return fail("Slurm version", f"{version} has no srun --overlap", "gyre needs Slurm 20.11 or newer")
    if version.startswith(TESTED):
        return ok("Slurm version", version)
    words = f"{version or 'unknown'}; gyre is tested on {TESTED}"
    return note("Slurm version", words, "try `gyre doctor --nodes 2` before a long run")


def of_requeue(settings: dict[str, str]) -> Finding:
    expire = re.search(r"cred_expire=(\d+)", settings.get("AuthInfo", ""))
    wait_s = int(expire[1]) if expire else 120
    words = f"a requeued job starts again after {wait_s} s at the earliest"
    if settings.get("JobRequeue") == "0":
        return note("requeue", f"off by default; {words}", "keep --requeue in the job script")
    return ok("requeue", words)


def of_kill_wait(settings: dict[str, str]) -> Finding:
    match = re.match(r"\d+", settings.get("KillWait", ""))
    if not match:
        return note("signals", "KillWait is not known")
    words = f"{match[0]} s between TERM and KILL (KillWait)"
    if int(match[0]) < 30:
        return warn("signals", words, "a save on TERM must fit in it; --signal=B:USR1@... gives more at the time limit")
    return ok("signals", words)


def of_preemption(settings: dict[str, str]) -> Finding:
    if settings.get("PreemptType", "preempt/none") == "preempt/none":
        return ok("preemption", "off")
    user_signal = "preempt_send_user_signal" in settings.get("SlurmctldParameters", "")
    how = "the job's own USR1 first" if user_signal else "TERM to the steps first, the batch script hears nothing"
    return note(
        "preemption", f"on; a preempted job gets {how}", "gyre saves on either; see GraceTime of your partition"
    )


def of_lost_nodes(settings: dict[str, str]) -> Finding:
    after = settings.get("SlurmdTimeout", "?")
    return ok("lost nodes", f"Slurm notices after {after}, gyre by its own heartbeats; --no-kill keeps the job")


def of_proctrack(settings: dict[str, str]) -> Finding:
    kind = settings.get("ProctrackType", "?")
    if kind == "proctrack/cgroup":
        return ok("process tracking", kind)
    return warn("process tracking", f"{kind}: detached processes of a job may outlive it", f"{ADMIN}: proctrack/cgroup")


def of_memory(settings: dict[str, str]) -> Finding:
    kind = settings.get("SelectTypeParameters", "")
    if "MEMORY" not in kind.upper():
        return ok("memory", f"not handed out by Slurm ({kind})")
    return note("memory", f"handed out by Slurm ({kind})", "keep --mem=0 (all of the node) in the job script")


def of_accounting(settings: dict[str, str]) -> Finding:
    kind = settings.get("AccountingStorageType", "")
    if kind.endswith("slurmdbd"):
        return ok("accounting", "sacct knows finished jobs")
    words = f"{kind}: sacct knows nothing"
    return note("accounting", words, f"finished jobs: scontrol show job, for {settings.get('MinJobAge', '300 sec')}")


def of_expansion(settings: dict[str, str]) -> Finding:
    if "permit_job_expansion" in settings.get("SchedulerParameters", ""):
        return ok("job expansion", "permitted; gyre does not need it")
    return ok("job expansion", "not permitted; gyre does not need it: a shrunk run grows at its next requeue")


def of_partition(name: str, record: dict[str, str]) -> list[Finding]:
    """One partition as `scontrol show partition` says."""
    findings = [ok(f"partition {name}", f"limit {record.get('MaxTime', '?')}, {record.get('TotalNodes', '?')} nodes")]
    if record.get("State", "UP") != "UP":
        findings = [fail(f"partition {name}", f"is {record['State']}", "choose another with --partition")]
    if record.get("PreemptMode", "OFF") == "CANCEL":
        words = "its jobs are cancelled when preempted, not requeued"
        findings.append(warn(f"partition {name}", words, "start again by hand after a preemption, or use another"))
    return findings


def of_job(record: dict[str, str]) -> list[Finding]:
    """A job as `scontrol show job` says: whether it comes back, and that a step starts beside what runs in it."""
    again = record.get("Requeue") == "1"
    return [
        ok("this job", "is requeued when it has to leave")
        if again
        else fail("this job", "is not requeued when it has to leave", "submit it with --requeue"),
        ok("steps", "start beside each other (--overlap)"),
    ]


# ---- nodes ----------------------------------------------------------------------------------------------------------


def of_nodes(nodes: list[dict[str, Any]], here: dict[str, Any] | None, config: Config) -> list[Finding]:
    """Facts that `probe.facts` gave on each node; `here` are those of the machine the doctor runs on."""
    return [
        of_names(nodes),
        of_python(nodes, here),
        *of_packages(nodes, here),
        *of_missing({package for node in nodes for package in node["packages"]}, config),
        *of_programs(nodes, config),
        *of_gpus(nodes),
        of_rdma(nodes, wanted=config.cluster.transfer_protocol == "rdma"),
        *of_limits(nodes),
    ]


def of_names(nodes: list[dict[str, Any]]) -> Finding:
    wrong = [f"{n['node']} is {n['address'] or 'unknown'} on itself" for n in nodes if bad_address(n["address"])]
    if wrong:
        return fail("names", listed(wrong), f"{ADMIN}: node names must resolve to routable addresses on every node")
    return ok("names", f"{len(nodes)} nodes know their own routable address")


def bad_address(address: str) -> bool:
    return not address or address.startswith("127.")


def of_python(nodes: list[dict[str, Any]], here: dict[str, Any] | None) -> Finding:
    found = {n["python"] for n in nodes} | ({here["python"]} if here else set())
    if len(found) > 1:
        return fail(
            "Python", f"different versions: {listed(sorted(found))}", "use one environment on a shared file system"
        )
    return ok("Python", found.pop())


def of_packages(nodes: list[dict[str, Any]], here: dict[str, Any] | None) -> list[Finding]:
    """Each library once; the same version everywhere, and of our own also here."""
    out = []
    for package in sorted({package for node in nodes for package in node["packages"]} | {"gyre-rl"}):
        by_version: dict[str, list[str]] = {}
        for node in [*nodes, *([here] if here and package == "gyre-rl" else [])]:
            by_version.setdefault(node["packages"].get(package, "missing"), []).append(node["node"])
        if len(by_version) > 1:
            words = "; ".join(f"{version} on {listed(names)}" for version, names in by_version.items())
            out.append(fail(package, words, "use one environment (or one container image) everywhere"))
        else:
            out.append(ok(package, next(iter(by_version))))
    return out


def of_missing(have: set[str], config: Config) -> list[Finding]:
    """What no node has and this configuration would need."""
    out = []
    if "torch" not in have:
        out.append(fail("torch", "not installed on the nodes", 'pip install -e ".[train]" there (docs/install.md)'))
    if config.engine.kind == "sglang" and "sglang" not in have:
        out.append(fail("sglang", "not installed on the nodes", "engine.kind is sglang: install it (docs/install.md)"))
    if not any(package.startswith("mooncake") for package in have):
        words = "Mooncake is not installed: weights go over plain sockets"
        if config.cluster.transport == "mooncake":
            out.append(fail("transfer engine", words, "cluster.transport is mooncake: install it (docs/install.md)"))
        else:
            out.append(note("transfer engine", words))
    return out


def of_programs(nodes: list[dict[str, Any]], config: Config) -> list[Finding]:
    """What the wall of a workspace needs, and what a cell needs to requeue the job when the batch host is lost."""
    out = []
    wall = WALLS.get(config.tasks.workspace)
    if wall and not config.cluster.executor_partition:
        without = [node["node"] for node in nodes if wall not in node["programs"]]
        if without:
            do = f"{ADMIN}, or set tasks.workspace to another kind"
            out.append(fail("workspaces", f"no {wall} on {listed(without)}", do))
    if config.cluster.python and not all("scontrol" in node["programs"] for node in nodes):
        words = "no scontrol in the container: no cell can requeue the job when the batch host is lost"
        out.append(warn("container", words, "bind Slurm's clients, their libraries and munge's socket into it"))
    return out


def of_gpus(nodes: list[dict[str, Any]]) -> list[Finding]:
    kinds: dict[str, list[str]] = {}
    for node in nodes:
        kinds.setdefault(gpu_words(node["gpus"]), []).append(node["node"])
    if len(kinds) > 1:
        words = "; ".join(f"{kind} on {listed(names)}" for kind, names in kinds.items())
        return [warn("GPUs", words, "uneven cells: say what each serves in scheduler.cell_slots")]
    kind = next(iter(kinds))
    given = [n["node"] for n in nodes if n["visible_gpus"] and not n["gpus"]]
    if given:
        words = f"Slurm gives GPUs on {listed(given)}, nvidia-smi shows none"
        return [warn("GPUs", words, "check the driver, or the container's GPU option (apptainer --nv)")]
    if kind == "none":
        return [note("GPUs", "none seen: only the tiny engine runs", "in a job, ask for them with --gres=gpu:N")]
    return [ok("GPUs", kind)]


def gpu_words(gpus: list[dict[str, Any]]) -> str:
    names = sorted({f"{g['name']}, {g['memory_mib'] / 1024:.0f} GiB, driver {g['driver']}" for g in gpus})
    return f"{len(gpus)} x {' / '.join(names)}" if gpus else "none"


def of_rdma(nodes: list[dict[str, Any]], *, wanted: bool) -> Finding:
    active = {n["node"]: [p for p in n["rdma"] if "ACTIVE" in p["state"]] for n in nodes}
    without = [name for name, ports in active.items() if not ports]
    if without and wanted:
        do = f'{ADMIN}; or set cluster.transfer_protocol = "tcp"'
        return fail("RDMA", f"wanted, and no active port on {listed(without)}", do)
    if len(without) == len(nodes):
        if any(n["rdma"] for n in nodes):
            return warn("RDMA", "devices, but no active port", f"{ADMIN}; until then weights go over TCP")
        return note("RDMA", "no device: weights and gradients go over TCP")
    if without:
        return warn("RDMA", f"none active on {listed(without)}", f"{ADMIN}; or --exclude these nodes")
    locked = [n["node"] for n in nodes if n["limits"]["memlock"] != UNLIMITED]
    if locked:
        return fail("RDMA", f"memlock is limited on {listed(locked)}", f"{ADMIN}: memlock unlimited in slurmd's limits")
    rates = listed(sorted({p["rate"] for ports in active.values() for p in ports}))
    if not wanted:
        return note("RDMA", f"active on all nodes: {rates}", 'cluster.transfer_protocol = "rdma" uses it')
    return ok("RDMA", f"active on all nodes: {rates}")


def of_limits(nodes: list[dict[str, Any]]) -> list[Finding]:
    out = []
    for key, least in (("nofile", NOFILE), ("nproc", NPROC)):
        low = [f"{n['node']} {n['limits'][key]}" for n in nodes if 0 <= n["limits"][key] < least]
        do = f"ulimit -{'n' if key == 'nofile' else 'u'} {least} in the job script before the exec line; or {ADMIN}"
        out.append(warn(f"limit {key}", listed(low), do) if low else ok(f"limit {key}", f"at least {least}"))
    small = [n["node"] for n in nodes if n["shm_bytes"] < SHM_BYTES]
    if small:
        out.append(warn("/dev/shm", f"less than 1 GiB free on {listed(small)}", "NCCL needs it; containers: mount it"))
    return out


# ---- between nodes --------------------------------------------------------------------------------------------------


def of_reach(looks: list[dict[str, Any]]) -> Finding:
    broken = [f"{look['node']} to {words}" for look in looks for words in look["unreachable"].values()]
    if broken:
        return fail("reachability", listed(broken), f"{ADMIN}: TCP among compute nodes, all ports above 1024")
    return ok("reachability", f"every one of {len(looks)} nodes reaches every other on a free port")


def of_login(unreachable: list[str], inside: bool) -> Finding:
    if not unreachable:
        return ok("from here", "the nodes' ports are reachable")
    words = f"no connection to {listed(unreachable)}"
    if inside:
        return fail("from here", words, f"{ADMIN}: TCP among compute nodes, all ports above 1024")
    return note(
        "from here", f"{words}: `cellctl status` goes by a step inside the job", "nothing; it takes a second longer"
    )


def of_skew(skews: dict[str, tuple[float, float]]) -> Finding:
    """(seconds ahead of us, uncertainty) by node."""
    worst = max(skews.items(), key=lambda item: abs(item[1][0]) - item[1][1], default=None)
    if worst is None:
        return note("clocks", "not measured")
    name, (ahead_s, unsure_s) = worst
    off_s = abs(ahead_s) - unsure_s
    if off_s > SKEW_WARN_S:
        words = f"{name} is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'} (give or take {unsure_s:.1f} s)"
        return (fail if off_s > SKEW_FAIL_S else warn)("clocks", words, f"{ADMIN}: NTP or chrony on all nodes")
    most = max(unsure for _, unsure in skews.values())
    return ok("clocks", f"agree within {max(SKEW_WARN_S, most):.1f} s")


def of_folder(looks: list[dict[str, Any]], folder: str, unseen: list[str]) -> list[Finding]:
    """The shared folder as the nodes see it; `unseen` wrote something that is not seen here."""
    blind = [look["node"] for look in looks if look["visible_s"] is None]
    if blind:
        do = "choose a run directory that all nodes mount; check the mount on these nodes"
        return [fail("shared folder", f"{folder} is not the same folder on {listed(blind)}", do)]
    out = [ok("shared folder", f"{folder} is seen by all ({looks[0]['mount'][0]})")]
    slow = max(looks, key=lambda look: look["visible_s"])
    if slow["visible_s"] > 5.0:
        words = f"a new file is seen on {slow['node']} after {slow['visible_s']:.0f} s"
        out.append(warn("shared folder", words, f"{ADMIN}: actimeo (NFS); starts and restarts wait for it"))
    refused = [f"{look['node']}: {look['written']}" for look in looks if look["written"]]
    if refused or unseen:
        words = listed(refused) or f"what {listed(unseen)} wrote is not seen here"
        out.append(fail("shared folder", words, "choose a run directory that all nodes mount for writing"))
    return [*out, of_rename(looks), of_locks(looks)]


def of_rename(looks: list[dict[str, Any]]) -> Finding:
    torn = [look["node"] for look in looks if look["torn"]]
    if torn:
        words = f"a file being replaced was missing or in pieces on {listed(torn)}"
        return fail("atomic rename", words, "choose another file system for the run directory")
    return ok("atomic rename", "a replaced file is always seen whole")


def of_locks(looks: list[dict[str, Any]]) -> Finding:
    free = [look["node"] for look in looks if look["lock"] == "free"]
    broken = [f"{look['node']}: {look['lock']}" for look in looks if look["lock"] not in ("held", "free")]
    if free or broken:
        words = listed(broken) or f"a lock held here is not felt on {listed(free)}"
        do = "never start one run twice at once; " + ADMIN + ": flock over nodes (Lustre: -o flock, NFS: no local_lock)"
        return warn("locks", words, do)
    return ok("locks", "a lock on one node is felt on the others")
