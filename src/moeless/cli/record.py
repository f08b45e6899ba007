"""``moeless record``: run a model on prompts and write where its gates sent the tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from moeless.config import EngineConfig, ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices

if TYPE_CHECKING:
    from moeless.bootstrap.record import RecordReport

_INTERRUPTED = 130


@click.command()
@click.argument("model")
@click.option(
    "--prompts",
    required=True,
    metavar="FILE|sharegpt|arena",
    help="Prompts: a file, or a known collection by name.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="TRACE.npz",
    help="The trace; a file that is there is replaced.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Prompts at the most.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Tokens to generate for each prompt at the most; 1 records prompts alone.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Prompts that run at the same time.",
)
@click.option(
    "--unit",
    type=click.Choice(["steps", "requests"]),
    default="steps",
    show_default=True,
    help="What one entry of the trace is: an engine step, or a whole request.",
)
@click.option("--topk-ids", is_flag=True, help="Keep the experts of every token as well.")
@click.option(
    "--temperature", type=click.FloatRange(0, 5), default=0.0, show_default=True, help="0: greedy."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Shuffle the prompts before --limit, and make sampling repeatable.",
)
@click.option("--licence", help="What the trace says of its licence; default: the prompts'.")
@click.option("--raw", is_flag=True, help="Continue prompts as they are, without chat template.")
@click.option(
    "--devices",
    default="cpu:1",
    show_default=True,
    help="Where experts run: cpu:N, or cuda:0,1 for GPUs.",
)
@click.option(
    "--invoker",
    type=click.Choice(["inline", "process"]),
    default="inline",
    show_default=True,
    help="inline: experts in the engine's process; process: one worker process per device.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Weights and activations; auto is the checkpoint's own.",
)
@click.option("--model-id", help="Name of the model in the trace; default: the directory's name.")
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    help="Tokens of prompt and completion; longer prompts are skipped.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Compute threads of the engine.")
def record(model: str, **options: Any) -> int:
    """Run MODEL on prompts and record how many tokens each expert of each layer received.

    Every token that the engine computes is counted once per chosen expert, by logical expert id;
    padding and warm-up are not. Ctrl-C ends early and keeps what is whole.

    \b
    Examples:
      moeless record demo --prompts arena --out demo.npz --limit 200
      moeless record ./OLMoE-1B-7B --prompts chats.jsonl --out prefill.npz --unit requests \\
          --max-tokens 1
    """
    experts = ExpertsConfig(
        devices=parse_devices(options.pop("devices")),
        invoker=options.pop("invoker"),
        # Where experts run changes no route: one copy of each, for good, costs the least.
        policy=PolicyConfig(policy="static", predictor="previous", memory_factor=1.0),
    )
    concurrency = options.pop("concurrency")
    engine = EngineConfig(
        model=model,
        max_batch_size=concurrency,
        max_waiting=2 * concurrency,
        **{name: options.pop(name) for name in ("model_id", "dtype", "max_model_len", "threads")},
    )
    # Everything heavy is imported here, so that --help and wrong options answer at once.
    from moeless.bootstrap.record import RecordConfig, check_output, record_routing

    config = RecordConfig(**options)
    check_output(config.out)
    console = Console(stderr=True)
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    task = bars.add_task("prompts", total=None, done="")

    def show(report: "RecordReport") -> None:
        if not bars.live.is_started:
            bars.start()
        bars.update(
            task,
            total=report.prompts,
            completed=report.feed.finished + report.feed.skipped,
            done=f"{report.steps:,} steps, {report.tokens:,} tokens",
        )

    try:
        report = record_routing(
            engine,
            experts,
            config,
            progress=lambda text: console.print(f"moeless: {text}", highlight=False),
            on_progress=show,
        )
    finally:
        if bars.live.is_started:  # a bar that never showed would leave an empty line
            bars.stop()
    click.echo(f"moeless: {_summarize(report, config.unit, config.out)}")
    return _INTERRUPTED if report.feed.interrupted else 0


def _summarize(report: "RecordReport", unit: str, out: Path) -> str:
    feed, share = report.feed, report.decode_tokens / report.tokens
    parts = [
        f"{out} holds {report.entries:,} {unit}: {report.tokens:,} tokens in {report.steps:,} "
        f"steps, {share:.0%} decoded, from {feed.finished:,} of {report.prompts:,} prompts"
    ]
    if feed.skipped:
        parts.append(f"{feed.skipped:,} skipped, the last because {feed.skip_reason}")
    if feed.interrupted:
        parts.insert(0, "interrupted; what was whole is kept")
    return "; ".join(parts)
