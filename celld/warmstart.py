"""Supervised warm start: next-token training of a fresh TinyQwen3 on transcripts of token ids.

Owns one short run from random weights to a Hugging Face directory. Never renders or tokenises (its input is ids), never
samples. The learning rate is held until the validation loss stops falling near the floor that the transcripts state,
then decays to a tenth, then the run ends: so what it writes stands at its validation plateau, or says that the step
limit came first. A flat stretch far above the floor is not taken for the end. Transcripts are taken in file order, so a
curriculum is the writer's affair. The same input, seed and thread count give the same weights.

Input: JSON lines {"ids": [int, ...], "mask": [0 or 1, ...], "nats": float}; a token is learned where mask is 1; nats is
the part of the line's loss that no model can avoid (the writer's own choices; 0 if unknown).
Output: config.json, model.safetensors, tokenizer files if given, warmstart.json (figures). Progress goes to stderr.

    python -m celld.warmstart --train T.jsonl --validation V.jsonl --out DIR [--tokenizer DIR] [--seed 7] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from celld.tiny.model import TinyConfig, TinyQwen3, save


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """One supervised run; step counts are optimizer steps."""

    seed: int = 7
    learning_rate: float = 3e-3  # held, after a short rise; 0.5 M parameters bear it
    final_share: float = 0.1  # of learning_rate, at the end of the decay
    rise_steps: int = 20
    decay_steps: int = 80
    max_steps: int = 390  # decay included; one pass over the transcripts, whose order matters
    batch_rows: int = 16
    evaluate_every_steps: int = 20
    near_floor: float = 1.1  # times the floor: only below this is a flat stretch the plateau
    patience: int = 3  # evaluations without an improvement of min_gain before the decay starts
    min_gain: float = 0.01  # relative fall of the validation loss that counts as progress
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0


@dataclass(frozen=True)
class Transcript:
    """Token ids of one line and where the model is to learn."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    nats: float = 0.0


@dataclass(frozen=True)
class Figures:
    """What came of a run, as written to warmstart.json; losses are nats per learned token."""

    steps: int
    tokens: int
    wall_s: float
    cpu_s: float
    validation_loss: float
    validation_floor: float
    validation_curve: list[tuple[int, float]]
    reached_plateau: bool
    parameters: int
    config: WarmStartConfig


def read_transcripts(path: Path) -> list[Transcript]:
    """All lines of a transcript file; a malformed line is an error that names it."""
    found = []
    with path.open() as file:
        for number, text in enumerate(file, start=1):
            line = json.loads(text)
            if len(line["ids"]) != len(line["mask"]) or not any(line["mask"]):
                raise ValueError(f"{path}:{number}: mask must be as long as ids and not empty")
            found.append(Transcript(tuple(line["ids"]), tuple(line["mask"]), float(line.get("nats", 0.0))))
    if not found:
        raise ValueError(f"{path}: no transcripts")
    return found


def batches(transcripts: Sequence[Transcript], rows: int, seed: int) -> Iterator[list[Transcript]]:
    """Endless batches, shuffled within windows of 16 batches in file order.

    Not sorted by length, though that would save padding: length tells the kind of line, and a batch of one kind makes
    the model forget the others for a while (the validation loss then jumps).
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        for start in range(0, len(transcripts), rows * 16):
            window = transcripts[start : start + rows * 16]
            order = torch.randperm(len(window), generator=generator).tolist()
            for first in range(0, len(order), rows):
                yield [window[place] for place in order[first : first + rows]]


def tensors(rows: Sequence[Transcript]) -> tuple[Tensor, Tensor]:
    """Right-padded ids [B, T] and the mask [B, T] as bool; pad is id 0, masked out and after all real tokens."""
    width = max(len(row.ids) for row in rows)
    ids_BT = torch.tensor([row.ids + (0,) * (width - len(row.ids)) for row in rows])
    mask_BT = torch.tensor([row.mask + (0,) * (width - len(row.mask)) for row in rows], dtype=torch.bool)
    return ids_BT, mask_BT


def loss_sum(model: TinyQwen3, rows: Sequence[Transcript]) -> tuple[Tensor, int]:
    """Summed negative log-likelihood (nats) of the learned tokens, and their number."""
    ids_BT, mask_BT = tensors(rows)
    wanted = mask_BT[:, 1:]
    hidden = model.hidden(ids_BT[:, :-1])[wanted]  # the vocabulary is wide: only score what is learned
    return F.cross_entropy(model.logits(hidden), ids_BT[:, 1:][wanted], reduction="sum"), int(wanted.sum())


@torch.no_grad()
def validation_loss(model: TinyQwen3, transcripts: Sequence[Transcript], rows: int = 64) -> float:
    """Mean negative log-likelihood per learned token."""
    ordered = sorted(transcripts, key=lambda transcript: len(transcript.ids))
    parts = [loss_sum(model, ordered[start : start + rows]) for start in range(0, len(ordered), rows)]
    return float(sum(part.item() for part, _ in parts)) / sum(count for _, count in parts)


def floor(transcripts: Sequence[Transcript]) -> float:
    """The validation loss of a perfect student, in nats per learned token."""
    return sum(transcript.nats for transcript in transcripts) / sum(sum(transcript.mask) for transcript in transcripts)


class Plateau:
    """Says when a falling figure has stopped falling, and is at most `ceiling` (infinity: wherever)."""

    def __init__(self, patience: int, min_gain: float, ceiling: float = math.inf) -> None:
        self.patience, self.min_gain, self.ceiling = patience, min_gain, ceiling
        self.best, self.since = float("inf"), 0

    def reached(self, loss: float) -> bool:
        if loss < self.best * (1 - self.min_gain):
            self.best, self.since = loss, 0
        else:
            self.since += 1
        return self.since >= self.patience and self.best <= self.ceiling


def learning_rate(config: WarmStartConfig, step: int, decay_from: int | None) -> float:
    """Rate of optimizer step `step` (from 0); `decay_from` is None while the plateau isn't reached."""
    rate = config.learning_rate * min(1.0, (step + 1) / config.rise_steps)
    if decay_from is None:
        return rate
    passed = min(1.0, (step - decay_from + 1) / config.decay_steps)
    return rate * (1 - passed * (1 - config.final_share))


def fit(
    model: TinyQwen3,
    train: Sequence[Transcript],
    validation: Sequence[Transcript],
    config: WarmStartConfig,
    report: Callable[[dict[str, float]], None],
) -> Figures:
    """Train in place until plateau and decay are through, or max_steps."""
    started, cpu_started = time.monotonic(), time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), betas=config.betas, weight_decay=config.weight_decay, fused=True)
    lowest = floor(validation)
    plateau = Plateau(config.patience, config.min_gain, ceiling=lowest * config.near_floor if lowest else math.inf)
    source = batches(train, config.batch_rows, config.seed)
    curve: list[tuple[int, float]] = []
    reached, decay_from, tokens, step = False, None, 0, 0
    while step < config.max_steps and (decay_from is None or step < decay_from + config.decay_steps):
        rows = next(source)
        rate = learning_rate(config, step, decay_from)
        optimizer.param_groups[0]["lr"] = rate
        loss, count = loss_sum(model, rows)
        optimizer.zero_grad(set_to_none=True)
        (loss / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        step, tokens = step + 1, tokens + sum(len(row.ids) for row in rows)
        if step % config.evaluate_every_steps == 0:
            held = validation_loss(model, validation)
            curve.append((step, held))
            report({"step": step, "loss": loss.item() / count, "validation_loss": held, "learning_rate": rate})
            reached = reached or plateau.reached(held)
            if decay_from is None and (reached or step + config.decay_steps >= config.max_steps):
                decay_from = step
    return Figures(
        steps=step,
        tokens=tokens,
        wall_s=time.monotonic() - started,
        cpu_s=time.process_time() - cpu_started,
        validation_loss=validation_loss(model, validation),
        validation_floor=lowest,
        validation_curve=curve,
        reached_plateau=reached,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        config=config,
    )


def warm_start(
    train: Path,
    validation: Path,
    out: Path,
    shape: TinyConfig,
    config: WarmStartConfig,
    tokenizer: Path | None = None,
) -> Figures:
    """Files in, a Hugging Face directory out."""
    torch.manual_seed(config.seed)
    model = TinyQwen3(shape).initialise(config.seed)
    figures = fit(model, read_transcripts(train), read_transcripts(validation), config, _progress)
    save(model, out)
    for file in sorted(tokenizer.iterdir()) if tokenizer else ():
        shutil.copyfile(file, out / file.name)
    (out / "warmstart.json").write_text(json.dumps(asdict(figures), indent=2) + "\n")
    return figures


def _progress(figures: dict[str, float]) -> None:
    print(json.dumps({key: round(value, 6) for key, value in figures.items()}), file=sys.stderr, flush=True)


def shape_for(tokenizer: Path | None, shape: TinyConfig) -> TinyConfig:
    """`shape` with the tokenizer's vocabulary, rounded up to a multiple of 32, and its end and pad ids."""
    if tokenizer is None:
        return shape
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    ids = {**content["model"]["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
    named = json.loads((tokenizer / "tokenizer_config.json").read_text())
    return replace(
        shape,
        vocab_size=-(-(max(ids.values()) + 1) // 32) * 32,
        eos_token_id=ids[named["eos_token"]],
        pad_token_id=ids[named["pad_token"]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="copied into the output; sets vocabulary size and end id")
    parser.add_argument("--seed", type=int, default=WarmStartConfig.seed)
    parser.add_argument("--max-steps", type=int, default=WarmStartConfig.max_steps)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = shape_for(args.tokenizer, TinyConfig())
    config = WarmStartConfig(seed=args.seed, max_steps=args.max_steps)
    figures = warm_start(args.train, args.validation, args.out, shape, config, args.tokenizer)
    print(json.dumps({"steps": figures.steps, "validation_loss": figures.validation_loss, "out": str(args.out)}))


if __name__ == "__main__":
    main()
