"""Which family a model is of: guessed from its template, or named by `model.family` where that says too little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_base import config as configuration
from gyre_base.config import ConfigError
from proxyd.chat import ChatModel
from proxyd.daemon import load_chat
from proxyd.families import FAMILIES, UnknownFamily, family_of
from tests.proxyd.tokens import SPECIAL, TEMPLATE, write_tokenizer

THOUGHT = "<think>\nHm.\n</think>\n\nI look."
CALLS = {
    "qwen3": '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>",
    "chatml": '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose template mentions neither thinking nor tool calls."""
    return write_tokenizer(tmp_path, TEMPLATE, (*SPECIAL, "<think>", "</think>"))


def load(folder: Path, family: str) -> ChatModel:
    return load_chat(configuration.from_tree({"model": {"tokenizer": str(folder), "family": family}}))[0]


@pytest.mark.parametrize("family", [f.name for f in FAMILIES])
def test_the_configuration_decides_where_a_template_says_nothing(folder: Path, family: str) -> None:
    model = load(folder, family)
    assert model.family.name == family
    said = model.parse([*model.encode(f"{THOUGHT}\n{CALLS[family]}"), model.end_id], "c").spoken
    (call,) = said.calls
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": "b"})
    thinks = model.family.think is not None
    assert (said.reasoning, said.text) == (("Hm.", "I look.") if thinks else ("", THOUGHT))


def test_the_guess_is_wrong_there_and_the_call_is_lost(folder: Path) -> None:
    """What the key is for."""
    model = load(folder, "auto")
    assert model.family.name == "chatml"
    said = model.parse([*model.encode(CALLS["qwen3-coder"]), model.end_id], "c").spoken
    assert not said.calls


@pytest.mark.parametrize(("wrong", "hint"), [("qwen-3", "; did you mean qwen3?"), ("Llama", "$")])
def test_an_unknown_family_names_those_that_are(folder: Path, wrong: str, hint: str) -> None:
    known = f"no model family is called {wrong!r}. Known: qwen3-coder, qwen3, chatml, auto{hint}"
    with pytest.raises(UnknownFamily, match=known.replace("?", r"\?")):
        family_of("", wrong)
    with pytest.raises(ConfigError, match="^model.family: " + known.replace("?", r"\?")):
        load(folder, wrong)
