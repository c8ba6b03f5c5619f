"""Pages name commands and options that exist, and link to what is there. That the commands do what a page says is
shown where they can run: tests/slurm/test_docs.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import pages
from tests.cli.conftest import ROOT
from tests.pages import named, options

PROGRAMS = ("gyre", "cellctl", "celld", "proxyd", "trajd", "trajtools")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
INLINE = re.compile(r"`([^`\n]+)`")


def commands(path: Path) -> Iterator[list[str]]:
    """Words of every line of a block and of every inline quotation that begins with one of our programs."""
    outside, inside = [], []
    for number, part in enumerate(path.read_text().split("```")):
        (inside if number % 2 else outside).append(part)
    for line in [*"\n".join(inside).splitlines(), *INLINE.findall("\n".join(outside))]:
        words = line.strip().removeprefix("$ ").split("#")[0]
        for part in re.split(r"[|;]|&&", words):
            try:
                found = shlex.split(part)
            except ValueError:
                continue
            if found and found[0] in PROGRAMS and len(found) > 1 and re.fullmatch("[a-z]+", found[1]):
                yield found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_and_options_of_a_page_exist(path):
    for words in commands(path):
        said = f"{path.name}: {' '.join(words)}"
        try:
            command, rest = named(words)
        except KeyError as unknown:
            pytest.fail(f"{said}: no command is called {unknown}")
        own = rest[: rest.index("--")] if "--" in rest else rest
        given = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert given <= options(command) | {"--help"}, said


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_of_a_page_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("name", ["cluster.md", "admin.md", "failed-run.md"])
def test_every_block_of_a_page_for_clusters_is_one_that_runs(name):
    fences = re.findall(r"^\s*```(.*)$", (ROOT / "docs" / name).read_text(), re.M)
    opened = fences[::2]
    assert set(opened) == {"sh"}


def test_a_page_is_run_in_one_shell_and_its_failing_line_is_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\ncd /\nx=1\n```\n<!-- test: y=2 -->\n```sh\npwd; echo $x$y\nfalse  # exits 1\n```\n")
    said = pages.run(page, tmp_path, {})
    assert said == "@@ page.md:1\n@@ page.md:5\n@@ page.md:6\n/\n12\n"
    page.write_text("```sh\ntrue\n```\n\n```sh\nfalse | cat\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:5 fails with 1"):
        pages.run(page, tmp_path, {})
    page.write_text("<!-- interactive -->\n```sh\nsleep 60\n```\n")
    assert pages.run(page, tmp_path, {}) == "@@ page.md:2\n"
