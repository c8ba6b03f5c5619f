"""A scripted evaluator for tests. The hidden file `mode` says how it behaves; the score is the length of `answer` over ten."""

import json
import os
import subprocess
import sys
import time


def main():
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    workspace, tests, out = options["--workspace"], options["--tests"], options["--out"]
    with open(os.path.join(tests, "mode")) as file:
        mode, _, argument = file.read().partition(" ")
    if mode == "crash" or (mode == "flaky" and not os.path.exists(argument)):
        if mode == "flaky":
            open(argument, "w").close()
        raise RuntimeError("the judge is ill")
    if mode == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        time.sleep(600)
    if mode == "rubbish":
        with open(out, "w") as file:
            file.write(argument)
        return
    if mode == "silent":
        return
    answer = os.path.join(workspace, "answer")
    if not os.path.exists(answer):
        result = {"no_artifact": True}
    else:
        score = len(open(answer).read()) / 10
        result = {"score": score, "parts": {"length": score, "there": True}}
    with open(out, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
