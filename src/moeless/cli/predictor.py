"""``moeless predictor``: profile, train, evaluate and apply predictors of expert loads."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moeless.cli.predictor_options import parse_sizes, source_options
from moeless.errors import ConfigError

if TYPE_CHECKING:
    from moeless.learned.shards import GateShards


@click.group()
def predictor() -> None:
    """Predictors of expert loads: see how far gates look ahead, and re-fit them to look further.

    \b
    Examples:
      moeless record MODEL --prompts chats.jsonl --gate-inputs seen/ --max-tokens 32
      moeless predictor profile seen/
      moeless predictor train seen/ --distance 2 --out ahead2/
      moeless predictor evaluate ahead2/ seen/
      moeless predictor apply ahead2/ seen/ --out trace.npz
    """


@predictor.command()
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
    from moeless.bootstrap.predictor import profile as profile_shards

    console = Console(stderr=True)
    with _opened(source, options, console) as shards, _bar(console, "profile") as bar:
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


@predictor.command()
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
    type=click.FloatRange(0.0, 1.0),
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
    type=click.FloatRange(0.0, 1.0, min_open=True, max_open=True),
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
    from moeless.core.cluster import parse_bytes

    memory_bytes = parse_bytes(options.pop("memory"), option="--memory")
    as_json = options.pop("as_json")
    names = ("distance", "method", "threshold", "all_layers", "held_out", "max_tokens_fitted")
    chosen = {name: options.pop(name) for name in (*names, "epochs")}
    from moeless.bootstrap.predictor import train as train_shards
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
    with _opened(source, options, console) as shards, _bar(console, "train") as bar:
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


@predictor.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("source", metavar="SHARDS")
@click.option(
    "--batches",
    "sizes",
    callback=parse_sizes,
    default="16,64,256",
    show_default=True,
    help="Tokens of a batch, a list.",
)
@click.option(
    "--batching",
    type=click.Choice(["recorded", "mixed", "decode"]),
    default="recorded",
    show_default=True,
    help="recorded: consecutive tokens; mixed: of all conversations; decode: one token each of "
    "many conversations.",
)
@click.option(
    "--large-baselines",
    is_flag=True,
    help="Train a perceptron per layer (and, with layer inputs, a linear predictor) beside it; "
    "takes minutes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def evaluate(
    directory: Path,
    source: str,
    sizes: tuple[int, ...],
    batching: Any,
    large_baselines: bool,
    as_json: bool,
) -> None:
    """Hold the predictor in DIR against recorded tokens, and against the baselines.

    Measured on conversations that were kept from training. The figures: load accuracy, how often
    the hottest expert is known, the error of the maximum load, the correlation of expected and
    true loads, and the share of a token's experts that are known.

    \b
    Example:
      moeless predictor evaluate ahead2/ seen/ --batches 16,256 --batching decode
    """
    from moeless.bootstrap.predictor import evaluate as evaluate_predictor
    from moeless.learned.shards import GateShards

    shards = GateShards(source)
    with Console(stderr=True).status("evaluating") as status:
        report = evaluate_predictor(
            directory,
            shards,
            sizes=sizes,
            batching=batching,
            baselines=large_baselines,
            on_progress=lambda what: status.update(f"evaluating: {what}"),
        )
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    from moeless.cli.predictor_tables import print_evaluation

    print_evaluation(Console(), report)


@predictor.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("source", metavar="SHARDS")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="TRACE.npz",
    help="The trace with predicted loads; a file that is there is replaced.",
)
@click.option(
    "--routing",
    type=click.Path(path_type=Path),
    metavar="TRACE.npz",
    help="A trace with --topk-ids of the run that recorded SHARDS; default: steps are made of "
    "recorded tokens.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Tokens of a step that is made.",
)
@click.option(
    "--batching",
    type=click.Choice(["recorded", "mixed", "decode"]),
    default="recorded",
    show_default=True,
    help="How steps are made: consecutive tokens, tokens of all conversations, or one decoded "
    "token each of many.",
)
def apply(
    directory: Path, source: str, out: Path, routing: Path | None, batch: int, batching: Any
) -> None:
    """Add what the predictor in DIR expects to a routing trace, for replay --prediction recorded.

    The first layers of a step, which nothing looks ahead to, get the load of the step before.

    \b
    Examples:
      moeless predictor apply ahead2/ seen/ --out trace.npz --batch 64 --batching decode
      moeless predictor apply ahead2/ seen/ --routing run.npz --out predicted.npz
      moeless replay --routing trace.npz --prediction recorded
    """
    from moeless.bootstrap.predictor_trace import apply_predictor
    from moeless.bootstrap.record_config import check_output
    from moeless.learned.shards import GateShards

    check_output(out)
    if routing is not None and routing.resolve() == out.resolve():
        raise ConfigError(f"--out {out} would overwrite --routing; name another file")
    console = Console(stderr=True)
    with _bar(console, "apply") as bar:
        report = apply_predictor(
            directory,
            GateShards(source),
            out,
            routing=routing,
            batch=batch,
            batching=batching,
            on_progress=lambda done, total: bar("tokens", done, total),
        )
    text = (
        f"{out} holds {report.entries:,} entries of {report.tokens:,} tokens and their forecasts"
    )
    if report.dropped:
        text += f"; {report.dropped:,} entries were not wholly in {source} and are left out"
    if report.fitted_share:
        text += f"; {report.fitted_share:.0%} of its conversations' tokens were trained on"
    click.echo(f"moeless: {text}")


@contextmanager
def _opened(source: str, options: dict[str, Any], console: Console) -> "Iterator[GateShards]":
    from moeless.bootstrap.predictor_source import SourceOptions, open_source

    with ExitStack() as kept:
        with _bar(console, "record") as bar:
            shards = kept.enter_context(
                open_source(
                    source,
                    SourceOptions(**options),
                    progress=lambda text: console.print(f"moeless: {text}", highlight=False),
                    on_recorded=lambda done, total: bar("tokens", min(done, total), total),
                )
            )
        yield shards


@contextmanager
def _bar(console: Console, name: str) -> Iterator[Any]:
    """A progress bar that shows once there is progress."""
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    task = bars.add_task(name, total=None)

    def show(what: str, done: int, total: int) -> None:
        if not bars.live.is_started:
            bars.start()
        bars.update(task, description=f"{name}: {what}", completed=done, total=total)

    try:
        yield show
    finally:
        if bars.live.is_started:
            bars.stop()
