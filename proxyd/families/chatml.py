"""Anything else: no thinking, tool calls as JSON in tags. The quickstart's model and the tests' are of this kind."""

from __future__ import annotations

from proxyd.families.family import Family
from proxyd.parsers import hermes

FAMILY = Family(name="chatml", knows=lambda template: True, calls=hermes)
