"""Wires a recording: an engine on prompts, and a recorder of where its gates send the tokens.

What is recorded becomes a routing trace, shards of gate inputs, or both.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeless.bootstrap.recording.prompt_feed import FeedState, PromptFeeder, prompt_number
from moeless.bootstrap.recording.record_config import RecordConfig, check_outputs
from moeless.bootstrap.serving.engine import Progress, RunningEngine, start_engine
from moeless.config import EngineConfig, ExpertsConfig
from moeless.core.generation import SamplingParams
from moeless.errors import EngineError, TraceError
from moeless.workloads.prompts import read_prompts
from moeless.workloads.recording.ledgers import Ledger, RequestLedger, RoutedShape, StepLedger
from moeless.workloads.recording.recorder import RoutingRecorder
from moeless.workloads.routing_trace import RoutingTrace, write_trace

if TYPE_CHECKING:
    from moeless.bootstrap.recording.gate_inputs import GateInputRecording, GateInputReport
    from moeless.engines.transformers.generation.engine import TransformersTextEngine

_LICENCES = {"arena": "Apache-2.0 (the prompts' licence)"}
_TRACE_SETTINGS = ("limit", "max_tokens", "unit", "topk_ids", "raw", "temperature", "seed")
_VERSIONS = ("moeless", "torch", "transformers", "numpy")


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
        gate_inputs: How far the recording of gate inputs is, if there is one.
    """

    prompts: int
    feed: FeedState
    entries: int
    steps: int
    tokens: int
    decode_tokens: int
    gate_inputs: "GateInputReport | None" = None


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
    the recording early; what is whole is written. So does a bound of the gate inputs.

    Args:
        engine: The engine; it must let twice ``max_batch_size`` requests wait.
        experts: The experts.
        config: What to record.
        progress: Told what happens before the first prompt.
        on_progress: Told after each prompt.

    Raises:
        TraceError: Prompts cannot be read, nothing could be recorded, or gate inputs that are
            there cannot be continued.
        ConfigError: The trace or the gate inputs cannot be written there.
        EngineError: The model failed on a prompt; what was recorded before is written.
        KeyboardInterrupt: Interrupted before anything was whole.
        MoelessError: Something is wrong with the model, the options or the machine.
    """
    check_outputs(config)
    prompts = select_prompts(config)
    running = start_engine(engine, experts, progress=progress)
    try:
        with _attached_recorder(running, engine, config) as (recorder, gate_inputs):
            feeder = PromptFeeder(
                running.engine,
                recorder,
                sampling=SamplingParams(
                    max_tokens=config.max_tokens, temperature=config.temperature, seed=config.seed
                ),
                raw=config.raw,
                on_progress=lambda state: on_progress(
                    _report(recorder, len(prompts), state, gate_inputs)
                ),
                is_full=(lambda: False) if gate_inputs is None else gate_inputs.is_full,
            )
            state = feeder.feed(
                prompts,
                at_once=2 * engine.max_batch_size,
                already=() if gate_inputs is None else gate_inputs.already,
            )
            recorder.stop()
            running.close_engine()
            report = _report(recorder, len(prompts), state, gate_inputs)
            if gate_inputs is not None:
                ended_well = not state.interrupted and state.failure is None
                report = replace(report, gate_inputs=gate_inputs.close(complete=ended_well))
            _require_entries(report)
            if config.out is not None:
                write_trace(_make_trace(recorder, running, engine, config, report), config.out)
    finally:
        running.close()
    if state.failure is not None:
        raise EngineError(f"{state.failure}; {_describe_kept(config, report)}") from state.failure
    return report


def _describe_kept(config: RecordConfig, report: RecordReport) -> str:
    kept = []
    if config.out is not None:
        kept.append(f"{config.out} holds the {report.entries} {config.unit} before it")
    if report.gate_inputs is not None:
        kept.append(
            f"{config.gate_inputs} holds {report.gate_inputs.tokens} tokens of "
            f"{report.gate_inputs.conversations} conversations, to continue with --resume"
        )
    return "; ".join(kept)


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
def _attached_recorder(
    running: RunningEngine, engine: EngineConfig, config: RecordConfig
) -> Iterator[tuple[RoutingRecorder, "GateInputRecording | None"]]:
    from moeless.engines.transformers.gate_access import observed_layer_inputs
    from moeless.engines.transformers.generation.engine import TransformersTextEngine

    text_engine, spec = running.engine, running.experts.spec
    assert isinstance(text_engine, TransformersTextEngine)
    shape = RoutedShape(num_layers=spec.num_layers, num_experts=spec.num_experts, top_k=spec.top_k)
    gate_inputs = None
    if config.gate_inputs is not None:
        gate_inputs = _open_gate_inputs(running, text_engine, engine, config)
    recorder = RoutingRecorder(
        shape,
        _make_ledger(config, shape),
        keepers=() if gate_inputs is None else (gate_inputs.ledger,),
        states=() if gate_inputs is None else gate_inputs.states,
    )
    dispatcher = running.experts.dispatcher
    with ExitStack() as attached:
        attached.callback(recorder.close)
        if gate_inputs is None:
            dispatcher.observe_choices(lambda layer, ids_TK, _: recorder.observe(layer, ids_TK))
            attached.callback(dispatcher.observe_choices, None)
        else:
            attached.enter_context(
                gate_inputs.attach(
                    recorder,
                    dispatcher,
                    lambda tell: observed_layer_inputs(text_engine.model, spec.layer_ids, tell),
                )
            )
        text_engine.record_steps(recorder)
        attached.callback(text_engine.record_steps, None)
        yield recorder, gate_inputs


def _make_ledger(config: RecordConfig, shape: RoutedShape) -> Ledger | None:
    if config.out is None:
        return None
    make_ledger = StepLedger if config.unit == "steps" else RequestLedger
    return make_ledger(shape, topk_ids=config.topk_ids, folder=config.out.parent)


def _open_gate_inputs(
    running: RunningEngine,
    text_engine: "TransformersTextEngine",
    engine: EngineConfig,
    config: RecordConfig,
) -> "GateInputRecording":
    from moeless.bootstrap.recording.gate_inputs import GateInputRecording, make_manifest
    from moeless.engines.transformers.gate_access import find_gates

    assert config.gate_inputs is not None
    spec = running.experts.spec
    gates = find_gates(text_engine.model, spec.layer_ids)
    manifest = make_manifest(
        spec,
        gates,
        prompts={
            "source": Path(config.prompts).name,
            "limit": config.limit,
            "seed": config.seed,
        },
        config={
            "layer_inputs": config.layer_inputs,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "raw": config.raw,
            "max_model_len": text_engine.max_model_len,
            "prefill_chunk_tokens": engine.prefill_chunk_tokens,
            "concurrency": engine.max_batch_size,
            "limits": {
                "max_recorded_tokens": config.max_recorded_tokens,
                "max_disk_bytes": config.max_disk_bytes,
            },
            "versions": {name: version(name) for name in _VERSIONS},
        },
    )
    return GateInputRecording(
        config.gate_inputs,
        manifest,
        gates,
        resume=config.resume,
        max_tokens=config.max_recorded_tokens,
        max_bytes=config.max_disk_bytes,
        number_of=prompt_number,
    )


def _report(
    recorder: RoutingRecorder,
    prompts: int,
    state: FeedState,
    gate_inputs: "GateInputRecording | None",
) -> RecordReport:
    return RecordReport(
        prompts=prompts,
        feed=state,
        entries=len(recorder),
        steps=recorder.steps,
        tokens=recorder.tokens,
        decode_tokens=recorder.decode_tokens,
        gate_inputs=None if gate_inputs is None else gate_inputs.report(),
    )


def _require_entries(report: RecordReport) -> None:
    if report.entries or (report.gate_inputs is not None and report.gate_inputs.tokens):
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
    settings = {name: value for name, value in asdict(config).items() if name in _TRACE_SETTINGS}
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
