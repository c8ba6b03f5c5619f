"""Scores what the rambler wrote: the share of its characters that are vowels. Standard library only."""

import json
import sys
from pathlib import Path


def main() -> None:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    answer = Path(options["--workspace"]) / "answer"
    text = answer.read_text().lower() if answer.exists() else ""
    score = sum(letter in "aeiou" for letter in text) / max(1, len(text))
    Path(options["--out"]).write_text(json.dumps({"score": score} if answer.exists() else {"no_artifact": True}))


if __name__ == "__main__":
    main()
