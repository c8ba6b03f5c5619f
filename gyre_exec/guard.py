"""Kills process groups when the executor that started them is gone. Run as `python -I -S guard.py`; stdlib only.

The executor writes `+PGID` and `-PGID` lines to its stdin; the end of stdin means that the executor died, however it
died. A group id can't be reused while the executor has not reaped its leader, and `-PGID` is written before that.
"""

import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        if line[0] == "+":
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass


if __name__ == "__main__":
    main()
