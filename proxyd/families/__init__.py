"""Model families: how a model marks its thinking and writes tool calls, and a template that only ever appends.

One small file per family; `FAMILIES` is the registry, most particular first. A model's own template is used wherever
its proof holds (chat.py); a family may bring a variant for those whose template rewrites the past.
"""

from __future__ import annotations

from proxyd.families import chatml, qwen3, qwen3_coder
from proxyd.families.family import Family

FAMILIES: tuple[Family, ...] = (qwen3_coder.FAMILY, qwen3.FAMILY, chatml.FAMILY)


def family_of(template: str, name: str = "auto") -> Family:
    """The family of that name, or the first that knows this template. Raises ValueError for an unknown name."""
    for family in FAMILIES:
        if family.name == name or (name == "auto" and family.knows(template)):
            return family
    raise ValueError(f"no model family is called {name!r}: {', '.join(f.name for f in FAMILIES)}, or auto")
