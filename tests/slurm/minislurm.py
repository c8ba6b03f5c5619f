"""A real Slurm with several nodes on one machine, for tests: one controller, one munged, one slurmd per node.

    python -m tests.slurm.minislurm up DIR         then: export SLURM_CONF=DIR/etc/slurm.conf
    python -m tests.slurm.minislurm down DIR
    python -m tests.slurm.minislurm node DIR NODE crash|start|stop-slurmd|cut|mend
    python -m tests.slurm.minislurm exec DIR NODE COMMAND...

Every node has namespaces of its own: hostname, address, ports, processes, /dev/shm. So it can lose power (`crash`) or
its cable (`cut`), and a daemon that advertises a loopback address is not reachable from the others. The file systems
are this machine's, as a site's shared ones are. Needs root and Debian's slurm-wlm, munge and iproute2; reads and writes
nothing under /etc. Everything lives in DIR and ends with `down`.

Nodes: node1.. (partitions main; spot and spot-cancel, which main preempts) and cpu1 (partitions cpu and, preempting it,
cpu-high).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = "slurm-wlm munge iproute2"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
LONGEST_ROOT = 60  # unix sockets take 107 characters
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
FIRST_HOST = 10  # node i has address NET.(10 + i)

SETTINGS = {
    "ClusterName": "mini",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "MailProg": "/bin/true",
    # no cgroups, no binding to cores, no limits of the shell that submits
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "SwitchType": "switch/none",
    "MpiDefault": "none",
    "PropagateResourceLimits": "NONE",
    "SlurmdParameters": "config_overrides",  # believe the CPUs below whatever this machine has
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "GresTypes": "gpu",
    # quicker than a site, where SlurmdTimeout is 300; KillWait is close to the usual 30
    "ReturnToService": "2",
    "SlurmdTimeout": "10",
    "SlurmctldTimeout": "10",
    "MessageTimeout": "10",
    "TCPTimeout": "2",
    "KillWait": "20",
    "BatchStartTimeout": "10",
    "CompleteWait": "0",
    "MinJobAge": "600",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1",
    "PriorityType": "priority/basic",
    "JobRequeue": "1",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "AccountingStorageType": "accounting_storage/none",
    "JobAcctGatherType": "jobacct_gather/none",
}

NODE_INIT = """
set -e
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$ROOT/etc/hosts" /etc/hosts
mount --bind "$ROOT/etc/resolv.conf" /etc/resolv.conf || true
hostname "$NODE"
ip link set lo up
for _ in $(seq 400); do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.05; done
ip addr add "$ADDRESS/24" dev eth0
ip link set eth0 up
ip route add default via "$GATEWAY"
: >"$ROOT/run/$NODE.ready"
set +e
while :; do sleep 100000 & wait $!; done  # as process 1 it reaps what slurmd leaves
"""


class MiniSlurmError(RuntimeError):
    """The cluster can't be brought up: says what is missing or where the log is."""


def why_not() -> str:
    """Why no cluster can run here, or "" if one can."""
    if os.geteuid() != 0:
        return "needs root (network and process namespaces)"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install -y --no-install-recommends {PACKAGES}"
    probe = "ip link add name probe0 type veth peer name probe1 && ip link add name probe2 type bridge"
    tried = subprocess.run(
        ["unshare", "--uts", "--ipc", "--net", "--mount", "--pid", "--fork", "sh", "-c", probe],
        capture_output=True,
        text=True,
    )
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def until(what: Callable[[], object], timeout_s: float, words: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            raise MiniSlurmError(words)
        time.sleep(0.05)


def alive(pid: int, word: str) -> bool:
    """Whether `pid` is a process (no zombie) whose command line has `word`: a number alone may be someone else's."""
    try:
        return word in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return False


@dataclass
class Cluster:
    """One cluster in `root`. `up` and `down`; the rest does something to a running one."""

    root: Path
    gpu_nodes: int = 4
    cpu_nodes: int = 1
    cpus: int = 8
    gpus: int = 8
    settings: dict[str, str] = field(default_factory=dict)  # of slurm.conf, beside or instead of SETTINGS

    def __post_init__(self) -> None:
        self.root = self.root.absolute()
        if len(str(self.root)) > LONGEST_ROOT or not re.fullmatch(r"[A-Za-z0-9/._+-]+", str(self.root)):
            raise MiniSlurmError(f"{self.root}: at most {LONGEST_ROOT} characters, letters, digits and ._+- only")
        number = int.from_bytes(str(self.root).encode(), "big") % 1_000_003
        self._tag = f"{number:05x}"
        self._net = self._free_net(number)
        self._port = 16_000 + int(self._net.rpartition(".")[2]) * 50  # nets differ, so ports do

    # ---- names ------------------------------------------------------------------------------------------------------

    @property
    def conf(self) -> Path:
        return self.root / "etc" / "slurm.conf"

    @property
    def nodes(self) -> list[str]:
        return [*(f"node{i + 1}" for i in range(self.gpu_nodes)), *(f"cpu{i + 1}" for i in range(self.cpu_nodes))]

    def address(self, node: str) -> str:
        return f"{self._net}.{FIRST_HOST + self.nodes.index(node) + 1}"

    @property
    def gateway(self) -> str:
        """This machine, which is the login node and runs the controller."""
        return f"{self._net}.1"

    @property
    def env(self) -> dict[str, str]:
        """Environment of the login node: no word of an outer Slurm, this cluster's configuration."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SALLOC"))}
        return {**clean, "PATH": SEARCH, "SLURM_CONF": str(self.conf)}

    def _free_net(self, number: int) -> str:
        remembered = self.root / "etc" / "net"
        if remembered.exists():
            return remembered.read_text().strip()
        taken = subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, env={"PATH": SEARCH}).stdout
        nets = (f"10.213.{20 + (number + i) % 200}" for i in range(200))
        return next(net for net in nets if f"inet {net}." not in taken)

    # ---- up and down ------------------------------------------------------------------------------------------------

    def up(self) -> Cluster:
        """Everything that is not up yet. Raises MiniSlurmError."""
        if why := why_not():
            raise MiniSlurmError(why)
        self._write_files()
        self._munged()
        self._switch()
        self.start_controller()
        for node in self.nodes:
            self.start(node)
        until(self.all_idle, 60, f"nodes did not come up; see {self.root}/log")
        return self

    def down(self) -> None:
        """End all of it, the jobs too, and remove the folder."""
        for node in self.nodes:
            self.crash(node)
        self._end("slurmctld", str(self.conf))
        self._end("switch", f"switch-{self.root}")
        self._end("munged", str(self.root))
        shutil.rmtree(self.root, ignore_errors=True)

    def all_idle(self) -> bool:
        seen = self.run("sinfo", "-h", "-N", "-o", "%N|%T", check=False).splitlines()
        ready = {line.partition("|")[0] for line in seen if line.partition("|")[2] in ("idle", "mixed", "allocated")}
        return ready == set(self.nodes)

    def run(self, *words: str, timeout_s: float = 30.0, check: bool = True, cwd: Path | None = None) -> str:
        """A Slurm command as a user of the login node; its stdout. Raises CalledProcessError with its stderr."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=timeout_s, cwd=cwd)
        if check and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
        return done.stdout.strip()

    def clear(self) -> None:
        """No job is left, as far as Slurm knows."""
        self.run("scancel", "-u", "root", check=False)
        until(lambda: not self.run("squeue", "-h"), 60, f"jobs do not end: {self.run('squeue', '-h')}")

    def mend_all(self) -> None:
        """Everything is up and idle again, whatever was done to it."""
        self.start_controller()
        for node in self.nodes:
            self.start(node)
            self.mend(node)
            if self.run("sinfo", "-h", "-n", node, "-o", "%T").splitlines()[0].startswith(("drain", "down")):
                self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        until(self.all_idle, 60, f"nodes did not come back:\n{self.run('sinfo', '-N', '-l')}")

    # ---- things that happen to a cluster ----------------------------------------------------------------------------

    def crash(self, node: str) -> None:
        """Power loss: every process of the node vanishes."""
        self._end(node, f"init-{self.root}-{node}", signal.SIGKILL)
        for name in (f"{node}.ready", f"slurmd.{node}.pid"):
            (self.root / "run" / name).unlink(missing_ok=True)

    def start(self, node: str) -> None:
        """Power on; on a node that is up, only its slurmd if that is gone."""
        if self._pid(node, f"init-{self.root}-{node}") is None:
            self._boot(node)
        if not self._slurmd_is_up(node):
            self.on_node(node, "slurmd", "-N", node, "-f", str(self.conf))

    def stop_slurmd(self, node: str) -> None:
        """Only slurmd ends; the steps of the node live on."""
        self.on_node(node, "sh", "-c", f'kill "$(cat {self.root}/run/slurmd.{node}.pid)"')

    def cut(self, node: str) -> None:
        """The node's cable is out; its processes run on."""
        self._in_switch("ip", "link", "set", self._port_of(node), "down")

    def mend(self, node: str) -> None:
        self._in_switch("ip", "link", "set", self._port_of(node), "up")

    @contextlib.contextmanager
    def changed(self, **settings: str) -> Iterator[None]:
        """With other words in slurm.conf for a while, as a site's admin sets them."""
        before, self.settings = self.settings, {**self.settings, **settings}
        try:
            self.conf.write_text(self._slurm_conf())
            self.run("scontrol", "reconfigure")
            yield
        finally:
            self.settings = before
            self.conf.write_text(self._slurm_conf())
            self.run("scontrol", "reconfigure")

    def kill_controller(self) -> None:
        self._end("slurmctld", str(self.conf), signal.SIGKILL)

    def start_controller(self) -> None:
        if self._pid("slurmctld", str(self.conf)) is None:
            self._call("slurmctld", "-f", str(self.conf))
        until(lambda: "UP" in self.run("scontrol", "ping", check=False), 30, f"no controller: {self.root}/log")

    def on_node(self, node: str, *words: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """A command on the node, outside of any job; its stdout."""
        inner = self._inner(node)
        if inner is None:
            raise MiniSlurmError(f"{node} is down")
        enter = ["nsenter", "-t", str(inner), "--uts", "--ipc", "--net", "--mount", "--pid", "--root"]
        return self._call(*enter, *words, check=check, timeout_s=timeout_s)

    def pids(self, node: str) -> Iterator[int]:
        """Processes of a node as this machine numbers them (its process 1 is not one of them)."""
        inner = self._inner(node)
        if inner is None:
            return
        mine = Path(f"/proc/{inner}/ns/pid").readlink()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != inner:
                with contextlib.suppress(OSError):
                    if (folder / "ns" / "pid").readlink() == mine:
                        yield int(folder.name)

    # ---- how it is made ---------------------------------------------------------------------------------------------

    def _call(self, *words: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Output through a file: a daemon that keeps its stdout open must not keep us waiting."""
        with tempfile.TemporaryFile("w+") as out:
            done = subprocess.run(
                words, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=timeout_s
            )
            out.seek(0)
            said = out.read()
        if check and done.returncode:
            raise MiniSlurmError(f"{' '.join(words)}: exit code {done.returncode}\n{said}")
        return said

    def _pid(self, name: str, word: str) -> int | None:
        """The process of run/NAME.pid if it lives and its command line has `word`."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.root / "run" / f"{name}.pid").read_text())
            return pid if alive(pid, word) else None
        return None

    def _end(self, name: str, word: str, number: int = signal.SIGTERM) -> None:
        pid = self._pid(name, word)
        if pid is not None:
            os.kill(pid, number)
            try:
                until(lambda: not alive(pid, word), 8, "")
            except MiniSlurmError:
                os.kill(pid, signal.SIGKILL)
                until(lambda: not alive(pid, word), 8, f"{name} (pid {pid}) does not end")
        (self.root / "run" / f"{name}.pid").unlink(missing_ok=True)

    def _write_files(self) -> None:
        for folder in ("etc", "run", "log", "state", "spool", "munge", "dev"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        (self.root / "munge").chmod(0o700)
        key = self.root / "munge" / "key"
        if not key.exists():
            key.touch(mode=0o400)
            key.write_bytes(secrets.token_bytes(1024))
        (self.root / "etc" / "net").write_text(self._net)
        (self.root / "etc" / "gres.conf").write_text(self._gres())
        # slurmd loads a cgroup plugin although nothing uses it; this one asks for no mounts
        (self.root / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.root / "etc" / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        names = [f"{self.gateway} {short_hostname()}", *(f"{self.address(n)} {n}" for n in self.nodes)]
        (self.root / "etc" / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        self.conf.write_text(self._slurm_conf())

    def _gres(self) -> str:
        """GPUs must be character devices: clones of /dev/null do."""
        for i in range(self.gpus):
            device = self.root / "dev" / f"gpu{i}"
            if not device.exists():
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        if not self.gpus:
            return ""
        files = f"{self.root}/dev/gpu[0-{self.gpus - 1}]"
        return f"AutoDetect=off\nNodeName=node[1-{self.gpu_nodes}] Name=gpu File={files}\n"

    def _slurm_conf(self) -> str:
        root, port = self.root, self._port
        own = {
            "SlurmctldHost": f"{short_hostname()}({self.gateway})",
            "SlurmctldPort": str(port),
            "AuthInfo": f"socket={root}/run/munge.sock,cred_expire=5",  # also how long a requeued job waits
            "StateSaveLocation": f"{root}/state",
            "SlurmdSpoolDir": f"{root}/spool/%n",
            "SlurmctldPidFile": f"{root}/run/slurmctld.pid",
            "SlurmdPidFile": f"{root}/run/slurmd.%n.pid",
            "SlurmctldLogFile": f"{root}/log/slurmctld.log",
            "SlurmdLogFile": f"{root}/log/slurmd.%n.log",
        }
        lines = [f"{key}={value}" for key, value in {**SETTINGS, **own, **self.settings}.items()]
        for node in self.nodes:
            gres = f" Gres=gpu:{self.gpus}" if self.gpus and node.startswith("node") else ""
            shape = f"Port={port + 1} CPUs={self.cpus} RealMemory=16000{gres}"
            lines.append(f"NodeName={node} NodeAddr={self.address(node)} {shape} State=UNKNOWN")
        return "\n".join([*lines, *self._partitions()]) + "\n"

    def _partitions(self) -> list[str]:
        gpu, cpu = f"node[1-{self.gpu_nodes}]", f"cpu[1-{self.cpu_nodes}]"
        common = "DefaultTime=10 MaxTime=INFINITE State=UP"
        out = [
            f"PartitionName=main Nodes={gpu} Default=YES PriorityTier=10 PreemptMode=OFF {common}",
            f"PartitionName=spot Nodes={gpu} PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 {common}",
            f"PartitionName=spot-cancel Nodes={gpu} PriorityTier=1 PreemptMode=CANCEL GraceTime=20 {common}",
        ]
        if self.cpu_nodes:
            out.append(f"PartitionName=cpu Nodes={cpu} PriorityTier=1 PreemptMode=REQUEUE {common}")
            out.append(f"PartitionName=cpu-high Nodes={cpu} PriorityTier=10 PreemptMode=OFF {common}")
        return out

    def _munged(self) -> None:
        if self._pid("munged", str(self.root)) is None:
            paths = {"key-file": "munge/key", "socket": "run/munge.sock", "seed-file": "munge/seed"}
            paths |= {"pid-file": "run/munged.pid", "log-file": "log/munged.log"}
            words = [f"--{name}={self.root}/{path}" for name, path in paths.items()]
            self._call("munged", *words, "--num-threads=10", "--force")

    def _switch(self) -> None:
        """A bridge in a network namespace of its own: no firewall of this machine is in the way, and it ends with its
        process."""
        if self._pid("switch", f"switch-{self.root}") is not None:
            return
        hold = f"exec -a switch-{self.root} sleep infinity"
        self._detached("switch", ["unshare", "--net", "bash", "-c", hold])
        until(lambda: self._pid("switch", f"switch-{self.root}"), 20, "no network namespace")
        holder, uplink = str(self._pid("switch", f"switch-{self.root}")), f"ms{self._tag}"
        self._call("ip", "link", "del", uplink, check=False)
        self._call("ip", "link", "add", uplink, "type", "veth", "peer", "name", "uplink", "netns", holder)
        self._in_switch("sh", "-c", "ip link add name br0 type bridge && ip link set uplink master br0 up")
        self._in_switch("ip", "link", "set", "br0", "up")
        self._call("ip", "addr", "add", f"{self.gateway}/24", "dev", uplink)
        self._call("ip", "link", "set", uplink, "up")

    def _in_switch(self, *words: str, check: bool = True) -> None:
        holder = self._pid("switch", f"switch-{self.root}")
        self._call("nsenter", "-t", str(holder), "--net", *words, check=check)

    def _port_of(self, node: str) -> str:
        return f"to-{node}"

    def _boot(self, node: str) -> None:
        (self.root / "run" / f"{node}.ready").unlink(missing_ok=True)
        spaces = ["unshare", "--uts", "--ipc", "--net", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        facts = {"ROOT": str(self.root), "NODE": node, "ADDRESS": self.address(node), "GATEWAY": self.gateway}
        self._detached(node, [*spaces, "bash", "-c", NODE_INIT, f"init-{self.root}-{node}"], facts)
        until(lambda: self._inner(node), 20, f"{node} has no process 1; see {self.root}/log/{node}.log")
        port, inner = self._port_of(node), str(self._inner(node))
        self._in_switch("ip", "link", "del", port, check=False)
        self._in_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", inner)
        self._in_switch("ip", "link", "set", port, "master", "br0", "up")
        ready = self.root / "run" / f"{node}.ready"
        until(ready.exists, 20, f"{node} is not ready; see {self.root}/log/{node}.log")

    def _detached(self, name: str, words: list[str], facts: dict[str, str] | None = None) -> None:
        """A holder of namespaces that outlives whoever called `up`."""
        with open(self.root / "log" / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                words,
                env={**self.env, **(facts or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self.root / "run" / f"{name}.pid").write_text(str(process.pid))

    def _inner(self, node: str) -> int | None:
        """The node's process 1, as this machine numbers it."""
        outer = self._pid(node, f"init-{self.root}-{node}")
        if outer is None:
            return None
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    def _slurmd_is_up(self, node: str) -> bool:
        path = self.root / "run" / f"slurmd.{node}.pid"
        if not path.exists():
            return False
        test = f'grep -qs slurmd "/proc/$(cat {path})/cmdline" && echo up'
        return "up" in self.on_node(node, "sh", "-c", test, check=False)


def short_hostname() -> str:
    return socket.gethostname().partition(".")[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="minislurm", description="a real Slurm with several nodes on this machine")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("up", "down", "node", "exec"):
        verbs.add_parser(verb).add_argument("root", type=Path)
    for verb in ("node", "exec"):
        verbs.choices[verb].add_argument("node")
    verbs.choices["node"].add_argument("what", choices=["crash", "start", "stop-slurmd", "cut", "mend"])
    verbs.choices["exec"].add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    try:
        cluster = Cluster(given.root)
        match given.verb:
            case "up":
                cluster.up()
                print(f"export SLURM_CONF={cluster.conf}")
            case "down":
                cluster.down()
            case "node":
                getattr(cluster, given.what.replace("-", "_"))(given.node)
            case "exec":
                print(cluster.on_node(given.node, *given.words), end="")
    except MiniSlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
