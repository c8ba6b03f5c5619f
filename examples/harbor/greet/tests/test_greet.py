"""Prints the share of names that are greeted rightly."""

import sys

sys.path.insert(0, "/app")
NAMES = ("Ada", "Grace", "")


def right(name: str) -> bool:
    try:
        from greet import greet

        return greet(name) == f"Hello, {name}!"
    except BaseException:
        return False


if __name__ == "__main__":
    print(sum(map(right, NAMES)) / len(NAMES))
