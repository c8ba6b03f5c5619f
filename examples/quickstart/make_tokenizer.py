"""Train the quickstart's tokenizer on rendered transcripts; the same seed gives the same file.

A byte-level BPE whose merges may cross words, so the fixed text of prompts and tool calls costs few tokens. Digits,
each step of a specification and each string operation stand alone: what a model must read or choose is one token.

    python examples/quickstart/make_tokenizer.py [--vocab 1024]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import make_tasks
import teacher
from rendering import FOLDER, Renderer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
VOCABULARY = 1024  # an upper bound: the corpus has fewer merges that occur twice
ALONE = r"\n- [^\n]+|\[[-:0-9]+\]|\.[a-z]+\(\)|[0-9]"


def corpus(seed: int, count: int = 400) -> list[str]:
    """Rendered transcripts, cut at the special tokens as the tokenizer cuts them."""
    renderer = Renderer()
    texts = []
    for lines in teacher.transcripts(seed, "tokenizer", count):
        for line in lines:
            text = renderer.text(line.messages, line.tools, False)
            for special in SPECIAL:
                text = text.replace(special, "\0")
            texts += [piece for piece in text.split("\0") if piece]
    texts += [f"\n- {phrase}" for operation in make_tasks.OPERATIONS for phrase in operation.phrases] * 50
    random.Random(seed).shuffle(texts)
    return texts


def train(seed: int, vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(ALONE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=VOCABULARY)
    args = parser.parse_args()
    save(train(args.seed, args.vocab), FOLDER)


if __name__ == "__main__":
    main()
