"""Model families: how a model marks its thinking and writes tool calls, and a template that only ever appends.

One small file per family; `FAMILIES` is the registry, most particular first. A model's own template is used wherever
its proof holds (chat.py); a family may bring a variant for those whose template rewrites the past. The family is
guessed from the template unless `model.family` names it: a template need not mention what the model was trained to say.
"""

from __future__ import annotations

import difflib

from proxyd.families import chatml, qwen3, qwen3_coder
from proxyd.families.family import Family

FAMILIES: tuple[Family, ...] = (qwen3_coder.FAMILY, qwen3.FAMILY, chatml.FAMILY)


class UnknownFamily(ValueError):
    """No family has this name; names those that are, and the likeliest."""


def family_of(template: str, name: str = "auto") -> Family:
    """The family of that name, or the first that knows this template. Raises UnknownFamily."""
    for family in FAMILIES:
        if family.name == name or (name == "auto" and family.knows(template)):
            return family
    names = [*(f.name for f in FAMILIES), "auto"]
    near = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UnknownFamily(f"no model family is called {name!r}. Known: {', '.join(names)}{hint}")
