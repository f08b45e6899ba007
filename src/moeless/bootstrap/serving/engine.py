"""Wires a text engine whose experts are functions: model, experts, step loop."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moeless.config import EngineConfig, ExpertsConfig
from moeless.errors import ModelError

if TYPE_CHECKING:
    from moeless.bootstrap.serving.experts import ExpertsRuntime
    from moeless.core.generation import TextEngine
    from moeless.telemetry.engine_metrics import EngineMetrics
    from moeless.telemetry.tracing import Tracing

DEMO_MODEL = "demo"

Progress = Callable[[str], None]
"""Told what happens now, in a few words."""


@dataclass(kw_only=True)
class RunningEngine:
    """A text engine and its experts.

    Args:
        engine: Generates text.
        experts: The functions behind it.
    """

    engine: "TextEngine"
    experts: "ExpertsRuntime"
    close_engine: Callable[[], None]

    def close(self) -> None:
        """Stop generating, then stop the experts."""
        self.close_engine()
        self.experts.close()


def prepare_process(experts: ExpertsConfig) -> None:
    """Set what must be set before torch is first imported.

    With workers on the same cores, idle compute threads of the engine must sleep: threads that
    wait actively take the cores from the workers.
    """
    if experts.invoker == "process" and "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("GOMP_SPINCOUNT", "0")


def _default_threads(experts: ExpertsConfig) -> int:
    """Half of the cores beside CPU workers.

    Threads that wait for each other on cores that others use as well slow each other down.
    """
    cores = len(os.sched_getaffinity(0))
    beside_workers = experts.pool is not None or (
        experts.invoker == "process" and experts.devices[0].kind == "cpu"
    )
    return max(1, cores // 2) if beside_workers else cores


def find_model(name: str, *, progress: Progress = lambda _: None) -> Path:
    """The directory of a model; ``demo`` is built when it is missing.

    Args:
        name: A directory, a hub id, or ``demo``.
        progress: Told what happens.

    Raises:
        CheckpointError: It cannot be found.
    """
    if name == DEMO_MODEL:
        from moeless.engines.demo import ensure_demo_model

        progress("finding the demo model (built the first time)")
        seen: set[str] = set()

        def tell(stage: str, _done: int, _total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                progress(f"demo model: {stage}")

        return ensure_demo_model(progress=tell)
    from moeless.engines.transformers.resolve import resolve_model

    return resolve_model(name)


def served_model_id(config: EngineConfig) -> str:
    """The id that clients must send: the one asked for, or the last part of the model's name."""
    return config.model_id or Path(config.model).expanduser().resolve().name


def start_engine(
    config: EngineConfig,
    experts: ExpertsConfig,
    *,
    progress: Progress = lambda _: None,
    metrics: "EngineMetrics | None" = None,
    tracing: "Tracing | None" = None,
) -> RunningEngine:
    """Load a model, start its experts and the step loop.

    Args:
        config: The engine.
        experts: The experts.
        progress: Told what happens, and later when a predictor is replaced.
        metrics: Told of steps and sequences, or None.
        tracing: Shows some steps of the requests that it traces, or None.

    Raises:
        MoelessError: Something is wrong with the model, the options or the machine.
    """
    if config.model != DEMO_MODEL:
        from moeless.engines.transformers.resolve import check_model_name

        check_model_name(config.model)  # a typo is told before libraries have been loaded
    prepare_process(experts)
    import torch

    from moeless.bootstrap.serving.engine_observer import MeteringObserver
    from moeless.bootstrap.serving.experts import check_experts_config, start_experts
    from moeless.bootstrap.serving.step_tracing import trace_steps
    from moeless.engines.transformers.generation.engine import TransformersTextEngine
    from moeless.engines.transformers.generation.options import EngineOptions
    from moeless.engines.transformers.loader import load_engine_model

    check_experts_config(experts)
    directory = find_model(config.model, progress=progress)
    torch.set_num_threads(config.threads or _default_threads(experts))
    progress("loading everything but the experts")
    loaded = load_engine_model(directory, dtype=config.dtype, model_id=served_model_id(config))
    if loaded.tokenizer is None:
        raise ModelError(f"{directory} has no tokenizer; add tokenizer.json and its configuration")
    progress("starting expert workers")
    runtime = start_experts(loaded, experts, tell=progress)
    try:
        tracer = None if tracing is None else trace_steps(loaded, runtime, tracing)
        engine = TransformersTextEngine(
            loaded.model,
            loaded.tokenizer,
            model_id=loaded.spec.model_id,
            options=EngineOptions(
                max_batch_size=config.max_batch_size,
                max_waiting=config.max_waiting,
                max_model_len=config.max_model_len,
                prefill_chunk_tokens=config.prefill_chunk_tokens,
            ),
            observer=None if metrics is None else MeteringObserver(metrics),
        )
        engine.record_steps(tracer)
    except BaseException:
        runtime.close()
        raise
    return RunningEngine(engine=engine, experts=runtime, close_engine=engine.close)
