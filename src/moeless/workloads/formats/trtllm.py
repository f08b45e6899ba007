"""Reads TensorRT-LLM's expert statistics, a directory.

``meta_info.json`` has ``num_experts`` and ``num_experts_per_token``; each ``rank{r}.safetensors``
has one vector [experts] per key ``{iteration}_{layer}`` with the ids that this rank's tokens chose
(logical experts, absolute layers). ``rank{r}_raw.safetensors`` holds ids and is not needed.

Source: NVIDIA/TensorRT-LLM, ``tensorrt_llm/_torch/expert_statistic.py`` and
``examples/wide_ep/ep_load_balancer/utils.py``.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.workloads.formats.checks import as_counts, refuse_missing_layers, sum_steps
from moeless.workloads.formats.expert_loads import ExpertLoads
from moeless.workloads.formats.safetensors_file import read_safetensors
from moeless.workloads.formats.sglang import read_json

META = "meta_info.json"


def read_trtllm_loads(path: Path) -> ExpertLoads:
    """Add up all ranks and iterations.

    Args:
        path: The directory (``EXPERT_STATISTIC_PATH``).

    Raises:
        TraceError: A rank, an iteration or a layer is missing, or the counts are of slots.
    """
    source = f"{path.name} (TensorRT-LLM)"
    if not (path / META).is_file():
        raise TraceError(
            f"{source}: no {META} in {path}; give the EXPERT_STATISTIC_PATH directory"
        )
    meta = read_json(path / META)
    experts = _positive(meta, "num_experts", source)
    top_k = _positive(meta, "num_experts_per_token", source)
    total: dict[tuple[int, int], NDArray[np.int64]] = {}
    for file in _rank_files(path, source):
        for key, counts in read_safetensors(file).items():
            place = _parse_key(key, file.name)
            vector = _vector(counts, experts, f"{source}: {file.name}, {key}")
            total[place] = total[place] + vector if place in total else vector
    return _assemble(total, experts, top_k, source)


def _rank_files(path: Path, source: str) -> list[Path]:
    found = {}
    for file in path.iterdir():
        if match := re.fullmatch(r"rank(\d{1,6})\.safetensors", file.name):
            found[int(match[1])] = file
    missing = sorted(set(range(max(found, default=0) + 1)) - set(found))
    if missing:
        raise TraceError(
            f"{source}: a partial dump: rank{missing[0]}.safetensors is missing; copy the files "
            f"of all ranks into {path}"
        )
    return [found[rank] for rank in sorted(found)]


def _assemble(
    total: dict[tuple[int, int], NDArray[np.int64]], experts: int, top_k: int, source: str
) -> ExpertLoads:
    if not total:
        raise TraceError(f"{source}: no iteration was recorded; set EXPERT_STATISTIC_ITER_RANGE")
    iterations = sorted({iteration for iteration, _ in total})
    layers = sorted({layer for _, layer in total})
    refuse_missing_layers(layers, source=source)
    counts_SLE = np.zeros((len(iterations), len(layers), experts), dtype=np.int64)
    for step, iteration in enumerate(iterations):
        for row, layer in enumerate(layers):
            if (iteration, layer) not in total:
                raise TraceError(
                    f"{source}: iteration {iteration} has no layer {layer}; other iterations do"
                )
            counts_SLE[step, row] = total[iteration, layer]
    loads_LE, steps = sum_steps(counts_SLE, source=source)
    return ExpertLoads(
        loads_LE=loads_LE, layer_ids=tuple(layers), source=source, steps=steps, top_k=top_k
    )


def _vector(counts: NDArray[np.generic], experts: int, where: str) -> NDArray[np.int64]:
    if counts.ndim != 1:
        raise TraceError(f"{where}: shape {counts.shape}, expected [experts]")
    if len(counts) != experts:
        kind = "physical slots, not logical experts" if len(counts) > experts else "a part of them"
        raise TraceError(f"{where}: {len(counts)} counts for {experts} experts: {kind}")
    return as_counts(counts, source=where).astype(np.int64)


def _parse_key(key: str, file: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})_(\d{1,6})", key)
    if match is None:
        raise TraceError(f"{file}: key {key!r} is not ITERATION_LAYER")
    return int(match[1]), int(match[2])


def _positive(meta: object, key: str, source: str) -> int:
    value = meta.get(key) if isinstance(meta, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TraceError(f"{source}: {META} has {key} {value!r}, expected a positive number")
    return value
