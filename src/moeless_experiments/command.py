"""``moeless reproduce``: run experiments and write what came out."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table as Printed

from moeless.engines.demo.source import cache_root
from moeless.errors import MoelessError
from moeless.workloads.prompts import DATA_DIR_VARIABLE
from moeless_experiments.context import Context
from moeless_experiments.figure import Result
from moeless_experiments.manifest import describe
from moeless_experiments.progress import progress_bar
from moeless_experiments.registry import MODULES, find, select
from moeless_experiments.report.page import write_report
from moeless_experiments.writing import require_matplotlib, require_writable, write_result


def _list(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        for name in MODULES:
            click.echo(f"{name:<17} {find(name).title}")
        context.exit()


@click.command()
@click.argument("names", metavar="WHAT...", nargs=-1, required=True)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where to: a directory for each experiment, with CSV files, plots and a manifest.",
)
@click.option("--quick", is_flag=True, help="Fewer models, tokens and steps.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of everything that is drawn; the same seed gives the same simulated CSV files.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads of what is timed in this process; default: the cores.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Processes for independent cases, of one thread and up to 2.5 GB each; default: the "
    "cores. What comes out does not depend on it.",
)
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="Show what there is, and do nothing.",
)
@click.option(
    "--shards",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Recordings of gate inputs that are there already: DIR/demo16_arena and so on; default: "
    "made when needed, and kept.",
)
def reproduce(
    names: tuple[str, ...],
    out: Path,
    quick: bool,
    seed: int,
    threads: int | None,
    processes: int | None,
    shards: Path | None,
) -> int:
    """Run figures and tables of the MoEless paper, and some of our own: fig07, table2, or all.

    Each gives data, plots, the paper's number beside ours where its text has one, and where the
    numbers come from: measured, emulated, or simulated. DIR/report.html shows all results in DIR.

    \b
    Examples:
      moeless reproduce --list
      moeless reproduce fig07 --out results/
      moeless reproduce all --quick --out /tmp/results

    \b
    Environment:
      MOELESS_DATA_DIR     public traces, prompts and timings
      MOELESS_CACHE_DIR    where models and recordings are kept [default: ~/.cache/moeless]
    """
    chosen = select(names)
    require_writable(out)
    require_matplotlib()
    data, cores = os.environ.get(DATA_DIR_VARIABLE), len(os.sched_getaffinity(0))
    context = Context(
        out=out,
        cache=cache_root() / "experiments",
        quick=quick,
        seed=seed,
        threads=threads or cores,
        processes=processes or cores,
        shards=shards,
        data=Path(data) if data else None,
    )
    try:
        undone, report = _run_all(chosen, context)
    finally:
        context.cases.close()
    if report is not None:
        click.echo(f"moeless: the report is {report}")
    if undone:
        click.echo(f"moeless: {len(undone)} of {len(chosen)} not done: {', '.join(undone)}")
    return 1 if undone else 0


def _run_all(chosen: Sequence[str], context: Context) -> tuple[list[str], Path | None]:
    """Run experiments; gives those that could not be done, and the report."""
    undone, report = [], None
    for name in chosen:
        try:
            _run(name, context)
            # After each: whoever stops a long run half-way has a report of what is done.
            report = write_report(context.out, tuple(MODULES))
        except MoelessError as error:
            if len(chosen) == 1:
                raise
            # What one figure lacks need not keep the others from being made.
            undone.append(name)
            click.echo(f"moeless: {name}: not done: {error}", err=True)
    return undone, report


def _run(name: str, context: Context) -> None:
    experiment, began_s = find(name), time.perf_counter()
    if experiment.alone:
        context.cases.close()
    with progress_bar(Console(stderr=True)) as tell:
        result = experiment.run(
            replace(context, progress=lambda what, *count: tell(f"{name}: {what}", *count))
        )
    took_s = time.perf_counter() - began_s
    directory = context.out / name
    write_result(directory, result, lambda: describe(experiment, result, context, took_s=took_s))
    _print(name, experiment.title, result)
    click.echo(f"moeless: {name}: {took_s:.0f} s, {directory}")


def _print(name: str, title: str, result: Result) -> None:
    printed = Printed(title=f"{name}: {title} ({result.provenance})", title_justify="left")
    for column in ("what", "paper", "ours"):
        printed.add_column(column, overflow="fold")
    for each in result.findings:
        printed.add_row(each.what, each.paper, each.ours)
    console = Console()
    console.print(printed)
    console.print(result.interpretation, highlight=False)
