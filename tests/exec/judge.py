"""A scripted evaluator for tests. The hidden file `mode` says how it behaves; the score is len(answer) / 10."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    out = Path(options["--out"])
    mode, _, argument = (Path(options["--tests"]) / "mode").read_text().partition(" ")
    if mode == "crash" or (mode == "flaky" and not Path(argument).exists()):
        if mode == "flaky":
            Path(argument).touch()
        raise RuntimeError("the judge is ill")
    if mode == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        time.sleep(600)
    if mode == "rubbish":
        out.write_text(argument)
    elif mode != "silent":
        out.write_text(json.dumps(judge(Path(options["--workspace"]) / "answer")))


def judge(answer: Path) -> dict[str, Any]:
    if not answer.exists():
        return {"no_artifact": True}
    score = len(answer.read_text()) / 10
    return {"score": score, "parts": {"length": score, "there": True}}


if __name__ == "__main__":
    main()
