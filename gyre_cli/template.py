"""The commented gyre.toml that `gyre init` writes: made from the configuration tree, so it can't fall behind it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from typing import Any

from gyre_base import config as configuration

HEAD = """\
# gyre.toml: every key with its default; a comment says what the number trades. Units come last in names.
# Relative paths are relative to this file. `gyre up --config gyre.toml` starts a run on this machine,
# `gyre submit` on a Slurm cluster.
"""


def commented(chosen: dict[str, Any] | None = None) -> str:
    """The whole file. Every key is commented out where it has its default, so the file says what was changed: the
    `chosen` values by dotted key.
    """
    chosen = chosen or {}
    parts = [HEAD]
    for section in dataclasses.fields(configuration.Config):
        cls = type(getattr(configuration.Config(), section.name))
        parts.append(f"\n[{section.name}]  # {inspect.getdoc(cls)}\n")
        comments = _comments(cls)
        for spec in dataclasses.fields(cls):
            dotted = f"{section.name}.{spec.name}"
            value = _toml(chosen.get(dotted, getattr(cls(), spec.name)))
            comment = f"  # {comments[spec.name]}" if comments.get(spec.name) else ""
            parts.append(f"{'' if dotted in chosen else '# '}{spec.name} = {value}{comment}\n")
    return "".join(parts)


def _comments(cls: type) -> dict[str, str]:
    """Trailing comments of a dataclass's fields, from its source."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    out = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _, _, comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")
            out[node.target.id] = comment
    return out


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value))
    if isinstance(value, dict):
        return "{}"
    return json.dumps(value)
