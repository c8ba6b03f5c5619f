"""transformers' side of test_transformers.py, in an interpreter of its own: `transformers_peer.py make|same FOLDER`.

make: random models under FOLDER/KIND, as transformers saves them, and their logits for fixed ids. same: prints, per
KIND, whether FOLDER/KIND and FOLDER/KIND-back hold the same bits once loaded.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
KINDS = {
    "tied": transformers.Qwen3Config(**SMALL, tie_word_embeddings=True),
    "untied": transformers.Qwen3Config(**SMALL, tie_word_embeddings=False),
    "experts": transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=True),
    "plain-experts": transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=False),
}


@torch.no_grad()
def make(folder: Path) -> None:
    """Norms are not all one: a swapped norm would else go unseen."""
    torch.manual_seed(0)
    for kind, config in KINDS.items():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
        model.save_pretrained(folder / kind)
        ids = torch.randint(0, SMALL["vocab_size"], (1, 70))
        save_file({"ids": ids, "logits": model(ids).logits[0]}, folder / kind / "answer.safetensors")


def same(folder: Path) -> None:
    """Loaded from what we saved, every tensor of the model has the bits of the original."""
    for kind in KINDS:
        first, back = (
            transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).state_dict()
            for name in (kind, f"{kind}-back")
        )
        equal = list(first) == list(back) and all(torch.equal(first[name], back[name]) for name in first)
        print(json.dumps({"kind": kind, "tensors": len(first), "equal": equal}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    {"make": make, "same": same}[sys.argv[1]](Path(sys.argv[2]))
