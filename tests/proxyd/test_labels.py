"""Agents and purposes follow from structure alone."""

from __future__ import annotations

from gyre_base.runfile import Agent
from proxyd.chat import ChatModel
from proxyd.conversation import Conversation, Hints, Message, ToolCall
from proxyd.labels import Relabel, label_of
from tests.proxyd.test_capture import SYSTEM, TASK, Execution, call_text, echo

SUB = Message("system", "You are a sub-agent.")
ASK = Message("user", "The context is nearly full. Say in one line what is left.")


def test_the_first_root_is_the_main_agent_and_its_repeat_is_a_retry(chat: ChatModel) -> None:
    run = Execution(chat)
    _, first = run.turn([SYSTEM, TASK], "ok")
    _, again = run.turn([SYSTEM, TASK], "ok")
    assert first.agent.role == again.agent.role == "main"
    assert again.attempt.of == "k1"


def test_a_root_that_quotes_an_open_tool_call_is_its_sub_agent(chat: ChatModel) -> None:
    run = Execution(chat)
    node, _ = run.turn([SYSTEM, TASK], call_text("task", {"prompt": "Write f2.py from f2.md"}))
    child, plan = run.turn([SUB, Message("user", "Write f2.py from f2.md")], "written")
    assert (plan.agent.role, plan.agent.parent) == ("sub-agent", node.spoken.calls[0].id)
    _, more = run.ask([SUB, Message("user", "Write f2.py from f2.md"), echo(child), Message("user", "sure?")])
    assert more.agent == plan.agent and label_of(more.agent, "turn") == "sub-agent"


def test_a_sub_agent_may_hear_of_its_surroundings_before_its_order(chat: ChatModel) -> None:
    run = Execution(chat)
    node, _ = run.turn([SYSTEM, TASK], call_text("task", {"prompt": "Write f2.py from f2.md"}))
    _, plan = run.ask([SUB, Message("user", "cwd: /workspace"), Message("user", "Write f2.py from f2.md")])
    assert (plan.agent.role, plan.agent.parent) == ("sub-agent", node.spoken.calls[0].id)
    _, later = run.ask([SUB, Message("user", "hello"), Message("assistant", "yes?"), Message("user", "Write f2.py")])
    assert later.agent.role == "unlabelled"


def test_a_tool_call_that_was_answered_starts_no_sub_agent(chat: ChatModel) -> None:
    run = Execution(chat)
    node, _ = run.turn([SYSTEM, TASK], call_text("task", {"prompt": "Write f2.py"}))
    run.turn([SYSTEM, TASK, echo(node), Message("tool", "done", call_id=node.spoken.calls[0].id)], "ok")
    _, plan = run.ask([SUB, Message("user", "Write f2.py")])
    assert plan.agent.role == "unlabelled"


def test_an_agent_in_the_background_is_known_though_its_call_was_answered_before(chat: ChatModel) -> None:
    """By its own system prompt and tools: a history of the main agent's with the same text is none."""
    run = Execution(chat)
    node, _ = run.turn([SYSTEM, TASK], call_text("task", {"prompt": "Write f2.py"}))
    call = node.spoken.calls[0].id
    run.turn([SYSTEM, TASK, echo(node), Message("tool", "launched", call_id=call)], "ok")
    order, tools = Message("user", "Write f2.py"), b'[{"type":"function","function":{"name":"f"}}]'
    for number, (system, given, role) in enumerate(
        [
            (Message("system", "You summarise."), b"", "unlabelled"),
            (SYSTEM, tools, "unlabelled"),
            (SUB, tools, "sub-agent"),
        ]
    ):
        plan = run.forest.plan(f"b{number}", Conversation((system, order), given), Hints())
        assert plan.agent.role == role, (system, given)
    assert plan.agent.parent == call


def test_a_summary_is_known_when_its_answer_is_quoted(chat: ChatModel) -> None:
    run = Execution(chat)
    node, _ = run.turn([SYSTEM, TASK], call_text("read_file", {"path": "f1.md"}))
    history = [SYSTEM, TASK, echo(node), Message("tool", "spec", call_id=node.spoken.calls[0].id)]
    asked, _ = run.turn([*history, ASK], "f1 is read")
    _, plan = run.ask([SYSTEM, Message("user", TASK.text + "\n\nSo far: f1 is read")])
    assert plan.relabels == [Relabel(asked.call, "summary", "main-summary")]
    assert plan.agent.id == "main"


def test_an_empty_summary_is_known_by_the_text_it_extends(chat: ChatModel) -> None:
    run = Execution(chat)
    node, _ = run.turn([SYSTEM, TASK], "I begin.")
    asked, _ = run.turn([SYSTEM, TASK, echo(node), ASK], " ")
    _, plan = run.ask([SYSTEM, Message("user", TASK.text + "\n\nSo far: ")])
    assert plan.relabels == [Relabel(asked.call, "summary", "main-summary")]


def test_a_sub_agents_summary_belongs_to_the_sub_agent(chat: ChatModel) -> None:
    run = Execution(chat)
    run.turn([SYSTEM, TASK], call_text("task", {"prompt": "Write f2.py"}))
    child, plan = run.turn([SUB, Message("user", "Write f2.py")], "reading")
    asked, _ = run.turn([SUB, Message("user", "Write f2.py"), echo(child), ASK], "half written")
    _, after = run.ask([SUB, Message("user", "Write f2.py\n\nSo far: half written")])
    assert after.relabels == [Relabel(asked.call, "summary", "sub-agent-summary")]
    assert after.agent == plan.agent


def test_what_structure_does_not_tell_is_unlabelled(chat: ChatModel) -> None:
    run = Execution(chat)
    run.turn([SYSTEM, TASK], "ok")
    _, plan = run.ask([Message("system", "Make a title."), Message("user", "whatever")])
    assert label_of(plan.agent, "turn") == "unlabelled"


def test_a_summary_asked_for_without_tools_is_known_when_it_is_quoted(chat: ChatModel) -> None:
    run = Execution(chat)
    run.turn([SYSTEM, TASK], "I begin.")
    said = "<analysis>hm</analysis><state_snapshot>f1 is read</state_snapshot>"
    asked, plan = run.turn([Message("system", "You summarise."), Message("user", "...")], said)
    assert label_of(plan.agent, "turn") == "unlabelled"
    _, after = run.ask([SYSTEM, Message("user", "So far: f1 is read")])
    assert after.relabels == [Relabel(asked.call, "summary", "main-summary")] and after.agent.id == "main"


def test_a_side_call_does_not_take_the_name_of_the_agent_beside_it_in_a_later_life(chat: ChatModel) -> None:
    run = Execution(chat)
    run.turn([SYSTEM, TASK], "ok")
    run.forest.labels.named(Agent(id="side", role="side"), "session-1")
    run.forest.labels.named(Agent(), "session-1")
    hints = Hints(agent="session-1", role="main")
    plan = run.forest.plan("k9", Conversation([SYSTEM, Message("user", "What did we do?")], b""), hints)
    assert plan.agent.role == "main"


def fork_of(run: Execution, order: str, told: str, **more: str) -> tuple[str, list[Message]]:
    """(the call that asks for it, its first history): the caller's without the call's arguments, results, an order."""
    node, _ = run.turn([SYSTEM, TASK], call_text("agent", {"description": "work", "prompt": order, **more}))
    call = node.spoken.calls[0].id
    bare = Message("assistant", "", (ToolCall(call, "agent", "{}"),))
    return call, [SYSTEM, TASK, bare, Message("tool", "started", call_id=call), Message("user", told)]


def test_a_fork_that_no_header_names_is_known_by_the_order_behind_its_callers_history(chat: ChatModel) -> None:
    run = Execution(chat)
    call, history = fork_of(run, "Write f2.py", "You are a fork.\n\nDirective: Write f2.py")
    ready = [*history, Message("assistant", "Understood."), Message("user", "Begin.")]
    node, plan = run.turn(ready, "writing")
    assert (plan.agent.role, plan.agent.parent) == ("sub-agent", call)
    _, again = run.ask(ready)
    assert again.agent == plan.agent and again.attempt.n == 1, "its repeat is a retry"
    _, more = run.ask([*ready, echo(node), Message("user", "and?")])
    assert more.agent == plan.agent
    _, main = run.ask([SYSTEM, TASK])
    assert main.agent.role == "main"


def test_a_caller_that_begins_anew_is_no_fork(chat: ChatModel) -> None:
    """After a summary: its report of the agent holds the order, and other words of the call end it."""
    for told in ("Write f2.py: done, and it is good.", "This is good work", "f2: Write f2.py.", "reWrite f2.py", ""):
        run = Execution(chat)
        _, history = fork_of(run, "Write f2.py", told)
        _, plan = run.ask(history)
        assert plan.agent.role == "main", told
