"""gyre exec, gyre show, gyre rescore: executions run, looked at one by one, and measured anew."""

from __future__ import annotations

from pathlib import Path

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option, run_option


@click.command("show")
@click.argument("execution", required=False)
@run_option
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write one page that needs nothing else.")
@json_option
@guarded
def show(execution: str | None, run_dir: str | None, html: Path | None, as_json: bool) -> None:
    """EXECUTION on one page: task, outcome, score parts, clocks, tree of calls, what it changed, what it printed.

    Without EXECUTION: a line for each that there is.
    """
    from gyre_base.rundir import RunDir
    from gyre_cli import show as pages
    from gyre_exec.show import NoSuchExecution, gather

    run = RunDir.open(common.run_root(run_dir))
    if execution is None:
        rows = pages.all_of(run)
        if as_json:
            common.print_json(rows)
            return
        common.print_table([{key: value for key, value in row.items() if key != "error"} for row in rows])
        for line in pages.failures(rows):
            click.echo(line, err=True)
        return
    try:
        page = gather(run, execution)
    except NoSuchExecution as error:
        common.fail(str(error), common.USAGE)
    told = pages.history_of(run, page)
    if html is not None:
        pages.write(page, told, html)
        click.echo(f"wrote {html}", err=True)
    elif as_json:
        common.print_json([pages.as_json(page, told)])
    else:
        pages.show(page, told)


@click.command("rescore")
@click.argument("run_dir", metavar="RUN", type=click.Path(file_okay=False))
@click.option(
    "--evaluator",
    required=True,
    metavar="FILE|task",
    help="A .toml or .json file with an evaluator, or `task`: each task's own as its file has it now.",
)
@click.option("--workers", type=click.IntRange(1), help="Evaluators at once (default: one per core).")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many states.")
@json_option
@guarded
def rescore(run_dir: str, evaluator: str, workers: int | None, limit: int | None, as_json: bool) -> None:
    """Measure the kept states of RUN by another ruler: agreement, bias by length, drift over the steps.

    Results go to RUN/rescores/, beside the old scores. A second start goes on. Exit 1 if a state could not be measured.
    """
    from gyre_cli import rescoring

    raise SystemExit(rescoring.run(run_dir, evaluator, workers, limit, as_json))


@click.command("exec")
@click.option("--name", help="Serve a run as this executor, such as ex0, until TERM.")
@click.option("--pool", is_flag=True, help="Keep as many executors as the run's work needs, until TERM.")
@click.option("--task", metavar="PATH[:ID]", help="Run one execution of this task and print its outcome.")
@click.option(
    "--harness", default="", metavar="NAME", help="With --task: which harness; its command follows after `--`."
)
@click.option(
    "--script", type=click.Path(dir_okay=False, exists=True, path_type=Path), help="The model's answers, JSON."
)
@click.option("--config", "config_file", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.option("--workspace", help="plain, bwrap, apptainer or pyxis (default: the configuration's).")
@click.option("--limit", "limit_s", type=click.FloatRange(0.1), metavar="SECONDS", help="Harness limit.")
@click.argument("command", nargs=-1)
@run_option
@json_option
@guarded
def execute(
    name: str | None,
    pool: bool,
    task: str | None,
    harness: str,
    script: Path | None,
    config_file: Path | None,
    workspace: str | None,
    limit_s: float | None,
    command: tuple[str, ...],
    run_dir: str | None,
    as_json: bool,
) -> None:
    """Start harnesses and score what they leave: as an executor of a run, as the pool of them, or one task alone.

    With --task the model is the one that the run --run serves; or a script: --script, or script.json beside the task,
    behind a proxyd of its own (in --run, default runs/exec). Exit 0 if the outcome counts, 1 if not.
    """
    if sum((name is not None, pool, task is not None)) != 1:
        common.fail("one of --name, --pool and --task says what to do", common.USAGE)
    if task is not None:
        from gyre_cli import standalone

        wishes = standalone.Wishes(
            task=task,
            harness=harness,
            command=command,
            script=script,
            config_file=config_file,
            workspace=workspace,
            limit_s=limit_s,
            run_dir=run_dir,
            as_json=as_json,
        )
        raise SystemExit(standalone.run(wishes))
    from gyre_base.daemon import run_main

    root = common.run_root(run_dir)
    if pool:
        from gyre_exec.launch import main as keep_pool

        raise SystemExit(keep_pool(["--run", root]))
    from gyre_exec.daemon import run_executor

    run_main(lambda: run_executor(root, str(name)))
