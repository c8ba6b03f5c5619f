"""Recordings as one Arrow or Parquet table of calls in delta form. Needs pyarrow (`pip install gyre-rl[arrow]`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trajtools.recording import Recording


def write_table(recording: Recording, out: Path, form: str) -> int:
    """A row per call: the prompt is `keep` tokens of base's prompt + completion, then `prompt_ids`. Returns bytes."""
    from trajtools.conversion import CannotWrite

    try:
        import pyarrow as pa
        from pyarrow import feather, parquet
    except ImportError:
        raise CannotWrite(f"{form} needs pyarrow: pip install 'gyre-rl[arrow]'") from None
    if any(e.level == "text" for e in recording.executions.values()):
        raise CannotWrite(f"{form} holds token ids, and this record has none: write a run file or ATIF")
    table = pa.table(_columns(recording, pa))
    part = out.with_name(out.name + ".part")
    if form == "parquet":
        parquet.write_table(table, part, compression="zstd", use_dictionary=False)
    else:
        feather.write_feather(table, str(part), compression="zstd")
    part.replace(out)
    return out.stat().st_size


def _columns(recording: Recording, pa: Any) -> dict[str, Any]:
    rows: dict[str, list[Any]] = {}
    for name in sorted(recording.executions):
        execution = recording.executions[name]
        reward = execution.reward
        for call, base, keep in execution.calls():
            row = {
                "execution": name, "group": execution.group, "call": call.call, "agent": call.agent.id,
                "label": call.label, "t0": call.t0, "t1": call.t1, "finish": call.finish, "base": base, "keep": keep,
                "outcome": reward.status if reward else None, "score": reward.value if reward else None,
                "prompt_ids": np.asarray(call.prompt_ids[keep:], np.int32),
                "completion_ids": np.asarray(call.completion_ids, np.int32), "logprobs": call.logprobs,
            }  # fmt: skip
            for key, value in row.items():
                rows.setdefault(key, []).append(value)
    kinds = {
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
    }
    return {key: pa.array(values, kinds.get(key)) for key, values in rows.items()}
