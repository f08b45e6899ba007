"""``moeless replay``: hold balancing policies against a recorded routing trace."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeless.config import parse_memory_factor
from moeless.core.cluster import parse_bytes
from moeless.errors import ConfigError

if TYPE_CHECKING:
    from moeless.bootstrap.replays.replay import ReplayTask

_ALL = "static,eplb,swift,paper,moeless,oracle"


@click.command()
@click.option(
    "--routing",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="Routing trace, of steps (replayed as it is) or of requests (needs --arrivals).",
)
@click.option(
    "--arrivals",
    type=click.Path(path_type=Path),
    metavar="CSV",
    help="When requests arrive: TIMESTAMP,ContextTokens,GeneratedTokens (Azure's columns).",
)
@click.option(
    "--compose",
    type=click.Choice(["prefill", "decode"]),
    help="How requests become steps: one-second prefill batches, or synthetic decode steps "
    "[default: prefill].",
)
@click.option("--devices", type=int, default=8, show_default=True, help="Devices.")
@click.option(
    "--policies",
    default=_ALL,
    show_default=True,
    help="Planners by name, and oracle: perfect balance that ignores the gate (lossy).",
)
@click.option(
    "--prediction",
    default="noisy:0.12",
    show_default=True,
    help="How loads are expected: noisy:SIGMA, exact or recorded look ahead; previous and ewma "
    "look back.",
)
@click.option("--distance", type=int, help="Layers looked ahead [default: 1, or as recorded].")
@click.option(
    "--cost-model",
    default="paper",
    show_default=True,
    help="How long layers take: paper, h200, a6000, or a JSON file.",
)
@click.option(
    "--device-preset",
    type=click.Choice(["a6000", "h200", "cpu"]),
    help="Memory and links of the devices [default: the cost model's, else a6000].",
)
@click.option(
    "--device-speeds",
    metavar="S,S,...",
    help="Relative speed of each device, such as 1,1,0.5,0.5: device times are divided by it "
    "[default: all equal].",
)
@click.option(
    "--expert-shape",
    metavar="HIDDENxINTER",
    help="Shape of the experts, bfloat16 [default: that of the trace's model, if it is known].",
)
@click.option(
    "--memory-factor",
    default="2.0",
    show_default=True,
    metavar="F|auto",
    help="Mean warm replicas per expert that a policy may hold; auto lets moeless choose.",
)
@click.option(
    "--device-memory",
    metavar="SIZE",
    help="Memory for experts on each device, such as 48GB [default: the preset's, or more where "
    "the memory factor needs it].",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of composition and noise.")
@click.option(
    "--keep-alive",
    type=float,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How long idle experts of serverless policies stay on a device.",
)
@click.option(
    "--keep-alive-rule",
    type=click.Choice(["fixed", "histogram"]),
    default="fixed",
    show_default=True,
    help="histogram: each expert of a serverless policy stays for as long as covers 95% of its "
    "own pauses, once there were five; --keep-alive until then.",
)
@click.option(
    "--eplb-interval",
    type=float,
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between plans of eplb.",
)
@click.option(
    "--swift-interval",
    type=float,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between plans of swift.",
)
@click.option(
    "--cv-threshold",
    type=float,
    default=0.2,
    show_default=True,
    help="Replicas are added until their loads vary less than this (paper).",
)
@click.option(
    "--decision-us",
    type=float,
    default=100.0,
    show_default=True,
    help="Simulated time of one planning decision; the same on every machine.",
)
@click.option(
    "--search-ms",
    type=float,
    default=5.0,
    show_default=True,
    help="Simulated time of one search beside planning (moeless).",
)
@click.option(
    "--misc-ms",
    type=float,
    default=0.0,
    show_default=True,
    help="T_misc: time of everything but the experts, per layer.",
)
@click.option(
    "--misc-memory",
    default="0",
    show_default=True,
    metavar="SIZE",
    help="M_misc: other memory that the accounting named paper charges.",
)
@click.option("--max-steps", type=int, metavar="N", help="Replay only the first N steps.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures.")
@click.option(
    "--dump",
    type=click.Path(path_type=Path),
    metavar="OUT.npz",
    help="Write device tokens and replicas of every layer-step.",
)
@click.option(
    "--plots",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Draw layer times, balance and replicas as PNG (needs moeless[replay]).",
)
@click.option(
    "--explain",
    type=(int, int),
    metavar="STEP LAYER",
    help="Say why a layer's replicas were what they were in a step (both from 0).",
)
@click.option(
    "--optimum",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Hold N layer-steps, drawn by the seed, against the best split that their warm replicas "
    "allow, found by linear or mixed-integer programming; up to 2 seconds each (needs "
    "moeless[replay]).",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Policies at a time."
)
@click.option(
    "--progress/--no-progress",
    default=None,
    help="Show how far each policy is [default: on a terminal].",
)
def replay(**options: Any) -> None:
    """Replay a routing trace and compare policies on it, in simulated time.

    The controller, policies and function platform are those of serving; only the clock and the
    devices are simulated. Results depend on the options and the seed alone.

    \b
    Examples:
      moeless replay --routing steps.npz --policies static,moeless
      moeless replay --routing requests.npz --arrivals AzureLLMInferenceTrace_conv.csv \\
          --devices 8 --seed 0 --json out.json --dump out.npz --plots plots/
      moeless replay --routing requests.npz --arrivals azure.csv --compose decode \\
          --cost-model h200 --memory-factor auto
      moeless replay --routing steps.npz --policies moeless --explain 120 3
    """
    from moeless.bootstrap.replays.replay import prepare_replay
    from moeless.bootstrap.replays.replay_runner import metrics_config, run_replay
    from moeless.simulator.metrics import measure_policy
    from moeless.simulator.report import describe_trace, write_report

    json_path, dump, plots = (options.pop(name) for name in ("json_path", "dump", "plots"))
    jobs, progress = options.pop("jobs"), options.pop("progress")
    _check_outputs(json_path, dump, plots, inputs=(options["routing"], options["arrivals"]))
    prepared = prepare_replay(_task(options, keep_replicas=dump is not None))
    with _Bars(prepared.task.policies, len(prepared.trace), shown=progress) as bars:
        recordings = run_replay(prepared, jobs=jobs, progress=bars.update)
    loads_SLE = prepared.trace.loads_NLE
    report = {
        "policies": {
            name: measure_policy(recording, loads_SLE, config=metrics_config(prepared, name))
            for name, recording in recordings.items()
        },
        "trace": describe_trace(prepared.trace, file=prepared.task.routing.name),
        "config": prepared.config(),
    }
    explanations = {
        name: recording.explanation
        for name, recording in recordings.items()
        if recording.explanation is not None
    }
    if explanations:
        report["explanations"] = explanations
    if json_path is not None:
        write_report(report, json_path)
    if dump is not None:
        from moeless.simulator.dump import write_dump

        write_dump(recordings, dump)
    if plots is not None:
        from moeless.simulator.plots import write_plots

        write_plots(recordings, loads_SLE, plots)

    from rich.console import Console

    from moeless.cli.replay_tables import print_explanation, print_report

    console = Console()
    print_report(console, report)
    for name, explanation in explanations.items():
        print_explanation(console, name, explanation)


def _task(options: dict[str, Any], *, keep_replicas: bool) -> "ReplayTask":
    from moeless.bootstrap.policies import PolicyOptions
    from moeless.bootstrap.replays.replay import ReplayTask

    names = [name.strip() for name in options.pop("policies").split(",")]
    memory = options.pop("device_memory")
    return ReplayTask(
        policies=tuple(name for name in names if name),
        options=PolicyOptions(
            memory_factor=parse_memory_factor(options.pop("memory_factor")),
            cv_threshold=options.pop("cv_threshold"),
            eplb_interval_s=options.pop("eplb_interval"),
            swift_interval_s=options.pop("swift_interval"),
        ),
        device_memory_bytes=None
        if memory is None
        else parse_bytes(memory, option="--device-memory"),
        keep_alive_s=options.pop("keep_alive"),
        keep_alive_rule=options.pop("keep_alive_rule"),
        decision_s=options.pop("decision_us") / 1e6,
        search_s=options.pop("search_ms") / 1e3,
        misc_s=options.pop("misc_ms") / 1e3,
        misc_bytes=_parse_misc_memory(options.pop("misc_memory")),
        keep_replicas=keep_replicas,
        **options,
    )


def _parse_misc_memory(text: str) -> int:
    return 0 if text.strip() == "0" else parse_bytes(text, option="--misc-memory")


def _check_outputs(
    json_path: Path | None,
    dump: Path | None,
    plots: Path | None,
    *,
    inputs: tuple[Path | None, ...],
) -> None:
    """Refuse before the work what could not be written after it, or would destroy something."""
    taken = [os.path.realpath(path) for path in inputs if path is not None]
    for option, path in (("--json", json_path), ("--dump", dump)):
        if path is None:
            continue
        if os.path.realpath(path) in taken:
            raise ConfigError(f"{option} {path} would overwrite another file of this replay")
        taken.append(os.path.realpath(path))
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a directory; name a file in it")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: its directory does not exist; make it first")
        if not path.exists() and not os.access(path.absolute().parent, os.W_OK):
            raise ConfigError(f"{option} {path}: its directory cannot be written to; name another")
    if plots is not None:
        from moeless.simulator.plots import require_matplotlib

        require_matplotlib()


class _Bars:
    """One progress bar per policy, on stderr."""

    def __init__(self, names: tuple[str, ...], steps: int, *, shown: bool | None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        console = Console(file=sys.stderr)
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not (console.is_terminal if shown is None else shown),
        )
        self._tasks = {
            name: self._progress.add_task(name, total=steps, start=False) for name in names
        }

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, name: str, steps: int) -> None:
        """A policy has done so many steps."""
        task = self._tasks[name]
        self._progress.start_task(task)
        self._progress.update(task, completed=steps)
