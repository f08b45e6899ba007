"""Wires a recording: an engine on prompts, and a recorder that makes a routing trace of it."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from moeless.bootstrap.engine import Progress, RunningEngine, start_engine
from moeless.bootstrap.prompt_feed import FeedState, PromptFeeder
from moeless.config import EngineConfig, ExpertsConfig
from moeless.core.generation import SamplingParams
from moeless.errors import ConfigError, EngineError, TraceError
from moeless.workloads.prompts import read_prompts
from moeless.workloads.recording.ledgers import RequestLedger, RoutedShape, StepLedger
from moeless.workloads.recording.recorder import RoutingRecorder
from moeless.workloads.routing_trace import RoutingTrace, write_trace
from moeless.workloads.trace_meta import Unit

_LICENCES = {"arena": "Apache-2.0 (the prompts' licence)"}
_VERSIONS = ("moeless", "torch", "transformers", "numpy")


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What to record.

    Args:
        prompts: Where prompts come from, as ``read_prompts`` takes it.
        out: The trace; a file that is there is replaced.
        limit: Prompts at the most.
        max_tokens: Tokens to generate for each at the most.
        unit: What one entry of the trace is.
        topk_ids: Whether the experts of every token are kept as well.
        raw: Continue prompts as they are, even if the model has a chat template.
        temperature: 0 is greedy.
        seed: Shuffles the prompts and makes sampling repeatable; None keeps the prompts' order.
        licence: What the trace says of its licence; None says what is known of the prompts'.

    Raises:
        ConfigError: A number is out of range.
    """

    prompts: str
    out: Path
    limit: int | None = None
    max_tokens: int = 128
    unit: Unit = "steps"
    topk_ids: bool = False
    raw: bool = False
    temperature: float = 0.0
    seed: int | None = None
    licence: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is {self.limit}; record at least 1 prompt")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; generate at least 1")


@dataclass(frozen=True, kw_only=True)
class RecordReport:
    """How a recording went, or how far it is.

    Args:
        prompts: Prompts that were to be recorded.
        feed: What became of them.
        entries: Entries of the trace.
        steps: Engine steps seen.
        tokens: Tokens computed in them.
        decode_tokens: How many of those were decoded.
    """

    prompts: int
    feed: FeedState
    entries: int
    steps: int
    tokens: int
    decode_tokens: int


def record_routing(
    engine: EngineConfig,
    experts: ExpertsConfig,
    config: RecordConfig,
    *,
    progress: Progress = lambda _: None,
    on_progress: Callable[[RecordReport], None] = lambda _: None,
) -> RecordReport:
    """Answer prompts with a model and write where its gates sent the tokens.

    Up to ``engine.max_batch_size`` prompts run at the same time, and as many wait. SIGINT ends
    the recording early; what is whole is written.

    Args:
        engine: The engine; it must let twice ``max_batch_size`` requests wait.
        experts: The experts.
        config: What to record.
        progress: Told what happens before the first prompt.
        on_progress: Told after each prompt.

    Raises:
        TraceError: Prompts cannot be read, or nothing could be recorded.
        ConfigError: The trace cannot be written there.
        EngineError: The model failed on a prompt; what was recorded before is written.
        KeyboardInterrupt: Interrupted before anything was whole.
        MoelessError: Something is wrong with the model, the options or the machine.
    """
    check_output(config.out)
    prompts = select_prompts(config)
    running = start_engine(engine, experts, progress=progress)
    try:
        with _attached_recorder(running, config) as recorder:
            feeder = PromptFeeder(
                running.engine,
                recorder,
                sampling=SamplingParams(
                    max_tokens=config.max_tokens, temperature=config.temperature, seed=config.seed
                ),
                raw=config.raw,
                on_progress=lambda state: on_progress(_report(recorder, len(prompts), state)),
            )
            state = feeder.feed(prompts, at_once=2 * engine.max_batch_size)
            recorder.stop()
            running.close_engine()
            report = _report(recorder, len(prompts), state)
            _require_entries(report)
            write_trace(_make_trace(recorder, running, engine, config, report), config.out)
    finally:
        running.close()
    if state.failure is not None:
        raise EngineError(
            f"{state.failure}; {config.out} holds the {report.entries} {config.unit} before it"
        ) from state.failure
    return report


def check_output(path: Path) -> None:
    """Refuse an output file that could not be written, before any work is done.

    Raises:
        ConfigError: It is a directory, or its folder is missing or cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"--out {path} is a directory; name a file, such as trace.npz")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path}: there is no directory {path.parent}; create it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out {path}: {path.parent} cannot be written ({error.strerror or error}); choose "
            "another directory"
        ) from error


def select_prompts(config: RecordConfig) -> list[str]:
    """The prompts to record, in their order.

    Raises:
        TraceError: They cannot be read, or there are none.
    """
    if config.seed is None:
        return read_prompts(config.prompts, config.limit)
    prompts = read_prompts(config.prompts)
    order = np.random.default_rng(config.seed).permutation(len(prompts))
    return [prompts[i] for i in order[: config.limit]]


@contextmanager
def _attached_recorder(running: RunningEngine, config: RecordConfig) -> Iterator[RoutingRecorder]:
    from moeless.engines.transformers.generation.engine import TransformersTextEngine

    engine, dispatcher, spec = running.engine, running.experts.dispatcher, running.experts.spec
    assert isinstance(engine, TransformersTextEngine)
    shape = RoutedShape(num_layers=spec.num_layers, num_experts=spec.num_experts, top_k=spec.top_k)
    make_ledger = StepLedger if config.unit == "steps" else RequestLedger
    ledger = make_ledger(shape, topk_ids=config.topk_ids, folder=config.out.parent)
    recorder = RoutingRecorder(shape, ledger)
    dispatcher.observe_choices(recorder.observe)
    engine.record_steps(recorder)
    try:
        yield recorder
    finally:
        engine.record_steps(None)
        dispatcher.observe_choices(None)
        recorder.close()


def _report(recorder: RoutingRecorder, prompts: int, state: FeedState) -> RecordReport:
    return RecordReport(
        prompts=prompts,
        feed=state,
        entries=len(recorder),
        steps=recorder.steps,
        tokens=recorder.tokens,
        decode_tokens=recorder.decode_tokens,
    )


def _require_entries(report: RecordReport) -> None:
    if report.entries:
        return
    if report.feed.failure is not None:
        raise report.feed.failure
    if report.feed.interrupted:
        raise KeyboardInterrupt
    raise TraceError(
        f"none of the {report.prompts} prompts could be recorded: {report.feed.skip_reason}"
    )


def _make_trace(
    recorder: RoutingRecorder,
    running: RunningEngine,
    engine: EngineConfig,
    config: RecordConfig,
    report: RecordReport,
) -> RoutingTrace:
    spec = running.experts.spec
    source = Path(config.prompts).name  # where it lies on this machine is nobody's business
    settings = {
        name: value
        for name, value in asdict(config).items()
        if name not in ("prompts", "out", "licence")
    }
    recorded: dict[str, Any] = {
        "model": spec.model_id,
        "family": spec.family,
        "dtype": spec.expert.dtype,
        "versions": {name: version(name) for name in _VERSIONS},
        "prompts": source,
        **settings,
        "concurrency": engine.max_batch_size,
        "prefill_chunk_tokens": engine.prefill_chunk_tokens,
        "max_model_len": running.engine.max_model_len,
        "prompts_chosen": report.prompts,
        "prompts_finished": report.feed.finished,
        "prompts_skipped": report.feed.skipped,
        "interrupted": report.feed.interrupted,
    }
    return recorder.trace(
        model=spec.model_id,
        layer_ids=spec.layer_ids,
        unit=config.unit,
        group=source,
        source=f"recorded with moeless on the prompts {source}",
        licence=config.licence or _LICENCES.get(source, "not stated"),
        extra={"recorded": recorded},
    )
