"""A fake harness: bodies in its dialect go through the dialect, the hints and the tree; answers come back as it would
parse them. In process, no sockets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from proxyd.capture import Forest, Node, Plan
from proxyd.chat import ChatModel
from proxyd.conversation import Reply
from proxyd.dialects import Dialect
from proxyd.dialects.anthropic import AnthropicMessages
from proxyd.dialects.openai_chat import OpenAIChat
from proxyd.dialects.openai_responses import OpenAIResponses
from proxyd.hints import hints_of
from proxyd.labels import label_of
from tests.proxyd.test_capture import spelled

DIALECTS: dict[str, Dialect] = {"messages": AnthropicMessages(), "chat": OpenAIChat(), "responses": OpenAIResponses()}


@dataclass
class Said:
    """One call: how it was planned, what was recorded, what the harness got."""

    plan: Plan
    node: Node
    body: Any

    @property
    def label(self) -> str:
        return label_of(self.plan.agent, self.plan.purpose)

    @property
    def ids(self) -> list[int]:
        return [*self.plan.prompt_ids().tolist(), *self.node.completion.ids]

    def continues(self, other: Said) -> bool:
        """Whether this prompt begins with all of the other call's tokens, the sampled ones as they were sampled."""
        return self.plan.base is other.node and self.ids[: len(other.ids)] == other.ids


@dataclass
class Talk:
    """One execution of a harness that speaks `kind`."""

    chat: ChatModel
    kind: str
    forest: Forest = field(init=False)
    relabelled: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forest = Forest(self.chat)

    def say(self, body: dict[str, Any], answer: str, headers: dict[str, str] | None = None, **how: Any) -> Said:
        """One call with a scripted answer, in ids that the tokenizer would not choose."""
        dialect = DIALECTS[self.kind]
        request = dialect.read(json.dumps(body).encode())
        call = f"0000-{len(self.forest.calls)}"
        plan = self.forest.plan(call, request.conversation, hints_of(headers or {}, request.model))
        self.relabelled |= {r.call: r.label for r in plan.relabels}
        completion = spelled(self.chat, answer, ended=how.get("ended", True))
        parsed = self.chat.parse(completion.ids, call, request.conversation.tools)
        finish = "stop" if how.get("ended", True) else "length"
        node = self.forest.finished(
            call, plan, completion, parsed.spoken, finish, reasoning_tokens=parsed.reasoning_tokens
        )
        reply = Reply(
            call=call,
            created=0,
            model=request.model,
            text=node.spoken.text,
            calls=node.spoken.calls,
            finish="tool_calls" if node.spoken.calls and finish == "stop" else finish,
            prompt_tokens=node.prompt_tokens,
            completion_tokens=len(completion.ids),
            reasoning=node.spoken.reasoning,
            reasoning_tokens=node.reasoning_tokens,
        )
        written = dialect.write(reply, request)
        body_out = json.loads(written.body) if written.content_type == "application/json" else written.body.decode()
        return Said(plan, node, body_out)


def tool(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
