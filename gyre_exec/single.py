"""One execution without a scheduler: the same executor, told by its caller and asked for its outcome."""

from __future__ import annotations

import asyncio
from typing import Any

from gyre_base import config
from gyre_base import messages as m
from gyre_base.keys import load_keys
from gyre_base.rundir import RunDir
from gyre_exec import keeping
from gyre_exec.daemon import Executor
from gyre_exec.harness import adapter_for, showing


class Single(Executor):
    """Runs one order and ends. No cellctl hears of it."""

    def __init__(self, run: RunDir, settings: config.Config, order: m.ExecutionOrder) -> None:
        name = "exec"
        adapter = adapter_for(settings.tasks.harness, settings.tasks.harness_env)
        super().__init__(run, showing(settings, adapter), load_keys(run), name, run.next_life(name), adapter)
        self._order = order
        self.outcome: asyncio.Future[m.ExecutionFinished] = asyncio.get_running_loop().create_future()

    async def perform(self, command: Any) -> None:
        if not isinstance(command, m.ExecutionFinished):
            await super().perform(command)
        elif not self.outcome.done():
            self.outcome.set_result(command)
            self.post(m.ExecutionNoted(execution=command.execution))

    async def _keep_in_touch(self) -> None:
        self.post(self._order)

    async def _listen(self) -> None:
        return


async def run_one(
    run: RunDir, settings: config.Config, order: m.ExecutionOrder, hopeless: asyncio.Future[Any]
) -> m.ExecutionFinished | None:
    """The outcome, or None if a signal came first or nobody will ever answer (`hopeless` is done). What it printed is
    packed when this returns. Raises ValueError.
    """
    with run.lock("exec"):
        single = Single(run, settings, order)
        serving = asyncio.ensure_future(single.serve())
        ends: set[asyncio.Future[Any]] = {single.outcome, serving, hopeless}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        single.stopping.set()
        await serving
    keep = settings.tasks.keep_workspaces
    keeping.tidy(run.path("executions", order.execution), keep=keep, limit=settings.tasks.printed_mib << 20)
    return single.outcome.result() if single.outcome.done() else None
