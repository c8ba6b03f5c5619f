"""What evaluators may leave: every file gives a finite number, `nothing to score`, or a reason."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_exec.score import BadScore, Reading, read_junit, read_reward, read_score

PYTEST_XML = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests">
<testsuite name="pytest" errors="1" failures="1" skipped="1" tests="4" time="0.05">
<testcase classname="test_a" name="test_good" time="0.001" />
<testcase classname="test_a" name="test_bad"><failure message="assert 1 == 2">x</failure></testcase>
<testcase classname="test_a" name="test_no"><skipped type="pytest.skip" message="later">x</skipped></testcase>
<testcase classname="" name="test_b"><error message="collection failure">ImportError</error></testcase>
</testsuite></testsuites>"""


def test_a_junit_report_is_the_share_that_passed(tmp_path: Path) -> None:
    (tmp_path / "r.xml").write_text(PYTEST_XML)
    parts = {"test_a.test_good": 1.0, "test_a.test_bad": 0.0, "test_a.test_no": 0.0, "test_b": 0.0}
    assert read_junit(tmp_path / "r.xml") == Reading(0.25, parts)
    assert read_junit(tmp_path / "r.xml", expected=10) == Reading(0.1, parts)


def test_a_test_whose_teardown_fails_has_not_passed(tmp_path: Path) -> None:
    case = '<testcase classname="a" name="t"/><testcase classname="a" name="t"><error/></testcase>'
    (tmp_path / "r.xml").write_text(f"<testsuite>{case}</testsuite>")
    assert read_junit(tmp_path / "r.xml") == Reading(0.0, {"a.t": 0.0})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not XML"),
        ("<testsuite></testsuite>", "ran no test"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><testsuite/>', "document type"),
        ("<testsuite><testcase></testsuite>", "not XML"),
    ],
)
def test_a_report_without_tests_is_no_score(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.xml").write_text(text)
    with pytest.raises(BadScore, match=words):
        read_junit(tmp_path / "r.xml")


@pytest.mark.parametrize(
    ("text", "table", "reading"),
    [
        ("1\n", None, Reading(1.0, {})),
        ("0.25", None, Reading(0.25, {})),
        (None, {"reward": 0.5, "shape": 1}, Reading(0.5, {"shape": 1.0})),
        (None, {"equivalence": 1}, Reading(1.0, {"equivalence": 1.0})),
        ("0", {"reward": 0.3, "behaviour": 0.7}, Reading(0.0, {"reward": 0.3, "behaviour": 0.7})),
        (None, {"reward": 1.0, "reason": "fine", "metric": {"a": 1}}, Reading(1.0, {})),
    ],
)
def test_harbor_rewards(tmp_path: Path, text: str | None, table: dict[str, object] | None, reading: Reading) -> None:
    if text is not None:
        (tmp_path / "reward.txt").write_text(text)
    if table is not None:
        (tmp_path / "reward.json").write_text(json.dumps(table))
    assert read_reward(tmp_path) == reading


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("reward.txt", "", "not a number"),
        ("reward.txt", "PASS", "not a number"),
        ("reward.txt", "nan", "not a finite number"),
        ("reward.json", '{"a": 1, "b": 0}', "without `reward`"),
        ("reward.json", '{"reason": "none"}', "wrote no reward.txt"),
        ("reward.json", "[1]", "a list where an object"),
        ("other", "", "wrote no reward.txt"),
    ],
)
def test_a_harbor_verifier_that_writes_no_number_has_failed(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadScore, match=words):
        read_reward(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=st.binary(max_size=200) | st.text(max_size=100).map(str.encode) | st.from_regex(r"\{.*\}").map(str.encode))
def test_any_bytes_are_a_number_or_a_reason(tmp_path: Path, data: bytes) -> None:
    for name in ("reward.txt", "reward.json", "score"):
        (tmp_path / name).write_bytes(data)
    for read in (
        lambda: read_score(tmp_path / "score"),
        lambda: read_junit(tmp_path / "score"),
        lambda: read_reward(tmp_path),
    ):
        try:
            reading = read()
        except BadScore as problem:
            assert str(problem).startswith(("wrote", "ran"))
        else:
            assert reading.score is None or math.isfinite(reading.score)
