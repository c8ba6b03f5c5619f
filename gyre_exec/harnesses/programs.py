"""Where a harness's program is, and how its pinned version gets there. Nothing of it enters gyre's own environment.

Each lives in a folder of its own below the cache ($GYRE_HARNESS_HOME, else $XDG_CACHE_HOME/gyre/harnesses); a folder is
whole when its stamp is there. `gyre harness install NAME` makes it, anywhere else a missing program is an error that
says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gyre_base.config import ConfigError

STAMP = ".installed"


class HarnessMissing(ConfigError):
    """The program is not installed; says which command installs it."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A pinned release from a package registry. `file` is the program within its folder."""

    harness: str
    package: str
    version: str
    file: str
    registry: str = "npm"  # or pip

    def folder(self) -> Path:
        home = os.environ.get("GYRE_HARNESS_HOME")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return (Path(home) if home else cache / "gyre" / "harnesses") / f"{self.harness}-{self.version}"

    def found(self) -> bool:
        return (self.folder() / STAMP).exists()

    def path(self) -> Path:
        """The installed program. Raises HarnessMissing."""
        if not self.found():
            raise HarnessMissing(
                f"{self.harness} {self.version} is not installed here: gyre harness install {self.harness}"
            )
        return self.folder() / self.file

    def shown(self) -> str:
        """The folder that a sandbox must show. Raises HarnessMissing, so that an executor without it does not start."""
        self.path()
        return str(self.folder())

    def install(self) -> Path:
        """Fetch it if it is not there. Raises HarnessMissing with the installer's last words."""
        folder = self.folder()
        if not self.found():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for command in self._commands(folder):
                _run(command, self.harness)
            if not (folder / self.file).is_file():
                raise HarnessMissing(f"{self.package} {self.version} has no {self.file}: another platform?")
            (folder / STAMP).touch()
        return self.path()

    def _commands(self, folder: Path) -> list[list[str]]:
        if self.registry == "pip":
            return [
                [sys.executable, "-m", "venv", str(folder)],
                [str(folder / "bin" / "pip"), "install", "-q", f"{self.package}=={self.version}"],
            ]
        quiet = ["--ignore-scripts", "--no-fund", "--no-audit", "--no-update-notifier", "--loglevel", "error"]
        return [["npm", "install", "--prefix", str(folder), *quiet, f"{self.package}@{self.version}"]]


def _run(command: list[str], harness: str) -> None:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError:
        raise HarnessMissing(
            f"{harness} is installed by {command[0]}, which is not here (Debian: apt-get install npm)"
        ) from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise HarnessMissing(f"{command[0]} could not install {harness}: {' '.join(last)}")
