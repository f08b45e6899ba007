"""Continuous batching over any transformers causal language model.

Read ``engine`` (threads and limits), then ``step_loop`` (one step), ``batch_cache`` (rows that
join and leave), ``scheduler``, ``sampler``, ``detokenizer`` and ``streams``. Nothing here knows
how experts are served.
"""

from moeless.engines.transformers.generation.engine import TransformersTextEngine
from moeless.engines.transformers.generation.observer import (
    GenerationObserver,
    Phase,
    StepMarker,
    StepPart,
    StepRecorder,
)
from moeless.engines.transformers.generation.options import EngineOptions

__all__ = [
    "EngineOptions",
    "GenerationObserver",
    "Phase",
    "StepMarker",
    "StepPart",
    "StepRecorder",
    "TransformersTextEngine",
]
