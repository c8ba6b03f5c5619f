"""The run file `gyre.run/1`: a record per line of JSON or per frame. proxyd writes it; trajd and trajtools read it.

The public names of four modules: `runrecords` (what is recorded), `runcodec` (lines), `runpacked` (frames),
`runreader` (files, damaged or growing). Decides nothing about training. Format: docs, "Run file".
"""

from gyre_base.runcodec import BadRecord, CallWriter, RunFileError, decode, encode
from gyre_base.runmend import repair_tail
from gyre_base.runpacked import framed, record_frame
from gyre_base.runreader import Bad, Located, ReadReport, RunReader, read_run
from gyre_base.runrecords import (
    LABELS,
    LOGPROB_MAX,
    NO_IDS,
    SCHEMA,
    Agent,
    Attempt,
    Call,
    ExecEnd,
    ExecStart,
    Ids,
    Intent,
    Logprobs,
    Note,
    Record,
    Reward,
    RunHeader,
    Sampling,
    Span,
    common_prefix,
    context_digest,
    trainable_mask,
)

__all__ = [
    "LABELS",
    "LOGPROB_MAX",
    "NO_IDS",
    "SCHEMA",
    "Agent",
    "Attempt",
    "Bad",
    "BadRecord",
    "Call",
    "CallWriter",
    "ExecEnd",
    "ExecStart",
    "Ids",
    "Intent",
    "Located",
    "Logprobs",
    "Note",
    "ReadReport",
    "Record",
    "Reward",
    "RunFileError",
    "RunHeader",
    "RunReader",
    "Sampling",
    "Span",
    "common_prefix",
    "context_digest",
    "decode",
    "encode",
    "framed",
    "read_run",
    "record_frame",
    "repair_tail",
    "trainable_mask",
]
