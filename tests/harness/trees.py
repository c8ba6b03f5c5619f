"""The trees that plays leave: step -> (label, step whose history it continues, step that called its agent)."""

from __future__ import annotations

Tree = dict[str, tuple[str, str, str]]


def line(*steps: str, above: str = "-", label: str = "main", by: str = "-") -> Tree:
    """Each continues the one before, the first `above` ("-": it begins a history)."""
    return {step: (label, before, by) for step, before in zip(steps, (above, *steps), strict=False)}


def agent(name: str, by: str, *steps: str, above: str = "-") -> Tree:
    """A sub-agent that the step `by` called: by default one that works and reports."""
    return line(*(steps or (f"{name} works", f"{name} reports")), above=above, label="sub-agent", by=by)


def whole(*calls: str, summary: str = "-", second_root: str = "") -> Tree:
    """That of `mind.plan`: `calls` are the main agent's steps about agents a, b (of the first) and c (of the last but
    as many as there are). `summary`: what the request for one continues. `second_root`: a later step which begins a
    history once more.
    """
    first, last = calls[0], next(c for c in calls if c.startswith("calls c"))
    after = ("loses its engine", "loses proxyd", "writes", "ends")
    cut = after.index(second_root) if second_root else len(after)
    return {
        **line("begins", "is moved", *calls, "is cut", "fills 1", "fills 2", "is held"),
        **agent("a", first),
        **agent("b", first),
        **agent("c", last),
        **line("summary", above=summary, label="main-summary"),
        **line(*after[:cut]),
        **line(*after[cut:]),
    }
