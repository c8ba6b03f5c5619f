"""Peak memory and CPU time of one linear run, forward and backward:
`python -m bench.celld_rig.long_run TOKENS PIECE RANK RANKS FILE`.

A process per figure, since a peak can't be taken back. PIECE 0 computes the whole at once. RANK of RANKS processes,
which meet at FILE, computes its part of the tokens. Prints one JSON object. `alone` and `together` start them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time

from torch.distributed import FileStore  # type: ignore[attr-defined]

from bench.celld_rig import trees
from celld.tiny.model import TinyConfig
from celld.trainer import cpu

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


def alone(tokens: int, piece: int) -> dict[str, float]:
    """What one process says that has all tokens: its bytes, cpu_s and the norm of the gradient."""
    return together(tokens, piece, ranks=1)[0]


def together(tokens: int, piece: int, *, ranks: int) -> list[dict[str, float]]:
    """What each of `ranks` processes says. Raises RuntimeError if one fails.

    Large blocks go back to the system as they are freed: the figure is of what is in use. Else glibc's heap keeps holes
    of the sizes that every row of attention has anew, and 64 k tokens peak at three times as much.
    """
    command = [sys.executable, "-W", "ignore", "-m", "bench.celld_rig.long_run", str(tokens), str(piece)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        running = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), f"{folder}/meet"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        said = [each.communicate() for each in running]
    for each, (_, error) in zip(running, said, strict=True):
        if each.returncode:
            raise RuntimeError(error[-500:])
    answers: list[dict[str, float]] = [json.loads(printed) for printed, _ in said]
    return answers


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    tokens, piece, rank, ranks = map(int, sys.argv[1:5])
    cpu.start_parallel(cp=ranks, rank=rank, store=FileStore(sys.argv[5], ranks))
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
