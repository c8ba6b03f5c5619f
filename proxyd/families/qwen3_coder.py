"""Qwen3-Coder: no thinking, tool calls as XML (function, parameter)."""

from __future__ import annotations

from proxyd.families.family import Family
from proxyd.xml_calls import xml_calls

FAMILY = Family(
    name="qwen3-coder",
    knows=lambda template: "<tool_call>" in template and "<function=" in template,
    calls=xml_calls,
)
