"""Weights and logits against transformers itself, which lives in an environment of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.celld_rig.trees import plain_row
from celld.trainer import tree
from celld.trainer.model import Policy, read_config, read_tensors
from celld.weights import hf_files, write_directory

PYTHON = os.environ.get("GYRE_TRANSFORMERS_PYTHON") or os.environ.get("GYRE_SGLANG_PYTHON")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="GYRE_TRANSFORMERS_PYTHON names no interpreter that has transformers"),
    pytest.mark.timeout(300),
]
KINDS = ("tied", "untied", "experts", "plain-experts")


def peer(word: str, folder: Path) -> str:
    script = Path(__file__).with_name("transformers_peer.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, str(script), word, str(folder)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("transformers")
    peer("make", path)
    return path


def test_weights_go_through_the_trainer_bit_for_bit_and_logits_are_transformers(folder, policy):
    """`policy`: the process group is up. Dense logits differ by nothing; experts are summed in another order."""
    for kind in KINDS:
        config = read_config(folder / kind)
        mine = Policy(config)
        mine.load(read_tensors(folder / kind))
        answer = load_file(folder / kind / "answer.safetensors")
        ids = answer["ids"][0]
        count = len(ids)
        row = dataclasses.replace(tree.plan([plain_row(count, vocab=config["vocab_size"])]), tokens_T=ids)
        with torch.no_grad():
            logits = mine.logits(row, torch.arange(count))
        tolerance = 2e-6 * float(answer["logits"].abs().max())
        print(kind, "worst difference", float((logits - answer["logits"]).abs().max()))
        torch.testing.assert_close(logits, answer["logits"], rtol=0, atol=tolerance)
        write_directory(folder / f"{kind}-back", hf_files(mine.hf_arrays(), config))
    results = [json.loads(line) for line in peer("same", folder).splitlines()]
    assert [(r["kind"], r["equal"]) for r in results] == [(kind, True) for kind in KINDS]
    assert all(r["tensors"] > 20 for r in results)
