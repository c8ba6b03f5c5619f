"""A scripted harness for tests: standard library only; the instruction is JSON, a list of steps.

call TEXT | stream TEXT | write PATH TEXT | sleep S | print MIB | exit CODE | fork (a child that ignores TERM) |
escape (a child in a session of its own) | stubborn (ignore TERM) | env PATH (write the environment as JSON) | raise
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse

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
        elif step == "raise":
            raise RuntimeError("the agent lost its mind")


if __name__ == "__main__":
    main()
