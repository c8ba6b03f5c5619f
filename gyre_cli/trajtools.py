"""trajtools: what is in a recorded run, what repeats, what breaks prefix reuse, what would be trained. Needs no cluster."""

from __future__ import annotations

import click


@click.group()
def main() -> None:
    """Recorded runs of agents: say what is in them, check them, slim them."""


if __name__ == "__main__":
    main()
