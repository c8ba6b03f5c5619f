"""The dead-man switch of a cell in a Slurm job: what a silent supervisor means, and the way out of a headless job.

Slurm keeps a job whose batch host died, GPUs and all, until its time is up; and what runs on a node that is cut off
runs on after Slurm gave the node up. So a cell that hears nothing of the supervisor stops its work by itself. Whether
the supervisor is gone or only out of reach is told by its beat on the shared file system: if that stands still too, one
of the cells requeues the job. `DeadMan` is pure; `requeue` calls Slurm.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import re
from dataclasses import dataclass
from enum import Enum

from gyre_base.allocation import Allocation
from gyre_base.rundir import RunDir

log = logging.getLogger(__name__)
BEAT = ("lives", "supervisor.beat")  # of the run directory: the supervisor writes another word about every 2 s
SLURM_S = 10.0  # one call; the controller may be away
AGAIN_S = 5.0
GIVE_UP_S = 900.0


class Verdict(Enum):
    ALIVE = "alive"
    CUT = "cut off"  # we are out of reach, or the disk is: stop the work, nothing else
    ORPHANED = "orphaned"  # the supervisor is gone: stop the work and requeue the job


@dataclass
class DeadMan:
    """Times are monotonic seconds of one process. A beat that can't be read says nothing about the supervisor."""

    silence_s: float
    heard_at: float
    looked_at: float
    beat: str = ""
    beat_at: float | None = None  # when another beat was seen; None: the disk does not answer

    def heard(self, now: float) -> None:
        self.heard_at = now

    def saw(self, beat: str | None, now: float) -> None:
        if beat is None:
            self.beat_at = None
        elif beat != self.beat or self.beat_at is None:
            self.beat, self.beat_at = beat, now

    def verdict(self, now: float, every_s: float) -> Verdict:
        """Asked about every `every_s`. Time in which this process stood still itself is held against nobody."""
        stall_s = max(0.0, now - self.looked_at - 2 * every_s)
        self.looked_at = now
        self.heard_at = min(now, self.heard_at + stall_s)
        if self.beat_at is not None:
            self.beat_at = min(now, self.beat_at + stall_s)
        if now - self.heard_at < self.silence_s:
            return Verdict.ALIVE
        if self.beat_at is None:
            return Verdict.CUT
        if now - self.beat_at < self.silence_s:
            # it beats, or has not been silent long enough: out of reach if it beat after we last heard it
            beats_on = self.beat_at > self.heard_at + 2 * every_s
            return Verdict.CUT if beats_on else Verdict.ALIVE
        return Verdict.ORPHANED


def read_beat(run: RunDir) -> str | None:
    try:
        return run.path(*BEAT).read_text()
    except OSError:
        return None


async def requeue(run: RunDir, allocation: Allocation) -> str:
    """Requeue the job unless somebody has: one cell at a time, judged by Slurm's own count of restarts. What happened.

    Repeats while the controller does not answer; gives up after `GIVE_UP_S`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + GIVE_UP_S
    with open(run.path("lives", "requeue.lock"), "a") as turn:
        await asyncio.to_thread(fcntl.flock, turn, fcntl.LOCK_EX)  # the kernel frees it if its holder dies
        while loop.time() < deadline:
            code, said = await _slurm("scontrol", "-o", "show", "job", allocation.job)
            facts = dict(re.findall(r"(\w+)=(\S*)", said))
            if code == 0 and facts:
                if facts.get("JobState") != "RUNNING" or int(facts.get("Restarts") or 0) != allocation.restarts:
                    return (
                        f"job {allocation.job} is {facts.get('JobState')}, restarts {facts.get('Restarts')}: not ours"
                    )
                code, said = await _slurm("scontrol", "requeue", allocation.job)
                if code == 0:
                    return f"requeued job {allocation.job}"
            log.warning("can't requeue yet: %s", said.strip())
            await asyncio.sleep(AGAIN_S)
    return f"gave up after {GIVE_UP_S:g} s"


async def _slurm(*words: str) -> tuple[int, str]:
    """Exit code and output of a Slurm client, within `SLURM_S`."""
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        return 127, f"{words[0]}: {error.strerror}; Slurm's clients must be reachable where celld runs"
    try:
        said, _ = await asyncio.wait_for(process.communicate(), SLURM_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return 124, f"{words[0]} gives no answer within {SLURM_S:g} s"
    return process.returncode or 0, said.decode(errors="replace")
