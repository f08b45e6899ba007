"""``moeless predictor evaluate`` and ``apply``: what a trained predictor is worth, and says."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from moeless.cli.predictor_options import parse_sizes
from moeless.cli.progress import show_progress
from moeless.errors import ConfigError


@click.command()
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
    from moeless.bootstrap.predictors.predictor import evaluate as evaluate_predictor
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


@click.command()
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
    from moeless.bootstrap.predictors.predictor_trace import apply_predictor
    from moeless.bootstrap.recording.record_config import check_output
    from moeless.learned.shards import GateShards

    check_output(out)
    if routing is not None and routing.resolve() == out.resolve():
        raise ConfigError(f"--out {out} would overwrite --routing; name another file")
    console = Console(stderr=True)
    with show_progress(console, prefix="apply: ") as bar:
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
