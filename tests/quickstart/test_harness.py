"""The harness as a process against a scripted server: what it sends, what it writes, how it survives."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import harness
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.quickstart.conftest import QUICKSTART

Answer = dict[str, Any]
Script = Callable[[dict[str, Any]], Answer]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": json.dumps(arguments)}


def says(text: str, total_tokens: int = 10) -> Answer:
    return {"content": text, "calls": [], "total_tokens": total_tokens}


def calls(*made: dict[str, Any], total_tokens: int = 10) -> Answer:
    return {"content": "", "calls": list(made), "total_tokens": total_tokens}


def stream_of(answer: Answer, serial: int) -> list[bytes]:
    """Server-sent events of an answer: the id and name first, text and arguments in pieces of three characters."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": answer["content"][at : at + 3]} for at in range(0, len(answer["content"]), 3)]
    for index, made in enumerate(answer["calls"]):
        function = {"name": made["name"], "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": f"c{serial}_{index}", "function": function}]})
        for at in range(0, len(made["arguments"]), 3):
            part = {"index": index, "function": {"arguments": made["arguments"][at : at + 3]}}
            deltas.append({"tool_calls": [part]})
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    finish = "tool_calls" if answer["calls"] else "stop"
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks.append({"choices": [], "usage": {"total_tokens": answer["total_tokens"]}})
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


class Server:
    """Plays a list of answers, one per request; an answer may also be a fault."""

    def __init__(self, script: list[Answer]) -> None:
        self.script, self.requests, self.headers, self.connections = script, [], [], set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                outer.headers.append(dict(self.headers))
                outer.connections.add(self.client_address)
                outer.play(self, outer.script[len(outer.requests) - 1])

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def play(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        if "status" in answer:
            handler.send_response(answer["status"])
            handler.send_header("Content-Length", "4")
            handler.end_headers()
            handler.wfile.write(b"busy")
            return
        events = stream_of(answer, len(self.requests))
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        if answer.get("until_close"):
            handler.send_header("Connection", "close")
            handler.end_headers()
            handler.wfile.write(b"".join(events))
            return
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for event in events[: answer.get("drop_after", len(events))]:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        if "drop_after" in answer:
            linger = struct.pack("ii", 1, 0)  # close with a reset, as a killed server does
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            handler.close_connection = True
        else:
            handler.wfile.write(b"0\r\n\r\n")


@contextmanager
def serving(script: list[Answer]) -> Iterator[Server]:
    server = Server(script)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()


def run(server: Server, folder: Path, instruction: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """(exit code, transcript) of one harness process."""
    transcript = folder.parent / "transcript.json"
    base = f"http://127.0.0.1:{server.http.server_address[1]}/v1"
    known = {"OPENAI_BASE_URL": base, "OPENAI_API_KEY": "secret", "OPENAI_MODEL": "tiny"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(QUICKSTART / "harness.py"), instruction],
        cwd=folder,
        env={**known, "HARNESS_TRANSCRIPT": str(transcript), **environment},
        timeout=60,
        check=False,
        capture_output=True,
    )
    return done.returncode, json.loads(transcript.read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    (place / "m1.md").write_text("f(s) returns a text.\n")
    return place


def tool_results(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["messages"] if message["role"] == "tool"]


def test_tool_turns_read_and_write_in_the_workspace_until_the_submission(folder: Path) -> None:
    code = "def f(s):\n    return s\n"
    script = [
        calls(call("read_file", path="m1.md")),
        calls(call("write_file", path="m1.py", content=code), call("write_file", path="m2.py", content=code)),
        calls(call("submit"), call("write_file", path="late.py", content="")),
    ]
    with serving(script) as server:
        status, transcript = run(server, folder, "Write m1.py.")
    assert (status, transcript["final"], transcript["error"]) == (0, "submitted", None)
    assert not (folder / "late.py").exists()
    assert (folder / "m1.py").read_text() == code
    assert [tool_results(request) for request in server.requests] == [
        [],
        ["f(s) returns a text.\n"],
        ["f(s) returns a text.\n", "ok", "ok"],
    ]
    assert len(server.connections) == 1  # kept alive
    assert server.headers[0]["Authorization"] == "Bearer secret"
    first = server.requests[0]
    assert (first["model"], first["stream"], first["stream_options"]) == ("tiny", True, {"include_usage": True})


def test_each_request_repeats_the_answers_exactly_as_they_were_streamed(folder: Path) -> None:
    made = {"name": "read_file", "arguments": '{"path":   "m1.md"}'}  # spacing kept: the server matches on it
    with serving([{"content": "I look. é", "calls": [made], "total_tokens": 5}, says("Done.")]) as server:
        assert run(server, folder, "Write m1.py.")[0] == 0
    answer = server.requests[1]["messages"][2]
    assert answer["content"] == "I look. é"
    assert answer["tool_calls"][0]["function"] == made


def test_a_sub_agent_has_its_own_system_prompt_tools_and_history(folder: Path) -> None:
    script = [
        calls(call("task", prompt="Write m1.py from m1.md.")),
        calls(call("write_file", path="m1.py", content="x = 1\n"), call("submit")),
        says("Done."),
    ]
    with serving(script) as server:
        status, transcript = run(server, folder, "Write it. Use a sub-agent.")
    assert status == 0
    assert [line["line"] for line in transcript["calls"]] == ["main", "sub", "main"]
    sub = server.requests[1]
    assert [message["content"] for message in sub["messages"]] == [harness.SUB_SYSTEM, "Write m1.py from m1.md."]
    assert [tool["function"]["name"] for tool in sub["tools"]] == ["read_file", "write_file", "submit"]
    assert tool_results(server.requests[2]) == ["submitted"]


def test_a_sub_agent_cannot_start_another(folder: Path) -> None:
    nested = calls(call("task", prompt="again"))
    with serving([nested, nested, says("Gave up."), says("Done.")]) as server:
        assert run(server, folder, "Go.")[0] == 0
    assert tool_results(server.requests[2]) == ["error: unknown tool"]


def test_history_is_compacted_when_usage_passes_the_budget(folder: Path) -> None:
    script = [
        calls(call("read_file", path="m1.md"), total_tokens=101),
        says("m1.md is read."),
        says("Done."),
    ]
    with serving(script) as server:
        status, transcript = run(server, folder, "Write m1.py.", HARNESS_CONTEXT_BUDGET="100")
    assert status == 0
    assert [line["line"] for line in transcript["calls"]] == ["main", "main-summary", "main"]
    before, summary, after = (request["messages"] for request in server.requests)
    assert summary[: len(before)] == before
    assert [message["role"] for message in summary] == ["system", "user", "assistant", "tool", "user"]
    assert summary[-1]["content"] == harness.SUMMARISE
    assert [message["content"] for message in after] == [
        harness.MAIN_SYSTEM,
        "Write m1.py.\n\nSo far: m1.md is read.",
    ]
    assert server.requests[1]["tools"] == server.requests[0]["tools"]  # so the prefix stays cached


def test_below_the_budget_nothing_is_compacted(folder: Path) -> None:
    with serving([calls(call("read_file", path="m1.md"), total_tokens=90), says("Done.")]) as server:
        _, transcript = run(server, folder, "Write m1.py.", HARNESS_CONTEXT_BUDGET="100")
    assert [line["line"] for line in transcript["calls"]] == ["main", "main"]


@pytest.mark.parametrize(
    "fault",
    [{"status": 503}, {"status": 429}, {**says("Done."), "drop_after": 2}, {**says("Done."), "drop_after": 0}],
    ids=["503", "429", "dropped midway", "dropped at once"],
)
def test_a_passing_fault_is_retried_with_the_same_request(folder: Path, fault: Answer) -> None:
    with serving([fault, fault, says("Done.")]) as server:
        status, transcript = run(server, folder, "Write m1.py.")
    assert (status, transcript["final"], len(transcript["retries"])) == (0, "Done.", 2)
    assert server.requests[0] == server.requests[1] == server.requests[2]


def test_a_refusal_and_an_endless_fault_end_with_exit_code_1(folder: Path) -> None:
    with serving([{"status": 401}]) as server:
        status, transcript = run(server, folder, "Write m1.py.")
    assert status == 1 and transcript["error"].startswith("401") and len(server.requests) == 1
    with serving([{"status": 503}] * 3) as server:
        status, transcript = run(server, folder, "Write m1.py.", HARNESS_RETRIES="2")
    assert status == 1 and transcript["error"].startswith("gave up") and len(server.requests) == 3


def test_a_body_without_length_that_ends_with_the_connection_is_read(folder: Path) -> None:
    script = [{**calls(call("read_file", path="m1.md")), "until_close": True}, {**says("Done."), "until_close": True}]
    with serving(script) as server:
        status, transcript = run(server, folder, "Write m1.py.")
    assert (status, transcript["retries"]) == (0, [])


@pytest.mark.parametrize(
    ("made", "result"),
    [
        ({"name": "read_file", "arguments": '{"path": '}, "error: arguments are not valid JSON"),
        ({"name": "read_file", "arguments": '["m1.md"]'}, "error: arguments are not an object"),
        ({"name": "read_file", "arguments": "{}"}, "error: missing argument path"),
        (call("read_file", path="m9.md"), "error: no such file"),
        (call("read_file", path="../transcript.json"), "error: path is outside the workspace"),
        (call("write_file", path="/tmp/x", content=""), "error: path is outside the workspace"),
        (call("write_file", path="a\0b", content=""), "error: cannot write"),
        (call("remove_file", path="m1.md"), "error: unknown tool"),
        (call("task", prompt=3), "error: missing argument prompt"),
    ],
)
def test_a_bad_tool_call_is_answered_and_the_agent_goes_on(folder: Path, made: dict[str, Any], result: str) -> None:
    with serving([calls(made), says("Done.")]) as server:
        status, _ = run(server, folder, "Write m1.py.")
    assert status == 0
    assert tool_results(server.requests[1]) == [result]


def test_a_submission_is_refused_while_a_module_does_not_compile(folder: Path) -> None:
    bad = call("write_file", path="m1.py", content="def f(s:\n")
    with serving([calls(bad, call("submit")), says("Done.")]) as server:
        assert run(server, folder, "Write m1.py.")[0] == 0
    assert tool_results(server.requests[1]) == ["ok", "m1.py: SyntaxError"]


def test_turns_are_bounded(folder: Path) -> None:
    with serving([calls(call("read_file", path="m1.md"))] * 3) as server:
        status, transcript = run(server, folder, "Write m1.py.", HARNESS_MAX_TURNS="3")
    assert (status, transcript["final"], len(server.requests)) == (0, "stopped: too many turns", 3)


def test_it_imports_nothing_of_gyre_and_only_the_standard_library() -> None:
    text = (QUICKSTART / "harness.py").read_text()
    imported = {
        line.split()[1].split(".")[0] for line in text.splitlines() if line.strip().startswith(("import ", "from "))
    }
    assert imported <= set(sys.stdlib_module_names)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_its_own_json_agrees_with_the_json_module(value: Any) -> None:
    assert json.loads(harness.to_json(value)) == value
    assert harness.parse_json(json.dumps(value, indent=1)) == value


@pytest.mark.parametrize("text", ["", "{", "[1,]", "{} {}", "nul", '{"a" 1}', "'a'"])
def test_its_own_json_refuses_what_is_not_json(text: str) -> None:
    with pytest.raises(ValueError):
        harness.parse_json(text)
