"""The shipped gyre.toml fits the tasks, the tokenizer and the harness beside it."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import harness
import make_tasks
import pytest
import teacher
from rendering import Renderer

from gyre_base.config import Config, load
from tests.quickstart.conftest import QUICKSTART

RENDERER = Renderer()


@pytest.fixture(scope="module")
def config() -> Config:
    return load(QUICKSTART / "gyre.toml")


def lines_of(task: dict[str, Any], config: Config) -> dict[str, list[tuple[int, int]]]:
    """Per kind of line, the (prompt, answer) tokens of each call, with the teacher as the model."""
    env = config.tasks.harness_env
    limits = harness.Limits(int(env["HARNESS_CONTEXT_BUDGET"]), int(env["HARNESS_MAX_TURNS"]))
    model = teacher.Teacher(random.Random(0), teacher.candidates(make_tasks.SEED))
    conversation = harness.agent(task["instruction"], teacher.MemoryWorkspace(task["workspace"]), limits)
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    label, messages, tools = next(conversation)
    while True:
        answer = model.answer(label, messages)
        ids, _ = RENDERER.transcript([*messages, answer], tools)
        sampled = len(RENDERER.encode(RENDERER.completion_text(answer)))
        calls[label].append((len(ids) - sampled, sampled))
        try:
            label, messages, tools = conversation.send((answer, len(ids)))
        except StopIteration:
            return calls


def test_the_budget_separates_the_kinds_of_task(config: Config) -> None:
    lines = (QUICKSTART / "tasks" / "heldout.jsonl").read_text().splitlines()
    for text in lines[:40]:
        task = json.loads(text)
        kind = task["id"].rsplit("-", 1)[1]
        assert {label: len(made) for label, made in lines_of(task, config).items()} == {
            "plain": {"main": 3},
            "delegate": {"main": 2, "sub": 2},
            "long": {"main": 5, "main-summary": 1},
        }[kind]


def test_a_fluent_model_stays_within_the_token_limits(config: Config) -> None:
    lines = (QUICKSTART / "tasks" / "train.jsonl").read_text().splitlines()
    for text in lines[:40]:
        made = [call for calls in lines_of(json.loads(text), config).values() for call in calls]
        assert max(prompt + sampled for prompt, sampled in made) < config.engine.context_length / 2
        assert max(sampled for _, sampled in made) < config.rollout.max_new_tokens / 2
        assert sum(sampled for _, sampled in made) < 120


def test_a_batch_is_64_executions_and_the_tasks_last_the_run(config: Config) -> None:
    scheduler = config.scheduler
    assert scheduler.groups_per_batch * scheduler.group_size == 64
    tasks = (QUICKSTART / "tasks" / "train.jsonl").read_text().splitlines()
    assert len(tasks) >= scheduler.steps * scheduler.groups_per_batch
