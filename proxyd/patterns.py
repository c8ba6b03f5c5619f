"""The last resort of labelling: wordings of known harness versions. Structure and headers are asked first.

A wrong pattern mislabels, a missing one only makes a label late: the next call, which quotes the summary, settles it.
"""

from __future__ import annotations

import re

SUMMARY_ORDERS: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...] = (
    # harness and version -> the text block that orders a summary: text only, no tools
    (re.compile(r"claude-cli/2\.1\."), re.compile(r"\bTEXT ONLY\b.*\bsummar", re.IGNORECASE | re.DOTALL)),
)


def worded_as_summary(tool: str, last_block: str) -> bool:
    """Whether the last user block of a request is that version's order to write a summary."""
    return any(v.search(tool) and order.search(last_block[:4000]) for v, order in SUMMARY_ORDERS)
