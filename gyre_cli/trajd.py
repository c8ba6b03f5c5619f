"""trajd: the trajectory daemon's commands."""

from __future__ import annotations

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option, run_option


@click.group()
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
def intake(folder: str, listen: str, token_file: str | None) -> None:
    """Take calls recorded elsewhere into run files in FOLDER until TERM; needs no run (docs/trajtools.md)."""
    import asyncio
    from pathlib import Path

    from gyre_base.daemon import stop_on_signals
    from trajtools.trajd.intake import Taken, run_intake

    if not listen.startswith(("unix:", "tcp:")):
        common.fail(f"{listen}: an address is unix:PATH or tcp:HOST:PORT", common.USAGE)
    token = Path(token_file).read_text().strip() if token_file else ""
    if listen.startswith("tcp:") and not token and listen[4:].rpartition(":")[0] not in ("127.0.0.1", "localhost"):
        common.fail("an intake that others can reach needs --token-file", common.USAGE)

    async def serve() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        await run_intake(Path(folder), listen, token=token, ready=click.echo, stop=stop)

    try:
        asyncio.run(serve())
    except Taken as error:
        common.fail(str(error), common.REFUSED)
    except OSError as error:
        common.fail(f"stopped: {error}; what was acknowledged is on disk", common.NO)


@main.command()
@click.argument("source", type=click.Path(exists=True))
@click.option("--to", "address", required=True, metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT of an intake.")
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False), help="What the intake wants to hear.")
@click.option("--freeze", is_flag=True, help="Freeze each execution behind its last call; prints its digest.")
@json_option
def send(source: str, address: str, token_file: str | None, freeze: bool, as_json: bool) -> None:
    """Send a recording (whatever trajtools reads) to an intake; exit 1 if something of it was refused."""
    import asyncio
    from pathlib import Path

    from trajtools.trajd import sending

    if not address.startswith(("unix:", "tcp:")):
        common.fail(f"{address}: an address is unix:PATH or tcp:HOST:PORT", common.USAGE)
    token = Path(token_file).read_text().strip() if token_file else ""
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
