"""trajd: the trajectory daemon's commands."""

from __future__ import annotations

from pathlib import Path

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option, run_option
from gyre_cli.reading import readable


@click.group(
    epilog=common.examples(
        "trajd status",
        "trajd batches --json",
        "trajd intake calls --listen unix:/tmp/intake",
        "trajd send run.jsonl --to unix:/tmp/intake --freeze",
    )
)
def main() -> None:
    """The trajectory daemon: an index over the call log and the ledger of micro-steps."""


@main.command()
@run_option
@guarded
def run(run_dir: str | None) -> None:
    """Run the daemon for a run directory until TERM."""
    from gyre_base.daemon import run_main
    from trajtools.trajd.daemon import run_trajd

    root = common.run_root(run_dir)
    run_main(lambda: run_trajd(root))


@main.command()
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--listen", required=True, metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT.")
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False), help="Clients must say this first.")
@guarded
def intake(folder: str, listen: str, token_file: str | None) -> None:
    """Take calls recorded elsewhere into run files in FOLDER until TERM; needs no run (docs/trajtools.md)."""
    import asyncio

    from gyre_base.daemon import stop_on_signals
    from trajtools.trajd.intake import Taken, run_intake

    _check_address(listen)
    token = _token(token_file)
    if listen.startswith("tcp:") and not token and listen[4:].rpartition(":")[0] not in ("127.0.0.1", "localhost"):
        common.fail("an intake that others can reach needs --token-file", common.USAGE)

    listens = False

    def ready(address: str) -> None:
        nonlocal listens
        listens = True
        click.echo(address)

    async def serve() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        await run_intake(Path(folder), listen, token=token, ready=ready, stop=stop)

    try:
        asyncio.run(serve())
    except Taken as error:
        common.fail(str(error), common.REFUSED)
    except OSError as error:
        if listens:
            common.fail(f"stopped: {error.strerror}; what was acknowledged is on disk", common.NO)
        common.fail(f"cannot use {error.filename or listen}: {error.strerror or error}", common.USAGE)


def _check_address(text: str) -> None:
    from trajtools.trajd.frames import check_address

    try:
        check_address(text)
    except ValueError as error:
        common.fail(str(error), common.USAGE)


def _token(file: str | None) -> str:
    """What the file says; "" without one. Fails for a file that can be no token: it would never fit."""
    if file is None:
        return ""
    try:
        token = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        common.fail(f"cannot read the token in {file}: {getattr(error, 'strerror', None) or 'no text'}", common.USAGE)
    if not token or not token.isprintable():
        common.fail(f"{file} holds no token: one line of printable characters", common.USAGE)
    return token


@main.command()
@click.argument("source", type=click.Path(exists=True))
@click.option("--to", "address", required=True, metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT of an intake.")
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False), help="What the intake wants to hear.")
@click.option("--freeze", is_flag=True, help="Freeze each execution behind its last call; prints its digest.")
@json_option
@readable
def send(source: str, address: str, token_file: str | None, freeze: bool, as_json: bool) -> None:
    """Send a recording (whatever trajtools reads) to an intake; exit 1 if something of it was refused."""
    import asyncio

    from trajtools.trajd import sending

    _check_address(address)
    token = _token(token_file)
    try:
        sent = asyncio.run(sending.send(Path(source), address, token=token, freeze=freeze))
    except sending.NotSent as error:
        common.fail(str(error), common.NO)
    except OSError as error:
        common.fail(f"no intake answers at {address}: {error.strerror or error}", common.NO_ANSWER)
    common.print_json([sent.as_json()]) if as_json else click.echo("\n".join(sent.lines()))
    raise SystemExit(0 if sent.ok else common.NO)


@main.command()
@run_option
@json_option
@guarded
def status(run_dir: str | None, as_json: bool) -> None:
    """Groups, the open batch, micro-steps by state, totals."""
    rows = common.view(run_dir, "trajd", "status")
    common.print_json(rows) if as_json else common.print_tables(rows)


@main.command()
@run_option
@json_option
@guarded
def batches(run_dir: str | None, as_json: bool) -> None:
    """One row per applied batch."""
    rows = common.view(run_dir, "trajd", "batches")
    common.print_json(rows) if as_json else common.print_tables(rows)


if __name__ == "__main__":
    main()
