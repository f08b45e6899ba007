"""``moeless record``: run a model on prompts and write what its gates did.

Where they sent the tokens becomes a routing trace, what they saw becomes shards of gate inputs.
"""

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

from moeless.cli.finite_range import FiniteRange
from moeless.config import EngineConfig, ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_bytes, parse_devices

if TYPE_CHECKING:
    from moeless.bootstrap.recording.record import RecordReport
    from moeless.bootstrap.recording.record_config import RecordConfig

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
    type=click.Path(path_type=Path),
    metavar="TRACE.npz",
    help="Write a routing trace; a file that is there is replaced.",
)
@click.option(
    "--gate-inputs",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write what enters each gate, to fit predictors to; instead of --out or with it.",
)
@click.option(
    "--layer-inputs",
    is_flag=True,
    help="Keep what enters each MoE layer's attention as well; doubles the size of DIR.",
)
@click.option(
    "--max-recorded-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop when DIR holds so many tokens.",
)
@click.option(
    "--max-disk",
    metavar="SIZE",
    help="Stop before DIR takes more, for example 20GB.",
)
@click.option(
    "--resume", is_flag=True, help="Continue DIR if it holds a part of the same recording."
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
    "--temperature", type=FiniteRange(0, 5), default=0.0, show_default=True, help="0: greedy."
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
    help="Weights and activations; auto is the checkpoint's own, or float32 where the "
    "processor is slow in that and memory allows it.",
)
@click.option("--model-id", help="Name of the model in the trace; default: the directory's name.")
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    help="Tokens of prompt and completion; longer prompts are skipped.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Compute threads of the engine.")
def record(model: str, **options: Any) -> int:
    """Run MODEL on prompts and record where its gates sent the tokens, and what the gates saw.

    --out counts every token that the engine computes once per chosen expert, by logical expert
    id; padding and warm-up are not counted. --gate-inputs keeps what entered each gate, prompt
    by prompt: after Ctrl-C or a crash --resume does the rest. Give one of them or both. Ctrl-C
    ends early and keeps what is whole.

    \b
    Examples:
      moeless record demo --prompts arena --out demo.npz --limit 200
      moeless record ./OLMoE-1B-7B --prompts chats.jsonl --out prefill.npz --unit requests \\
          --max-tokens 1
      moeless record demo --prompts arena --gate-inputs ./gate-inputs --max-tokens 32 \\
          --max-recorded-tokens 12000 --resume
    """
    max_disk = options.pop("max_disk")
    options["max_disk_bytes"] = (
        None if max_disk is None else parse_bytes(max_disk, option="--max-disk")
    )
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
    from moeless.bootstrap.recording.record import record_routing
    from moeless.bootstrap.recording.record_config import RecordConfig, check_outputs

    config = RecordConfig(**options)
    check_outputs(config)
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
        feed = report.feed
        bars.update(
            task,
            total=report.prompts,
            completed=feed.finished + feed.skipped + feed.already,
            done=f"{report.steps:,} steps, {report.tokens:,} tokens{_show_bound(report, config)}",
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
    click.echo(f"moeless: {_summarize(report, config)}")
    return _INTERRUPTED if report.feed.interrupted else 0


def _show_bound(report: "RecordReport", config: "RecordConfig") -> str:
    if report.gate_inputs is None or config.max_recorded_tokens is None:
        return ""
    return f", {report.gate_inputs.tokens:,} of {config.max_recorded_tokens:,} recorded"


def _summarize(report: "RecordReport", config: "RecordConfig") -> str:
    feed, parts = report.feed, []
    if feed.interrupted:
        again = "; --resume does the rest" if config.gate_inputs and not config.out else ""
        parts.append(f"interrupted; what was whole is kept{again}")
    if config.out is not None:
        share = report.decode_tokens / report.tokens
        parts.append(
            f"{config.out} holds {report.entries:,} {config.unit}: {report.tokens:,} tokens in "
            f"{report.steps:,} steps, {share:.0%} decoded, from {feed.finished:,} of "
            f"{report.prompts:,} prompts"
        )
    gate_inputs = report.gate_inputs
    if gate_inputs is not None:
        parts.append(
            f"{config.gate_inputs} holds gate inputs of {gate_inputs.tokens:,} tokens from "
            f"{gate_inputs.conversations:,} of {report.prompts:,} prompts, "
            f"{gate_inputs.num_bytes / 1e6:,.0f} MB"
        )
        if gate_inputs.ran_out_of_disk:
            parts.append("stopped at --max-disk")
        elif feed.full:
            parts.append("stopped at --max-recorded-tokens")
    if feed.skipped:
        parts.append(f"{feed.skipped:,} skipped, the last because {feed.skip_reason}")
    return "; ".join(parts)
