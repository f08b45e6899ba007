"""Opens the recording that predictors are fitted to or judged by, making it first if need be."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moeless.bootstrap.recording.record import RecordReport, record_routing
from moeless.bootstrap.recording.record_config import RecordConfig
from moeless.config import EngineConfig, ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.errors import ConfigError
from moeless.learned.shards import MANIFEST_FILE, GateShards


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How to record where a model is named instead of a recording.

    Args:
        prompts: Where prompts come from, as ``moeless record`` takes it; None refuses models.
        gate_inputs: Directory to record to, continued if it holds a part; None forgets the
            recording at the end.
        max_recorded_tokens: Tokens to record.
        max_tokens: Tokens to generate for each prompt at the most.
        layer_inputs: Whether layer inputs are recorded as well.
        seed: Shuffles the prompts.
        devices: Where experts run.
    """

    prompts: str | None = None
    gate_inputs: Path | None = None
    max_recorded_tokens: int = 16_384
    max_tokens: int = 32
    layer_inputs: bool = False
    seed: int = 0
    devices: str = "cpu:1"


@contextmanager
def open_source(
    source: str,
    options: SourceOptions,
    *,
    progress: Callable[[str], None] = lambda _: None,
    on_recorded: Callable[[int, int], None] = lambda *_: None,
) -> Iterator[GateShards]:
    """Open a recording, or make one of a model.

    Args:
        source: A directory that ``moeless record --gate-inputs`` wrote, or a model as
            ``moeless record`` takes it.
        options: How to record a model.
        progress: Told what happens before the first prompt.
        on_recorded: Told how many tokens are recorded, and of how many.

    Raises:
        ConfigError: It is a model, and no prompts are named.
        TraceError: The recording is damaged, or nothing could be recorded.
        MoelessError: Something is wrong with the model.
        KeyboardInterrupt: Interrupted while recording.
    """
    if (Path(source) / MANIFEST_FILE).is_file():
        yield GateShards(source)
        return
    if options.prompts is None:
        raise ConfigError(
            f"{source} holds no recorded gate inputs; give a directory that moeless record "
            "--gate-inputs wrote, or a model and --prompts to record with"
        )
    with tempfile.TemporaryDirectory(prefix="moeless-gate-inputs-") as scratch:
        directory = options.gate_inputs or Path(scratch) / "recording"
        _record(source, directory, options, progress, on_recorded)
        yield GateShards(directory)


def _record(
    model: str,
    directory: Path,
    options: SourceOptions,
    progress: Callable[[str], None],
    on_recorded: Callable[[int, int], None],
) -> None:
    assert options.prompts is not None
    experts = ExpertsConfig(
        devices=parse_devices(options.devices),
        invoker="inline",
        policy=PolicyConfig(policy="static", predictor="previous", memory_factor=1.0),
    )
    config = RecordConfig(
        prompts=options.prompts,
        gate_inputs=directory,
        layer_inputs=options.layer_inputs,
        max_recorded_tokens=options.max_recorded_tokens,
        max_tokens=options.max_tokens,
        seed=options.seed,
        resume=True,
    )

    def tell(report: RecordReport) -> None:
        if report.gate_inputs is not None:
            on_recorded(report.gate_inputs.tokens, options.max_recorded_tokens)

    report = record_routing(
        EngineConfig(model=model, max_batch_size=16, max_waiting=32),
        experts,
        config,
        progress=progress,
        on_progress=tell,
    )
    if report.feed.interrupted:
        raise KeyboardInterrupt
