# ruff: noqa: PTH118, PTH208
"""A small coding agent for any OpenAI-compatible server. Standard library only; run as `python -I -S harness.py TASK`.

It works in the current directory and knows a base URL, a key and a model name, nothing else. One agent reads and
writes files through tools until it submits, may hand a part to a sub-agent, and compacts its history when that grows
over a budget. The agent itself (`agent`) is a generator that yields requests and receives replies, so it does no
network IO; `Client` sends them. Thousands of these processes run in minutes and most of a short process is its imports,
so only the C halves of `json` and `socket` are loaded where the interpreter has them.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=... python -I -S harness.py "Write m1.py from m1.md."

Environment: OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL; HARNESS_CONTEXT_BUDGET (tokens, default 6000),
HARNESS_MAX_TOKENS (per answer, default 96), HARNESS_MAX_TURNS (default 12), HARNESS_RETRIES (default 8),
HARNESS_TIMEOUT_S (silence on the line, default 600), HARNESS_TRANSCRIPT (a path for a JSON record).
Exit codes: 0 the agent ended, 1 the server could not be reached or refused, 2 bad usage.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import Any, Protocol, TypeVar

    Message = dict[str, Any]
    Result = TypeVar("Result")
    Talk = Generator[tuple[str, list[Message], list[Message]], tuple[Message, int], Result]

    class Files(Protocol):
        """Where an agent works; `Workspace` is one."""

        def read(self, path: str) -> str: ...
        def write(self, path: str, content: str) -> None: ...
        def modules(self) -> list[str]: ...


try:
    import _socket as socket
    from _json import encode_basestring_ascii, make_scanner
except ImportError:  # another Python implementation: the public modules do the same
    import socket  # type: ignore[no-redef]
    from json import JSONDecoder
    from json.encoder import encode_basestring_ascii

    def make_scanner(_: object) -> Any:  # type: ignore[no-redef]
        return JSONDecoder().scan_once  # type: ignore[attr-defined]


MAIN_SYSTEM = "You write Python modules from their specifications."
SUB_SYSTEM = "You are a sub-agent. You write one Python module."
SUMMARISE = "The context is nearly full. Say in one line what is written and what is left."


def _tool(name: str, description: str, *parameters: str) -> Message:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


SUB_TOOLS = [
    _tool("read_file", "Read a file.", "path"),
    _tool("write_file", "Write a file.", "path", "content"),
    _tool("submit", "Check that the modules compile, and end."),
]
MAIN_TOOLS = [
    *SUB_TOOLS,
    _tool("task", "Give a task to a sub-agent.", "prompt"),
]


class _Plain:
    """What the JSON scanner wants to know: nothing special."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_float, parse_int, parse_constant = float, int, float


_scan = make_scanner(_Plain)  # type: ignore[arg-type]


def parse_json(text: str) -> Any:
    """The value of a JSON text; ValueError when it is not one."""
    text = text.strip()
    try:
        value, end = _scan(text, 0)
    except (StopIteration, RecursionError):
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("more than one JSON value")
    return value


def to_json(value: Any) -> str:
    """JSON text of None, booleans, numbers, strings, lists and dicts with string keys."""
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        pairs = [encode_basestring_ascii(key) + ": " + to_json(item) for key, item in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_json, value)) + "]"
    return repr(value)


class ToolError(Exception):
    """A call that can't be obeyed; its text is the tool's answer to the model."""


class Workspace:
    """Files below one directory, by relative path."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)

    def _resolve(self, path: str) -> str:
        full = os.path.realpath(os.path.join(self.root, path))
        if full != self.root and not full.startswith(self.root + os.sep):
            raise ToolError("path is outside the workspace")
        return full

    def read(self, path: str) -> str:
        try:
            with open(self._resolve(path), encoding="utf-8") as file:
                return file.read()
        except (OSError, ValueError):
            raise ToolError("no such file") from None

    def write(self, path: str, content: str) -> None:
        try:
            with open(self._resolve(path), "w", encoding="utf-8") as file:
                file.write(content)
        except (OSError, ValueError):
            raise ToolError("cannot write") from None

    def modules(self) -> list[str]:
        return sorted(name for name in os.listdir(self.root) if name.endswith(".py"))


class Limits:
    """What bounds an agent: context tokens before compaction, turns, sub-agents of one agent."""

    def __init__(self, budget_tokens: int = 6000, max_turns: int = 12, max_subagents: int = 4) -> None:
        self.budget_tokens = budget_tokens
        self.max_turns = max_turns
        self.max_subagents = max_subagents


def agent(instruction: str, workspace: Files, limits: Limits, label: str = "main") -> Talk[str]:
    """Work on `instruction`: yields (label, messages, tools), is sent (answer, total tokens), returns a text."""
    tools = MAIN_TOOLS if label == "main" else SUB_TOOLS
    messages = opening(label, instruction)
    subagents = 0
    for _ in range(limits.max_turns):
        message, tokens = yield label, messages, tools
        messages.append(message)
        if not message.get("tool_calls"):
            return message.get("content") or ""
        for call in message["tool_calls"]:
            name = call["function"]["name"]
            if name == "task" and label == "main" and subagents < limits.max_subagents:
                subagents += 1
                result = yield from delegate(call, workspace, limits)
            else:
                result = use_tool(call, workspace, tools)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if name == "submit" and result == "ok":
                return "submitted"
            tokens += len(result) // 4  # what the server has not counted yet
        if tokens > limits.budget_tokens:
            messages = yield from compact(label, instruction, messages, tools)
    return "stopped: too many turns"


def opening(label: str, instruction: str) -> list[Message]:
    """The first two messages of a line."""
    system = MAIN_SYSTEM if label == "main" else SUB_SYSTEM
    return [{"role": "system", "content": system}, {"role": "user", "content": instruction}]


def compact(label: str, instruction: str, messages: list[Message], tools: list[Message]) -> Talk[list[Message]]:
    """Replace the history by one line of the model's own; yields the request for it."""
    message, _ = yield label + "-summary", [*messages, {"role": "user", "content": SUMMARISE}], tools
    summary = (message.get("content") or "").strip()
    return opening(label, instruction + "\n\nSo far: " + summary)


def delegate(call: Message, workspace: Files, limits: Limits) -> Talk[str]:
    """Run a sub-agent to its end; its last words are the tool's result."""
    try:
        prompt = arguments_of(call, ["prompt"])["prompt"]
    except ToolError as error:
        return "error: " + str(error)
    return (yield from agent(prompt, workspace, limits, label="sub"))


def use_tool(call: Message, workspace: Files, tools: list[Message]) -> str:
    """The result text of one call; anything wrong with it becomes a text the model can read."""
    name = call["function"]["name"]
    try:
        required = [tool["function"]["parameters"]["required"] for tool in tools if tool["function"]["name"] == name]
        if not required:
            raise ToolError("unknown tool")
        arguments = arguments_of(call, required[0])
        if name == "read_file":
            return workspace.read(arguments["path"])
        if name == "write_file":
            workspace.write(arguments["path"], arguments["content"])
            return "ok"
        if name == "submit":
            return check_modules(workspace)
        raise ToolError("not available")
    except ToolError as error:
        return "error: " + str(error)


def arguments_of(call: Message, required: list[str]) -> dict[str, Any]:
    """The call's arguments as a dict of texts."""
    try:
        arguments = parse_json(call["function"]["arguments"] or "{}")
    except ValueError:
        raise ToolError("arguments are not valid JSON") from None
    if not isinstance(arguments, dict):
        raise ToolError("arguments are not an object")
    for name in required:
        if not isinstance(arguments.get(name), str):
            raise ToolError("missing argument " + name)
    return arguments


def check_modules(workspace: Files) -> str:
    """Compile every module; it is a smoke check, the real tests are not here."""
    problems = []
    for path in workspace.modules():
        try:
            compile(workspace.read(path), path, "exec")
        except (SyntaxError, ValueError) as error:
            problems.append(path + ": " + type(error).__name__)
    return "\n".join(problems) or "ok"


READ_BYTES, MAX_LINE_BYTES, MAX_HEADERS = 65536, 65536, 100


class Retry(Exception):
    """The request may be sent again: connection lost, server busy, or a stream that broke."""


class Refused(Exception):
    """The server said no in a way that another try won't change."""


class Connection:
    """One HTTP/1.1 keep-alive connection; reads bodies with a length, chunked, or until the end."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host.encode(), port, 0, socket.SOCK_STREAM)[0]
        self.socket = socket.socket(family, kind, protocol)
        self.socket.settimeout(timeout_s)
        self.socket.connect(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""

    def close(self) -> None:
        self.socket.close()

    def line(self) -> bytes:
        """The next line without its end."""
        while b"\n" not in self.buffer:
            if len(self.buffer) > MAX_LINE_BYTES:
                raise Retry("line too long")
            more = self.socket.recv(READ_BYTES)
            if not more:
                raise Retry("connection closed")
            self.buffer += more
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.rstrip(b"\r")

    def some(self, most: int) -> bytes:
        """At least one byte and at most `most`, or b"" when the other side has closed."""
        if not self.buffer:
            self.buffer = self.socket.recv(READ_BYTES)
        piece, self.buffer = self.buffer[:most], self.buffer[most:]
        return piece

    def post(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], Iterator[bytes]]:
        """Send one request; returns (status, headers, iterator over the body's bytes)."""
        head = ["POST " + path + " HTTP/1.1"] + [name + ": " + value for name, value in headers.items()]
        head.append("Content-Length: " + str(len(body)))
        self.socket.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        status = self.line().split(None, 2)
        if len(status) < 2 or not status[1].isdigit():
            raise Retry("not an HTTP answer")
        fields: dict[str, str] = {}
        while line := self.line():
            if len(fields) > MAX_HEADERS:
                raise Retry("too many headers")
            name, _, value = line.decode("latin-1").partition(":")
            fields[name.strip().lower()] = value.strip()
        return int(status[1]), fields, self.body(fields)

    def body(self, fields: dict[str, str]) -> Iterator[bytes]:
        if fields.get("transfer-encoding", "").lower() == "chunked":
            return self.chunks()
        if "content-length" in fields:
            return self.exactly(int(fields["content-length"]))
        return iter(lambda: self.some(READ_BYTES), b"")

    def exactly(self, size: int) -> Iterator[bytes]:
        while size:
            piece = self.some(size)
            if not piece:
                raise Retry("body cut short")
            size -= len(piece)
            yield piece

    def chunks(self) -> Iterator[bytes]:
        while True:
            try:
                size = int(self.line().split(b";")[0], 16)
            except ValueError:
                raise Retry("bad chunk") from None
            if size == 0:
                self.line()  # no trailers are asked for, so the empty line follows
                return
            yield from self.exactly(size)
            self.line()


class Client:
    """Chat completions with streaming; holds at most one connection and retries with back-off."""

    def __init__(
        self, base_url: str, key: str, model: str, max_tokens: int = 96, retries: int = 8, timeout_s: float = 600.0
    ) -> None:
        scheme, _, rest = base_url.partition("://")
        if scheme != "http" or not rest:
            raise Refused("OPENAI_BASE_URL must look like http://host:port/v1")
        self.authority, _, path = rest.partition("/")
        host, _, port = self.authority.rpartition(":") if ":" in self.authority else (self.authority, "", "80")
        self.host, self.port, self.path = host, int(port), ("/" + path.rstrip("/")).rstrip("/")
        self.headers = {
            "Host": self.authority,
            "Authorization": "Bearer " + key,
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "User-Agent": "quickstart-harness/1",
        }
        self.model, self.max_tokens = model, max_tokens
        self.retries, self.timeout_s = retries, timeout_s
        self.connection: Connection | None = None
        self.retried: list[str] = []

    def complete(self, messages: list[Message], tools: list[Message]) -> tuple[Message, int]:
        """One answer: (assistant message, total tokens of prompt and answer)."""
        request = {"model": self.model, "messages": messages, "tools": tools, "max_tokens": self.max_tokens}
        request.update(stream=True, stream_options={"include_usage": True})
        body, failures = to_json(request).encode(), 0
        while True:
            try:
                return self.attempt(body)
            except (Retry, OSError) as error:
                self.close()
                self.retried.append(type(error).__name__ + ": " + str(error))
                failures += 1
                if failures > self.retries:
                    raise Refused("gave up: " + str(error)) from None
                time.sleep(min(0.05 * 2**failures, 5.0))

    def attempt(self, body: bytes) -> tuple[Message, int]:
        if self.connection is None:
            self.connection = Connection(self.host, self.port, self.timeout_s)
        connection = self.connection
        status, fields, pieces = connection.post(self.path + "/chat/completions", self.headers, body)
        if status != 200:
            text = b"".join(pieces).decode("utf-8", "replace")[:500]
            raise (Retry if status in (408, 409, 425, 429) or status >= 500 else Refused)(str(status) + " " + text)
        answer = assemble(events(pieces))
        if fields.get("connection", "").lower() == "close":
            self.close()
        return answer

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def events(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The data of each server-sent event; reads the body to its end and demands the closing [DONE]."""
    rest, done = b"", False
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
            elif not done:
                yield data
    if not done:
        raise Retry("the stream broke")


def assemble(stream: Iterator[bytes]) -> tuple[Message, int]:
    """Put the deltas of one answer together: (assistant message, total tokens)."""
    content: list[str] = []
    calls: dict[int, Message] = {}
    tokens, finish = 0, None
    for data in stream:
        try:
            chunk = parse_json(data.decode())
        except ValueError:
            raise Retry("bad event") from None
        if "error" in chunk:
            raise Retry("error in the stream: " + to_json(chunk["error"])[:200])
        if chunk.get("usage"):
            tokens = chunk["usage"].get("total_tokens", 0)
        for choice in chunk.get("choices") or []:
            finish = choice.get("finish_reason") or finish
            delta = choice.get("delta") or {}
            if delta.get("content"):
                content.append(delta["content"])
            for part in delta.get("tool_calls") or []:
                merge_call(calls, part)
    if finish is None:
        raise Retry("the stream ended before its finish reason")
    message: Message = {"role": "assistant", "content": "".join(content) or None}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message, tokens


def merge_call(calls: dict[int, Message], part: Message) -> None:
    """Add one delta of a tool call; the id and name come once, the arguments in pieces."""
    index = part.get("index", 0)
    call = calls.setdefault(index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    function = part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def drive(client: Client, conversation: Talk[str], record: list[Message] | None) -> str:
    """Send what the agent asks for until it ends; returns its last words."""
    request = next(conversation)
    while True:
        label, messages, tools = request
        message, tokens = client.complete(messages, tools)
        if record is not None:
            line = {"line": label, "messages": list(messages), "tools": [t["function"]["name"] for t in tools]}
            record.append({**line, "answer": message, "total_tokens": tokens})
        try:
            request = conversation.send((message, tokens))
        except StopIteration as end:
            return str(end.value)


def main() -> int:
    if len(sys.argv) != 2 or "OPENAI_BASE_URL" not in os.environ:
        print("usage: OPENAI_BASE_URL=http://host:port/v1 harness.py INSTRUCTION", file=sys.stderr)
        return 2
    get = os.environ.get
    transcript = get("HARNESS_TRANSCRIPT")
    record: list[Message] | None = [] if transcript else None
    limits = Limits(int(get("HARNESS_CONTEXT_BUDGET", "6000")), int(get("HARNESS_MAX_TURNS", "12")))
    final: str | None = None
    problem: str | None = None
    retried: list[str] = []
    try:
        client = Client(
            os.environ["OPENAI_BASE_URL"],
            get("OPENAI_API_KEY", ""),
            get("OPENAI_MODEL", "default"),
            max_tokens=int(get("HARNESS_MAX_TOKENS", "96")),
            retries=int(get("HARNESS_RETRIES", "8")),
            timeout_s=float(get("HARNESS_TIMEOUT_S", "600")),
        )
        retried = client.retried
        final = drive(client, agent(sys.argv[1], Workspace("."), limits), record)
        client.close()
    except Refused as error:
        problem = str(error)
        print("harness: " + problem, file=sys.stderr)
    if transcript:
        with open(transcript, "w", encoding="utf-8") as file:
            file.write(to_json({"calls": record, "final": final, "error": problem, "retries": retried}) + "\n")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
