"""Reads vLLM's routed-experts captures, arrays of expert ids.

With ``--enable-return-routed-experts`` a request returns ``prompt_routed_experts`` and, per
completion, ``routed_experts``: integers [tokens, layers, top_k], int16 in most versions. Tokens
taken from the prefix cache are marked with -1. In versions that index by absolute layer, dense
layers stay 0.

Source: vllm-project/vllm, ``docs/training/routed_experts_replay.md``.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.workloads.formats.arrays import read_npy
from moeless.workloads.formats.checks import drop_dense_layers
from moeless.workloads.formats.expert_loads import Declared, ExpertLoads
from moeless.workloads.npz_archive import read_arrays

NAMES = ("routed_experts", "prompt_routed_experts")


def read_vllm_loads(path: Path, declared: Declared) -> ExpertLoads:
    """Count the ids of a capture.

    Args:
        path: ``.npy`` with one array, or ``.npz`` with ``routed_experts`` and, if there,
            ``prompt_routed_experts``.
        declared: The model; its number of experts must be known, the ids do not tell it.

    Raises:
        TraceError: Not ids, physical ids, dummy tokens, or the number of experts is not known.
    """
    return count_ids(_read(path), declared, name=path.name)


def count_ids(
    arrays: Mapping[str, NDArray[np.generic]], declared: Declared, *, name: str
) -> ExpertLoads:
    """Count the ids of arrays; see ``read_vllm_loads``.

    Args:
        arrays: Ids [tokens, layers, top_k] by what they are of.
        declared: The model.
        name: The file.
    """
    source = f"{name} (vLLM)"
    if not arrays:
        raise TraceError(f"{source}: has neither {' nor '.join(NAMES)}")
    if declared.num_experts is None:
        raise TraceError(
            f"{source}: ids do not tell how many experts the model has; give --experts or --model "
            f"(or --format moe-infinity if these are counts)"
        )
    shapes = {array.shape[1:] for array in arrays.values()}
    if len(shapes) != 1:
        raise TraceError(f"{source}: prompt and completion differ in layers or top-k: {shapes}")
    ids_TLK = np.concatenate([_checked(array, source) for array in arrays.values()])
    computed_T: NDArray[np.bool_] = (ids_TLK != -1).any(axis=(1, 2))
    ids_TLK = ids_TLK[computed_T]
    if not len(ids_TLK):
        raise TraceError(f"{source}: no token was computed (all came from the prefix cache)")
    _refuse_bad_ids(ids_TLK, declared.num_experts, source)
    counts_LE = _count(ids_TLK, declared.num_experts)
    counts_LE[_alike_TL(ids_TLK).all(axis=0)] = 0
    loads_LE, layer_ids = drop_dense_layers(counts_LE, range(len(counts_LE)), source=source)
    return ExpertLoads(
        loads_LE=loads_LE,
        layer_ids=layer_ids,
        source=source,
        steps=len(arrays),
        top_k=ids_TLK.shape[2],
    )


def _read(path: Path) -> dict[str, NDArray[np.generic]]:
    with path.open("rb") as file:
        single = file.read(6) == b"\x93NUMPY"
    return {NAMES[0]: read_npy(path)} if single else read_arrays(path, NAMES)


def _checked(array: NDArray[np.generic], source: str) -> NDArray[np.int64]:
    if array.ndim != 3 or array.size == 0 or array.dtype.kind not in "iu":
        raise TraceError(
            f"{source}: {array.dtype} {array.shape} is not a capture; expected integers "
            f"[tokens, layers, top_k]"
        )
    return array.astype(np.int64)


def _alike_TL(ids_TLK: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where all K > 1 ids of a token are one and the same, which no router chooses."""
    if ids_TLK.shape[2] == 1:
        return np.zeros(ids_TLK.shape[:2], dtype=np.bool_)
    alike: NDArray[np.bool_] = (ids_TLK == ids_TLK[:, :, :1]).all(axis=2)
    return alike


def _refuse_bad_ids(ids_TLK: NDArray[np.int64], experts: int, source: str) -> None:
    if ids_TLK.max() >= experts:
        token, layer, _ = np.argwhere(ids_TLK >= experts)[0]
        raise TraceError(
            f"{source}: token {token}, layer {layer}: id {ids_TLK.max()} with {experts} logical "
            f"experts: these are ids of physical slots; capture logical ids"
        )
    if ids_TLK.min() < 0:
        token, layer, _ = np.argwhere(ids_TLK < 0)[0]
        raise TraceError(f"{source}: token {token}, layer {layer}: id {ids_TLK.min()} is negative")
    alike_TL = _alike_TL(ids_TLK)
    routed_L = np.asarray(~alike_TL.all(axis=0))
    dummy_T = np.asarray((alike_TL & routed_L).any(axis=1) | alike_TL.all(axis=1))
    if dummy_T.any():
        raise TraceError(
            f"{source}: token {np.argmax(dummy_T)} of {len(dummy_T)}: the same id "
            f"{ids_TLK.shape[2]} times over, so it is padding or a warm-up dummy "
            f"({np.count_nonzero(dummy_T)} such tokens); leave them out"
        )
    ordered = np.sort(ids_TLK[:, routed_L], axis=2)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        raise TraceError(f"{source}: a token has one expert twice; these are not a router's ids")


def _count(ids_TLK: NDArray[np.int64], experts: int) -> NDArray[np.int64]:
    layers = ids_TLK.shape[1]
    flat = ids_TLK + experts * np.arange(layers)[None, :, None]
    return np.bincount(flat.ravel(), minlength=layers * experts).reshape(layers, experts)
