"""A scripted harness for tests: standard library only; the instruction is JSON, a list of steps.

call TEXT | stream TEXT | write PATH TEXT | sleep S | print MIB | exit CODE | fork (a child that ignores TERM) |
escape (a child in a session of its own) | stubborn (ignore TERM) | env PATH (write the environment as JSON) | raise
say stdout|stderr|transcript TEXT | link-transcript PATH | warned PATH (on TERM write it and end) | fill PATH MIB |
grow PATH MIB (one file) | swarm N (children that sleep) | look PATH (what can be seen from here, as JSON)
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

LOOP = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def call(text: str, stream: bool = False) -> bytes:
    base = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(base.hostname or "", base.port, timeout=60)
    body = json.dumps(
        {"model": os.environ["OPENAI_MODEL"], "stream": stream, "messages": [{"role": "user", "content": text}]}
    )
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection.request("POST", base.path + "/chat/completions", body, headers)
    answer = connection.getresponse()
    data = answer.read()
    if answer.status != 200:
        sys.exit(f"the server answered {answer.status}: {data[:200]!r}")
    return data


def say(where: str, text: str) -> None:
    if where == "transcript":
        Path(os.environ["TRANSCRIPT"]).write_text(text)
    else:
        print(text, end="", file=getattr(sys, where), flush=True)


def fill(path: str, mib: int) -> None:
    """Files of 1 MiB each, until `mib` or an error."""
    for number in range(mib):
        with open(f"{path}{number}", "wb") as file:
            file.write(b"x" * (1 << 20))


def look() -> dict[str, object]:
    """What a curious agent finds: files, other processes, the network, whether it may write to the system."""
    found = []
    for folder, folders, files in os.walk("/"):
        folders[:] = [f for f in folders if f"{folder.rstrip('/')}/{f}" not in ("/proc", "/sys", "/usr", "/dev")]
        found += [f"{folder.rstrip('/')}/{name}" for name in files]
    reached = []
    for address in (("127.0.0.1", 22), ("192.0.2.1", 80)):
        try:
            socket.create_connection(address, timeout=0.5).close()
            reached.append(address)
        except OSError as error:
            reached.append(type(error).__name__)
    writable = [p for p in ("/", "/usr", "/etc", "/dev", "/opt") if os.access(p, os.W_OK)]
    return {
        "files": found,
        "processes": sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "reached": reached,
        "writable": writable,
        "uid": os.getuid(),
        "cwd": str(Path.cwd()),
        "environment": dict(os.environ),
    }


def main() -> None:
    for step, *arguments in json.loads(sys.argv[-1]):
        if step in ("call", "stream"):
            call(arguments[0], stream=step == "stream")
        elif step == "write":
            with open(arguments[0], "w") as file:
                file.write(arguments[1])
        elif step == "sleep":
            time.sleep(arguments[0])
        elif step == "print":
            for _ in range(arguments[0]):
                sys.stdout.write("x" * (1 << 20))
        elif step == "exit":
            sys.exit(arguments[0])
        elif step == "fork":
            subprocess.Popen([sys.executable, "-c", LOOP])
        elif step == "escape":
            subprocess.Popen([sys.executable, "-c", LOOP], start_new_session=True, stdout=subprocess.DEVNULL)
        elif step == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif step == "env":
            with open(arguments[0], "w") as file:
                json.dump(dict(os.environ), file)
        elif step == "say":
            say(*arguments)
        elif step == "link-transcript":
            Path(os.environ["TRANSCRIPT"]).symlink_to(arguments[0])
        elif step == "warned":
            signal.signal(signal.SIGTERM, lambda *_, path=arguments[0]: (Path(path).write_text("warned"), sys.exit(0)))
        elif step == "fill":
            fill(*arguments)
        elif step == "grow":
            with open(arguments[0], "wb") as file:
                for _ in range(arguments[1]):
                    file.write(b"x" * (1 << 20))
        elif step == "swarm":
            for _ in range(arguments[0]):
                subprocess.Popen(["/bin/sleep", "600"])
        elif step == "look":
            Path(arguments[0]).write_text(json.dumps(look()))
        elif step == "raise":
            raise RuntimeError("the agent lost its mind")


if __name__ == "__main__":
    main()
