"""Builders of calls and forests for the tests of this folder."""

from __future__ import annotations

import numpy as np

from gyre_base.runfile import Call


def make_call(name="c0", prompt=(1, 2, 3), completion=(4, 5), logprobs="auto", execution="e", **kw):
    """A call with made-up logprobs unless they are given."""
    if isinstance(logprobs, str):
        logprobs = -0.5 * np.arange(1, len(completion) + 1)
    return Call(
        exec=execution,
        call=name,
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        **kw,
    )
