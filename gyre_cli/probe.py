"""What `gyre doctor` runs once on each node: facts of the node, then what it sees of the others. Standard library only.

Talks with the doctor over its own standard streams, which srun carries: a line of facts out; a line with everybody's
address in; a line of what was seen out; then it stays, so that others can connect to it, until its input ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

TRANSFER = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda")
PACKAGES = ("gyre-rl", "torch", "sglang", "megatron-core", *TRANSFER, "transformers", "pyzmq", "submitit")
ENGINE = ("sglang",)
PROGRAMS = ("bwrap", "apptainer", "enroot", "scontrol")
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
CONNECT_S = 3.0
VISIBLE_S = 15.0  # NFS clients keep directory listings for up to a minute, names they never asked for shorter
WATCH_S = 1.0  # how long the replaced file is read again and again


def facts(port: int = 0, engine_python: str = "") -> dict[str, Any]:
    """This node as it is; `engine_python` is the interpreter of an environment of the engine's own."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return {
        "node": name,
        "host": socket.gethostname(),
        "port": port,
        "at": time.time(),
        "address": address_of(name),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {**packages(), **(packages_of(engine_python) if engine_python else {})},
        "programs": [program for program in PROGRAMS if shutil.which(program)],
        "limits": {key: resource.getrlimit(limit)[0] for key, limit in LIMITS.items()},
        "gpus": gpus(),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "rdma": rdma(),
        "shm_bytes": free_bytes("/dev/shm"),
        "tmp_bytes": free_bytes("/tmp"),
    }


def address_of(name: str) -> str:
    """What the node's name means on the node itself; "" if nothing."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def packages() -> dict[str, str]:
    return {package: version for package in PACKAGES if (version := installed(package))}


def packages_of(python: str) -> dict[str, str]:
    """The engine's libraries in another environment; empty if its interpreter can't be run."""
    words = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    try:
        done = subprocess.run([python, "-c", words], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {package: found[package] for package in ENGINE if package in found}


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def free_bytes(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def gpus() -> list[dict[str, Any]]:
    """Name, memory and driver of each GPU as nvidia-smi says; empty where there is none or it does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    return [{"name": r[0], "memory_mib": int(r[1]), "driver": r[2]} for r in rows if len(r) == 3 and r[1].isdigit()]


def rdma(folder: Path = Path("/sys/class/infiniband")) -> list[dict[str, str]]:
    """Each port of each RDMA device: state and rate."""
    out = []
    for port in sorted(folder.glob("*/ports/*")):
        words = {key: read(port / key) for key in ("state", "rate", "link_layer")}
        out.append({"device": port.parent.parent.name, "port": port.name, **words})
    return out


def read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# ---- the others -----------------------------------------------------------------------------------------------------


def listen() -> socket.socket:
    """A free port on all addresses; whoever connects is let in and dropped."""
    server = socket.create_server(("0.0.0.0", 0), backlog=512)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()

    threading.Thread(target=serve, daemon=True).start()
    return server


def connects(address: str, port: int) -> str:
    """ "" if a connection opens, else why not."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def look(order: dict[str, Any], me: str) -> dict[str, Any]:
    """Every other node by name and port, and the doctor's folder. `order` is the doctor's line, just read."""
    read_at = time.time()
    unreachable = {}
    for name, (_, port) in order["nodes"].items():
        found = address_of(name)
        why = connects(found, port) if found else "the name does not resolve here"
        if why and name != me:
            unreachable[name] = f"{name} ({found or '?'}): {why}"
    return {
        "node": me,
        "at": read_at,
        "unreachable": unreachable,
        **folder_facts(Path(order["folder"]), order["nonce"], me),
    }


def folder_facts(folder: Path, nonce: str, me: str) -> dict[str, Any]:
    """Whether the folder here is the doctor's: seen, replaced whole, locked against us, writable by us."""
    out: dict[str, Any] = {"mount": mount_of(folder), "visible_s": wait_for(folder / "nonce", nonce)}
    if out["visible_s"] is None:
        return out
    out["torn"] = torn_reads(folder / "replaced")
    out["lock"] = lock_seen(folder / "lock")
    try:
        (folder / f"from-{me}").write_text(nonce)
        out["written"] = ""
    except OSError as error:
        out["written"] = str(error.strerror)
    return out


def wait_for(path: Path, content: str) -> float | None:
    """Seconds until the file is there with its content; None if it never is."""
    begin = time.monotonic()
    while time.monotonic() - begin < VISIBLE_S:
        if read(path) == content:
            return time.monotonic() - begin
        time.sleep(0.05)
    return None


def torn_reads(path: Path) -> int:
    """Reads of a file that is being replaced by renames which found it missing or in pieces."""
    wrong = 0
    end = time.monotonic() + WATCH_S
    while time.monotonic() < end:
        words = read(path).split()
        wrong += len(words) != 2 or words[0] != words[1]
        time.sleep(0.01)
    return wrong


def lock_seen(path: Path) -> str:
    """`held` if the doctor's lock is felt here, `free` if not, else the file system's complaint."""
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return "held" if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else str(error.strerror)
    return "free"


def mount_of(path: Path) -> list[str]:
    """[type, source] of the file system that holds the path."""
    best = ("", "?", "?")
    real = os.path.realpath(path)
    for line in read(Path("/proc/self/mounts")).splitlines():
        source, target, kind, *_ = line.split(" ")
        target = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), target)
        if os.path.commonpath([real, target]) == target and len(target) >= len(best[0]):
            best = (target, kind, source)
    return [best[1], best[2]]


def main() -> None:
    with listen() as server:
        mine = facts(server.getsockname()[1], sys.argv[1] if len(sys.argv) > 1 else "")
        print(json.dumps(mine), flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        print(json.dumps(look(json.loads(line), mine["node"])), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
