"""Peak memory and CPU time of one linear run, forward and backward: `python -m bench.celld_rig.long_run TOKENS PIECE`.

A process per figure, since a peak can't be taken back. PIECE 0 computes the whole at once. Prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from bench.celld_rig import trees
from celld.tiny.model import TinyConfig

# Attention's time grows with the square: few and small heads keep 64 k tokens at a minute.
MODEL = TinyConfig(
    vocab_size=992,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=1 << 17,
)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    tokens, piece = map(int, sys.argv[1:])
    policy = trees.policy_of(MODEL)
    trees.forward_backward(policy, [trees.plain_row(64)])  # what libraries allocate once
    policy.piece_tokens = piece
    row = trees.plain_row(tokens)
    before, began = peak_bytes(), time.process_time()
    trees.forward_backward(policy, [row])
    cpu_s = time.process_time() - began
    print(json.dumps({"bytes": peak_bytes() - before, "cpu_s": cpu_s, "norm": float(policy.gradient.norm())}))


if __name__ == "__main__":
    main()
