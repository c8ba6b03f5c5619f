"""A tiny engine as a child process of a test, ended by its process id."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START_S = 60.0


class EngineProcess:
    """Started on a free port when entered; `url` is its base URL."""

    def __init__(self, model: Path, *options: str) -> None:
        self.model, self.options = model, options
        self.url = ""

    def __enter__(self) -> EngineProcess:
        self._folder = tempfile.TemporaryDirectory()
        port_file = Path(self._folder.name) / "port"
        command = [sys.executable, "-m", "celld.tiny.server", "--model", str(self.model), "--port-file", str(port_file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*command, *self.options], stdout=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"the engine did not start (exit code {self.process.returncode})")
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{int(port_file.read_text())}"
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()

    def cpu_s(self) -> float:
        """CPU seconds that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Memory that the process has in RAM."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
