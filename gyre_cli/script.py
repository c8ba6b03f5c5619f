"""The job script: made from a template of `sbatch_templates`, and read back for checks.

A template holds headers and one process start; what depends on the site is filled in here.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from gyre_base.config import ConfigError

HOLE = re.compile(r"\{\{(\w+)\}\}")
SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]*&|-]+")
SHORT = {
    "-N": "nodes", "-n": "ntasks", "-t": "time", "-p": "partition", "-A": "account", "-J": "job-name", "-o": "output",
    "-C": "constraint", "-a": "array", "-c": "cpus-per-task", "-q": "qos", "-D": "chdir", "-k": "no-kill",
    "-w": "nodelist", "-G": "gpus",
}  # fmt: skip
FLAGS = ("requeue", "no-requeue", "no-kill", "exclusive", "overcommit", "hold", "contiguous", "spread-job")


def templates() -> list[str]:
    """Names of the templates, the general one first."""
    names = (entry.name for entry in resources.files("sbatch_templates").iterdir())
    found = sorted(name.removesuffix(".sbatch") for name in names if name.endswith(".sbatch"))
    return sorted(found, key=lambda name: name != "gyre")


def render(template: str, values: dict[str, str]) -> str:
    """The template with every hole filled; a line that holds nothing but an empty hole vanishes. Raises KeyError for a
    hole without a value: a mistake of ours.
    """
    text = resources.files("sbatch_templates").joinpath(f"{template}.sbatch").read_text()
    out = []
    for line in text.splitlines():
        filled = HOLE.sub(lambda hole: values[hole[1]], line)
        if filled.strip() or not line.strip():
            out.append(re.sub(r"  +$| +$", "", filled))
    return "\n".join(out) + "\n"


def header_word(text: str) -> str:
    """A value as a `#SBATCH` line takes it. Raises ConfigError for what no quoting carries over."""
    if SAFE.fullmatch(text):
        return text
    if '"' in text or "\\" in text or not text.isprintable():
        words = "holds a quote, a backslash or an unprintable character, which a job script's header can't carry"
        raise ConfigError(f"{text!r} {words}")
    return f'"{text}"'


def shell_word(text: str) -> str:
    return shlex.quote(text)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a job script asks for and starts. Options by long name; a flag has the value ""."""

    path: Path
    options: dict[str, str]
    command: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """At least this many."""
        first = re.match(r"\d+", self.options.get("nodes", "1"))
        return int(first[0]) if first else 1

    @property
    def gpus(self) -> int | None:
        """Per node; None if the script does not say."""
        for key in ("gres", "gpus-per-node"):
            for part in self.options.get(key, "").split(","):
                fields = part.split(":")
                if (key == "gpus-per-node" or fields[0] == "gpu") and fields[-1].isdigit():
                    return int(fields[-1])
        total = self.options.get("gpus", "").split(":")[-1]
        return int(total) // self.nodes if total.isdigit() else None

    @property
    def folder(self) -> Path:
        """Where the job runs: --chdir, else where it is submitted from (the script's own folder, for us)."""
        return (self.path.parent / self.options.get("chdir", ".")).resolve()

    def argument(self, option: str) -> str | None:
        """The value of `--config` or `--run` of the process start."""
        for at, word in enumerate(self.command):
            if word == option and at + 1 < len(self.command):
                return self.command[at + 1]
            if word.startswith(f"{option}="):
                return word.partition("=")[2]
        return None


def parse(path: Path, more: tuple[str, ...] = ()) -> Script:
    """Read a job script; `more` are further words for sbatch, which win. Raises ConfigError."""
    try:
        lines = path.read_text().split("\n")  # as Slurm and the shell do: splitlines knows other line ends
    except FileNotFoundError:
        raise ConfigError(f"no job script at {path}; `gyre init` writes one") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no job script: it is not UTF-8 text") from None
    header, body = split(lines)
    options: dict[str, str] = {}
    for number, words in header:
        try:
            options.update(parse_options(words))
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
    options.update(parse_options(list(more)))
    command = next((words for words in body if is_start(words)), [])
    return Script(path=path.resolve(), options=options, command=tuple(command))


def split(lines: list[str]) -> tuple[list[tuple[int, list[str]]], list[list[str]]]:
    """(numbered words of the #SBATCH lines, words of the lines that may start us, none of the others). Slurm reads no
    header after the first command.
    """
    header: list[tuple[int, list[str]]] = []
    body: list[list[str]] = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#SBATCH") and not body:
            header.append((number, _words(line.removeprefix("#SBATCH"))))
        elif line.strip() and not line.lstrip().startswith("#"):
            body.append(_words(line) if "gyre" in line else [])
    return header, body


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a line of a longer quotation: no start of ours
        return line.split()


def is_start(words: list[str]) -> bool:
    """Whether a line starts a supervisor."""
    gyre = any(word == "gyre_cli.gyre" or Path(word).name == "gyre" for word in words)
    return gyre and "up" in words


def parse_options(words: list[str]) -> dict[str, str]:
    """`--key=value`, `--key value`, `-K value`, `-Kvalue` by long name. Raises ConfigError for what is no option."""
    out: dict[str, str] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals and key not in FLAGS and queue and not queue[0].startswith("-"):
                value = queue.pop(0)
        elif word[:2] in SHORT:
            key, value = SHORT[word[:2]], word[2:]
            if not value and key not in FLAGS and queue:
                value = queue.pop(0)
        elif word == "hetjob":
            raise ConfigError(
                "heterogeneous jobs are not steered by gyre; `gyre init --template uneven` has another way"
            )
        elif word.startswith("-") and len(word) > 1:
            key, value = word[1:], ""
        else:
            raise ConfigError(f"{word!r} is no option of sbatch")
        out[key] = value
    return out
