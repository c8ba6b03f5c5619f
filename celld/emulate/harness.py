"""The agent of an emulated run: so many calls, so many tokens, then done. Run with `python -I -S`; stdlib only.

Arguments: tokens per nominal hour, calls, a file with the nominal hours of one task's executions per line, and the
number of the task (the instruction). The place in the group stands in the name of the execution, in its base URL. Every
call goes on with the conversation, as an agent does. The score file is in the workspace from the first call on, so a
time-out is scored as well.
"""

import _socket
import os
import sys


def main() -> int:
    tokens_per_h, calls, hours_file, task = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
    execution = path.split("/")[1]
    place = int(execution.partition("-")[2].partition(".")[0])
    hours = hours_of(hours_file, task, place)
    total = max(calls, round(hours * tokens_per_h))
    messages = '{"role":"user","content":"work"}'
    for number in range(calls):
        with open("score.json", "w") as file:
            file.write('{"score": %.4f}' % (hash_of(execution) * (number + 1) / calls))
        tokens = total * (number + 1) // calls - total * number // calls
        answer = ask(host, path, messages, tokens)
        messages += f',{{"role":"assistant","content":{answer}}},{{"role":"user","content":"go on"}}'
    return 0


def hours_of(name: str, task: int, place: int) -> float:
    with open(name) as file:
        for number, line in enumerate(file):
            if number == task:
                return float(line.split()[place])
    raise SystemExit(f"{name} has no line for task {task}")


def hash_of(text: str) -> float:
    """In [0, 1), the same for the same execution."""
    value = 0
    for letter in text:
        value = (value * 131 + ord(letter)) % 1000003
    return value / 1000003


def ask(host: str, path: str, messages: str, tokens: int) -> str:
    """One chat completion. Returns the answer's text as JSON."""
    model, key = os.environ["OPENAI_MODEL"], os.environ["OPENAI_API_KEY"]
    body = f'{{"model":"{model}","max_tokens":{tokens},"messages":[{messages}]}}'.encode()
    head = (
        f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    name, _, port = host.partition(":")
    line = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM, 0)
    line.connect((name, int(port)))
    send_all(line, head + body)
    answer = b""
    while piece := line.recv(65536):
        answer += piece
    line.close()
    text = answer.decode()
    if not text.startswith("HTTP/1.1 200"):
        raise SystemExit(text[:500])
    begin = text.index('"content":') + len('"content":')
    end = text.index('"', text.index('"', begin) + 1)  # our engine samples letters: nothing is escaped
    return text[begin : end + 1].strip()


def send_all(line: "_socket.socket", data: bytes) -> None:
    while data:
        data = data[line.send(data) :]


if __name__ == "__main__":
    sys.exit(main())
