"""The walled workspaces: bubblewrap, Apptainer, Slurm with pyxis. Each is one command line.

In all of them the harness sees the workspace, a folder of its own, the system's programs read-only (this machine's, or
an image's) and what `tasks.visible` names. It sees neither the run directory nor a task file, and no network but one
loopback port that is its relay's, unless the task asks for more. The paths inside are the same for every execution, so
that a group's first prompts are the same.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gyre_exec.tasks import Needs, Task
from gyre_exec.workspace import MARK, SOCKET, CommandLine, Workspace, WorkspaceError

NETNS = str(Path(__file__).with_name("netns.py"))
PORT = 4000  # of the relay inside; each sandbox has all ports to itself
HARNESS = Path("/harness")
WORKSPACE = Path("/workspace")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")
ETC: tuple[str, ...] = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
)
ETC += ("localtime", "mime.types", "pki", "protocols", "services", "ssl", "terminfo")
ETC_WITH_NETWORK = ("hosts", "nsswitch.conf", "resolv.conf")
OWN_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/workspace:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n",
}
APPTAINER = ("apptainer", "--quiet", "exec", "--userns", "--containall")  # never with its setuid helper
APPTAINER_READS = ("PATH", "HOME", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")  # of our environment; nothing goes in
RELAY = "/relay.sock"
# a signal to srun kills its step at once; the step itself is warned through Slurm
WARN_STEP = """scancel --signal=TERM $(squeue -h -s -j "$1" -o '%i %j' | awk -v n="$2" '$2 == n {print $1}')"""
SHM_BYTES = 64 << 20
COPY_S = 600.0


@dataclass
class Walled(Workspace):
    """What the three have in common."""

    needs: Needs = field(default_factory=Needs)
    instruction: str = ""
    _task: str = ""

    program = ""  # without it nothing runs

    @property
    def inside(self) -> Path:
        return Path(self.needs.workdir) if self.needs.workdir else WORKSPACE

    @property
    def harness_inside(self) -> Path:
        return HARNESS

    def accept(self, task: Task) -> None:
        self.needs, self.instruction, self._task = task.needs, task.instruction, task.id
        if shutil.which(self.program) is None:
            raise WorkspaceError(f"{self.program} is not installed on this machine (tasks.workspace needs it)")
        if not self.inside.is_absolute() or self.inside in (Path("/"), HARNESS, Path("/tmp")):
            raise WorkspaceError(f"task {task.id}: {self.inside} can't be where its agent works")
        self.image(task)

    def image(self, task: Task | None = None) -> str:
        """What the sandbox is made of; empty: this machine. Raises WorkspaceError if a task's image can't be had."""
        name = self.needs.image or (self._task if self.needs.dockerfile else "")
        if not name:
            return self.settings.image
        found = self.image_file(name) or self.remote(name)
        if not found:
            place = Path(self.settings.images or "tasks.images", plain_name(name))
            raise WorkspaceError(f"task {self._task} needs image {name}: put it at {place} ({self.forms})")
        return found

    forms = "a directory"

    def image_file(self, name: str) -> str:
        """Where `tasks.images` has it, or nothing."""
        if not self.settings.images:
            return ""
        places = (Path(self.settings.images, plain_name(name) + end) for end in ("", ".sif", ".sqsh"))
        return next((str(place) for place in places if place.exists()), "")

    def remote(self, name: str) -> str:
        """How this kind fetches an image by name; nothing if it can't."""
        return ""

    def fill(self, task: Task) -> None:
        """With what the image has at the place where the agent works."""
        image = self.image()
        within = Path(image, self.inside.relative_to("/"))
        if image and within.is_dir():
            shutil.copytree(within, self.root, symlinks=True)
            return
        super().fill(task)
        if image and self.needs.workdir and not Path(image).is_dir():
            self.copy_out(image)

    def copy_out(self, image: str) -> None:
        """From an image that is no directory into the workspace. Raises WorkspaceError."""

    def base_url(self, execution: str, host_url: str) -> str:
        return host_url if self.needs.network else f"http://127.0.0.1:{PORT}/x/{execution}"

    def network(self, reach: bool, *relay: str) -> tuple[str, ...]:
        """The launcher's words: all of this machine's network, the relay's port, or none."""
        if self.needs.network:
            return ()
        return ("--network", str(PORT), *relay) if reach else ("--network", "none")

    def launcher(self, *line: str) -> list[str]:
        """This process's limits, and its network, before the sandbox."""
        words = [sys.executable, "-I", "-S", NETNS, *line]
        if self.settings.file_bytes:
            words += ["--file-bytes", str(self.settings.file_bytes)]
        if self.settings.processes:
            words += ["--processes", str(self.settings.processes)]
        return [*words, "--"]

    def shown(self, argv: Sequence[str]) -> list[str]:
        """Paths of this machine that the program needs, to be seen at the same place, read-only."""
        named = [path for path in self.settings.visible if Path(path).exists()]
        needed: list[str] = []
        for word in argv:
            if any(Path(word).is_relative_to(path) for path in named):
                continue
            if word.startswith("/") and word != self.instruction and Path(word).is_file():
                ours = word.startswith((sys.prefix + "/", sys.base_prefix + "/"))
                needed += (sys.prefix, sys.base_prefix) if ours else (word,)
        named = [path for path in self.settings.visible if Path(path).exists()]
        return list(dict.fromkeys([*named, *(path for path in needed if not path.startswith(SYSTEM))]))


class Bwrap(Walled):
    """bubblewrap: user, process, IPC and host-name namespaces around this machine's programs or a directory's."""

    program = "bwrap"

    def image_file(self, name: str) -> str:
        found = super().image_file(name)
        return found if found and Path(found).is_dir() else ""

    def command(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        binds: Mapping[str, str] | None = None,
        reach: bool = True,
    ) -> CommandLine:
        words = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        words += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--die-with-parent"]
        words += ["--unsetenv", MARK]
        shown = self.shown(argv)
        words += self._system([*shown, *(binds or {}).values(), str(self.inside)])
        words += ["--dev", "/dev", "--remount-ro", "/dev", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]
        words += ["--proc", "/proc", "--bind", str(self.harness / "tmp"), "/tmp"]
        for path in shown:
            words += ["--ro-bind", path, path]
        words += ["--bind", str(self.harness), str(HARNESS), "--bind", str(self.root), str(self.inside)]
        for source, target in (binds or {}).items():
            words += ["--bind", source, target]
        words += ["--remount-ro", "/", "--chdir", str(self.inside), "--", *argv]
        line = self.network(reach, "--give", SOCKET)
        full = {**self.needs.env, **env}
        return CommandLine(argv=[*self.launcher(*line), *words], env=full, walled=True, hands_over=SOCKET in line)

    def _system(self, holes: Sequence[str]) -> list[str]:
        """The root file system."""
        image = self.image()
        words: list[str] = []
        if image:
            for entry in sorted(Path(image).iterdir()):
                if entry.name not in ("dev", "proc", "sys", "tmp", "run"):
                    words += _mirror(entry, f"/{entry.name}", holes)
            if self.needs.network and Path(image, "etc", "resolv.conf").exists():
                words += ["--ro-bind", "/etc/resolv.conf", "/etc/resolv.conf"]
            return words
        for path in map(Path, SYSTEM):
            if path.exists():
                words += _mirror(path, str(path))
        own = {name: text for name, text in OWN_ETC.items() if not (self.needs.network and name == "hosts")}
        for name in ETC + (ETC_WITH_NETWORK if self.needs.network else ()):
            if Path("/etc", name).exists():
                words += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
        for name, text in own.items():
            file = self.harness / f".{name}"
            if not file.exists():
                file.write_text(text)
            words += ["--ro-bind", str(file), f"/etc/{name}"]
        return words


def _mirror(source: Path, target: str, holes: Sequence[str] = ()) -> list[str]:
    """Read-only at `target`; links (of a merged /usr) stay links. A directory in which one of `holes` is to appear that
    it does not have is made of its parts: nothing can be put into what is read-only.
    """
    if source.is_symlink():
        return ["--symlink", str(source.readlink()), target]
    below = [hole for hole in holes if hole.startswith(f"{target}/")]
    if all((source / hole[len(target) + 1 :]).exists() for hole in below):
        return ["--ro-bind", str(source), target]
    words = ["--dir", target]
    for part in sorted(source.iterdir()):
        words += _mirror(part, f"{target}/{part.name}", below)
    return words


class Apptainer(Walled):
    """Apptainer: an image file or directory, contained."""

    program = "apptainer"
    forms = "a directory or a .sif file"

    def remote(self, name: str) -> str:
        return f"docker://{name}"

    def accept(self, task: Task) -> None:
        super().accept(task)
        if not self.image():
            raise WorkspaceError(f"task {task.id}: an apptainer workspace needs an image: set tasks.image")

    def command(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        binds: Mapping[str, str] | None = None,
        reach: bool = True,
    ) -> CommandLine:
        words = [*APPTAINER, "--no-mount", "cwd,tmp", "--no-umask"]
        pairs = {str(self.harness): str(HARNESS), str(self.harness / "tmp"): "/tmp"} | dict(binds or {})
        for source, target in pairs.items():
            words += ["--bind", _bindable(source, target)]
        for path in self.shown(argv):
            words += ["--bind", _bindable(path, path) + ":ro"]
        words += ["--home", _bindable(str(self.root), str(self.inside)), "--pwd", str(self.inside)]
        line = self.network(reach, "--give", SOCKET)
        full = {name: os.environ[name] for name in APPTAINER_READS if name in os.environ}
        full |= {f"APPTAINERENV_{name}": text for name, text in {**self.needs.env, **env}.items() if name != "HOME"}
        return CommandLine(
            argv=[*self.launcher(*line), *words, self.image(), *argv], env=full, walled=True, hands_over=SOCKET in line
        )

    def copy_out(self, image: str) -> None:
        copy = 'if [ -d "$1" ]; then tar -C "$1" -cf - . | tar -C /copy -xf -; fi'
        words = [*APPTAINER, "--bind", _bindable(str(self.root), "/copy"), image]
        _fetch([*words, "/bin/sh", "-c", copy, "sh", str(self.inside)])


class Pyxis(Walled):
    """A step of this Slurm job in an enroot container on this node. The image must have python3: it starts the wall
    between the harness and the node's network from inside (a step is no child of ours).
    """

    program = "srun"
    forms = "an enroot .sqsh file"

    def remote(self, name: str) -> str:
        return name

    def accept(self, task: Task) -> None:
        super().accept(task)
        if not self.image():
            raise WorkspaceError(f"task {task.id}: a pyxis workspace needs an image: set tasks.image")

    def step(self) -> str:
        return f"gyre-{self.folder.name}"

    def command(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        binds: Mapping[str, str] | None = None,
        reach: bool = True,
    ) -> CommandLine:
        line = self.network(reach, "--relay", RELAY)
        mark = hashlib.blake2b(str(self.folder).encode(), digest_size=8).hexdigest()
        relay = Path(tempfile.gettempdir(), f"gyre-{mark}.sock")  # a run's own path may be too long for a socket
        pairs = {str(self.root): str(self.inside), str(self.harness): str(HARNESS), str(self.harness / "tmp"): "/tmp"}
        mounts = [f"{source}:{target}" for source, target in (pairs | dict(binds or {})).items()]
        mounts += [f"{path}:{path}:ro" for path in (*self.shown(argv), NETNS)]
        mounts += [f"{relay}:{RELAY}"] if "--relay" in line else []
        words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--gres=none", "--quiet", f"--job-name={self.step()}"]
        words += [f"--nodelist={os.environ['SLURMD_NODENAME']}"] if "SLURMD_NODENAME" in os.environ else []
        words += [f"--container-image={self.image()}", f"--container-mounts={','.join(mounts)}"]
        words += [f"--container-workdir={self.inside}", "--no-container-mount-home", "--container-readonly"]
        words += [f"--container-env={','.join(sorted({**self.needs.env, **env}))}"]
        inner = ["python3", *self.launcher(*line)[1:]]
        full = {**_slurm_words(), **self.needs.env, **env}
        socket = relay if "--relay" in line else None
        warning = ("/bin/sh", "-c", WARN_STEP, "sh", os.environ.get("SLURM_JOB_ID", ""), self.step())
        return CommandLine(argv=[*words, *inner, *argv], env=full, relay_socket=socket, warning=warning)

    def copy_out(self, image: str) -> None:
        copy = 'if [ -d "$1" ]; then cp -a "$1"/. /copy/; fi'
        words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--gres=none", f"--container-image={image}"]
        words += [f"--container-mounts={self.root}:/copy", "--no-container-mount-home", "/bin/sh", "-c", copy, "sh"]
        _fetch([*words, str(self.inside)])


def plain_name(image: str) -> str:
    """The name of an image as that of a file."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", image)


def _bindable(source: str, target: str) -> str:
    if set(":,") & set(source + target):
        raise WorkspaceError(f"{source}: a `:` or `,` in a path can't be bound into a container")
    return f"{source}:{target}"


def _slurm_words() -> dict[str, str]:
    """Who the step belongs to; nothing else of our own environment goes in."""
    names = ("PATH", "SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID")
    return {name: os.environ[name] for name in names if name in os.environ}


def _fetch(argv: list[str]) -> None:
    try:
        subprocess.run(argv, check=True, capture_output=True, timeout=COPY_S, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        tail = error.stderr.decode("utf-8", "replace").strip()[-400:]
        raise WorkspaceError(f"the image's files can't be had: {tail}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkspaceError(f"the image's files can't be had: {error}") from None
