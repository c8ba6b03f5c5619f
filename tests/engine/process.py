"""Engines as child processes of a test, ended by their process ids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from celld.sglang import launch

START_S = 60.0
SGLANG_START_S = 600.0  # three processes that import torch; the first start also compiles the store's hash


class EngineProcess:
    """Started on a free port when entered; `url` is its base URL."""

    def __init__(self, model: Path, *options: str, module: str = "celld.tiny.server") -> None:
        self.model, self.options, self._module = model, options, module
        self.url = ""

    def __enter__(self) -> EngineProcess:
        self._folder = tempfile.TemporaryDirectory()
        port_file = Path(self._folder.name) / "port"
        command = [sys.executable, "-m", self._module, "--model", str(self.model), "--port-file", str(port_file)]
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


@contextmanager
def sglang_pair(
    python: str, model: Path, folder: Path, *, routed_experts: bool = False, **extra: str
) -> Iterator[tuple[str, str]]:
    """Base URLs of two real engines on this CPU that share one KV store; `extra` are options of SGLang. Logs stay in
    `folder`.
    """
    store = folder / "kv"
    store.mkdir()
    started: list[subprocess.Popen[bytes]] = []
    urls = []
    try:
        for number in range(2):
            settings = launch.SGLangSettings(
                model=model,
                host="127.0.0.1",
                port=launch.free_port("127.0.0.1"),
                served_name="tiny",
                weight_version="0.0",
                max_running_requests=48,
                context_length=1024,
                device="cpu",
                kv_store=store,
                routed_experts=routed_experts,
                extra=extra,
            )
            settings.write(folder / f"engine{number}.yaml")
            with open(folder / f"engine{number}.log", "wb") as log:
                started.append(
                    subprocess.Popen(
                        launch.command(python, folder / f"engine{number}.yaml"),
                        stdout=log,
                        stderr=log,
                        env=settings.environment(os.environ),
                        start_new_session=True,
                    )
                )
            urls.append(f"http://127.0.0.1:{settings.port}")
        for process, url in zip(started, urls, strict=True):
            wait_answering(process, url, folder)
        yield urls[0], urls[1]
    finally:
        for process in started:
            end_group(process)


def wait_answering(process: subprocess.Popen[bytes], url: str, folder: Path) -> None:
    """Wait for an engine's /model_info."""
    deadline = time.monotonic() + SGLANG_START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url + "/model_info", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"SGLang at {url} did not come up (exit code {process.poll()}); its log is in {folder}")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """TERM for the launcher, then KILL for what is left of its group: scheduler and detokenizer are its children."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
