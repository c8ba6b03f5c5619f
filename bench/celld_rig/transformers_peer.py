"""The same model in transformers, in an interpreter of its own: `python transformers_peer.py MODEL_DIR`.

Each line on stdin is one JSON job; each line on stdout answers with its CPU seconds on one thread.
{"job": "step", "rows": [[ids]]} is a train step over all tokens; {"job": "generate", "rows": [[ids]], "new": n} samples
n tokens per row.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers


def step(model: Any, optimizer: torch.optim.Optimizer, rows_BT: torch.Tensor) -> None:
    """Mean cross-entropy of every next token, clip, AdamW."""
    optimizer.zero_grad()
    logits_BTV = model(input_ids=rows_BT, use_cache=False).logits[:, :-1]
    loss: Any = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), rows_BT[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def generate(model: Any, rows_BT: torch.Tensor, new: int) -> None:
    """transformers' own batched sampling, exactly `new` tokens per row."""
    mask_BT = torch.ones_like(rows_BT)
    made = model.generate(
        input_ids=rows_BT, attention_mask=mask_BT, do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new
    )
    assert made.shape[1] == rows_BT.shape[1] + new, made.shape


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        rows_BT = torch.tensor(job["rows"])
        began = time.process_time()
        if job["job"] == "step":
            step(model, optimizer, rows_BT)
        else:
            generate(model, rows_BT, job["new"])
        print(json.dumps({"cpu_s": time.process_time() - began}), flush=True)


if __name__ == "__main__":
    main()
