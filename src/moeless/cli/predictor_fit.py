"""``moeless predictor profile`` and ``train``: look at recorded gate inputs, and fit to them."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from moeless.cli.finite_range import FiniteRange
from moeless.cli.predictor_options import parse_sizes, source_options
from moeless.cli.progress import show_progress
from moeless.core.cluster import parse_bytes

if TYPE_CHECKING:
    from moeless.learned.shards import GateShards


@click.command()
@click.argument("source", metavar="SHARDS|MODEL")
@click.option(
    "--distances",
    callback=parse_sizes,
    default="1,2,3,4,5",
    show_default=True,
    help="How many layers ahead, a list.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=16_384,
    show_default=True,
    help="Tokens to look at.",
)
@source_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def profile(source: str, distances: tuple[int, ...], tokens: int, **options: Any) -> None:
    """Measure how well copied gates predict the layers ahead, as they are.

    Shows, for every layer and distance, the load accuracy of the copied gate over batches of 256
    consecutive tokens, and the cosine similarity of what enters the two gates. SHARDS is a
    directory that moeless record --gate-inputs wrote; a MODEL is recorded first, with --prompts.

    \b
    Examples:
      moeless predictor profile seen/
      moeless predictor profile demo --prompts arena --distances 1,3
    """
    as_json = options.pop("as_json")
    from moeless.bootstrap.predictors.predictor import profile as profile_shards

    console = Console(stderr=True)
    with (
        _opened(source, options, console) as shards,
        show_progress(console, prefix="profile: ") as bar,
    ):
        report = profile_shards(
            shards,
            distances,
            max_tokens=tokens,
            on_progress=lambda done, total: bar("tokens", done, total),
        )
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    from moeless.cli.predictor_tables import print_profile

    print_profile(Console(), report)


@click.command()
@click.argument("source", metavar="SHARDS|MODEL")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the predictor goes; one that is there is replaced.",
)
@click.option(
    "--distance",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many layers ahead to predict.",
)
@click.option(
    "--method",
    type=click.Choice(["ridge", "finetune", "mlp"]),
    default="ridge",
    show_default=True,
    help="ridge: copied gates, re-fitted in closed form; finetune: copied gates, gradient descent "
    "on soft targets (as in the MoEless paper); mlp: a perceptron per layer (as in ProMoE).",
)
@click.option(
    "--threshold",
    type=FiniteRange(0.0, 1.0),
    default=0.8,
    show_default=True,
    help="Layers whose copied gate is this accurate keep it.",
)
@click.option("--all-layers", is_flag=True, help="Train every layer, whatever its accuracy.")
@click.option(
    "--max-tokens-fitted",
    type=click.IntRange(min=1),
    default=32_768,
    show_default=True,
    metavar="N",
    help="Tokens to fit to at the most.",
)
@click.option(
    "--held-out",
    type=FiniteRange(0.0, 1.0, min_open=True, max_open=True),
    default=0.2,
    show_default=True,
    help="Share of the conversations that only the report sees.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    default="2GB",
    show_default=True,
    help="Memory to use beside the recording; layers are fitted in groups that fit.",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Passes at the most (finetune, mlp).",
)
@source_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def train(source: str, out: Path, **options: Any) -> None:
    """Train a predictor from recorded gate inputs.

    Only layers whose copied gate is below the threshold are trained; the copied gate stays
    wherever nothing better is found. The report compares both on conversations that were kept
    from training. SHARDS is a directory that moeless record --gate-inputs wrote; a MODEL is
    recorded first, with --prompts.

    \b
    Examples:
      moeless predictor train seen/ --distance 2 --out ahead2/
      moeless predictor train seen/ --method finetune --threshold 0.95 --out tuned/
      moeless predictor train demo --prompts arena --all-layers --out demo-ahead/
    """
    memory_bytes = parse_bytes(options.pop("memory"), option="--memory")
    as_json = options.pop("as_json")
    names = ("distance", "method", "threshold", "all_layers", "held_out", "max_tokens_fitted")
    chosen = {name: options.pop(name) for name in (*names, "epochs")}
    from moeless.bootstrap.predictors.predictor import train as train_shards
    from moeless.learned.gradient import DescentOptions
    from moeless.learned.training_options import TrainingOptions

    descent = DescentOptions(epochs=chosen.pop("epochs"), seed=options["seed"])
    settings = TrainingOptions(
        max_tokens=chosen.pop("max_tokens_fitted"),
        memory_bytes=memory_bytes,
        seed=options["seed"],
        descent=descent,
        **chosen,
    )
    console = Console(stderr=True)
    with (
        _opened(source, options, console) as shards,
        show_progress(console, prefix="train: ") as bar,
    ):
        report = train_shards(
            shards,
            settings,
            out,
            tell=lambda text: console.print(f"moeless: {text}", highlight=False),
            on_progress=bar,
        )
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    from moeless.cli.predictor_tables import print_training

    print_training(Console(), report)


@contextmanager
def _opened(source: str, options: dict[str, Any], console: Console) -> "Iterator[GateShards]":
    from moeless.bootstrap.predictors.predictor_source import SourceOptions, open_source

    with ExitStack() as kept:
        with show_progress(console, prefix="record: ") as bar:
            shards = kept.enter_context(
                open_source(
                    source,
                    SourceOptions(**options),
                    progress=lambda text: console.print(f"moeless: {text}", highlight=False),
                    on_recorded=lambda done, total: bar("tokens", min(done, total), total),
                )
            )
        yield shards
