"""Tool calls as Qwen3-Coder writes them: <function=NAME><parameter=KEY>value</parameter></function> in call tags.

Values are text; the tool's schema says what they are. A value that is not what the schema wants stays text, as the
model wrote it: the tool's own error is the answer to that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from proxyd.conversation import ToolCall
from proxyd.parsers import CLOSE, OPEN, Parsed, issued_id, split_calls

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
__all__ = ["CLOSE", "OPEN", "xml_calls"]


def xml_calls(text: str, call: str, tools: bytes = b"") -> Parsed:
    """Content and calls; what is not well formed stays content."""
    schemas: dict[str, Mapping[str, Any]] | None = None

    def one(body: str, place: int) -> ToolCall | None:
        nonlocal schemas
        found = _FUNCTION.fullmatch(body)
        if found is None:
            return None
        if schemas is None:
            schemas = _schemas(tools)
        name, inside = found.group(1).strip(), found.group(2)
        if _PARAMETER.sub("", inside).strip():
            return None
        known = schemas.get(name, {})
        made = {key.strip(): _typed(value, known.get(key.strip())) for key, value in _PARAMETER.findall(inside)}
        return ToolCall(issued_id(call, place), name, orjson.dumps(made).decode())

    return split_calls(text, one)


def _schemas(tools: bytes) -> dict[str, Mapping[str, Any]]:
    """Tool name -> its properties."""
    out: dict[str, Mapping[str, Any]] = {}
    for tool in orjson.loads(tools) if tools else []:
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(function.get("name"), str) and isinstance(properties, dict):
            out[function["name"]] = properties
    return out


def _typed(value: str, schema: Any) -> Any:
    """A parameter's text as the JSON value that its schema names; text if there is no schema or it does not fit."""
    wanted = schema.get("type") if isinstance(schema, dict) else None
    kinds = wanted if isinstance(wanted, list) else [wanted]
    if "string" in kinds or not isinstance(schema, dict):
        return value
    try:
        return orjson.loads(value.strip())
    except orjson.JSONDecodeError:
        lowered = value.strip().lower()
        return {"true": True, "false": False, "none": None}.get(lowered, value)
