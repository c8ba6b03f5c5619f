"""What a family is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxyd.parsers import Parser


@dataclass(frozen=True, kw_only=True)
class Family:
    """`knows` tells from a template whether the model is of this family."""

    name: str
    knows: Callable[[str], bool]
    calls: Parser  # text after the thinking -> content and tool calls
    think: tuple[str, str] | None = None  # tags around the reasoning
    variant: str | None = None  # an append-only template, for models whose own is not
