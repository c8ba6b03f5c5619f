"""A chat template as transformers compiles it: sandboxed, with the helpers that templates of models use."""

from __future__ import annotations

import datetime
import json
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefused(ValueError):
    """A tokenizer or template that can't be rendered unit by unit; says what to change."""


def compile_template(template: str) -> Any:
    """Raises jinja2.TemplateError."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.date.today().strftime(form)
    return environment.from_string(template)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent
    )  # as transformers does: no HTML escapes, no sorting


def _raise(message: str) -> None:
    raise TemplateError(message)
