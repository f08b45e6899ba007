"""Reads counts from a bare array: [layers, experts], or [n, layers, experts] added up.

The former is what ``np.save`` or ``torch.save`` of a matrix of loads gives. The latter is
MoE-Infinity's expert activation trace: each of the n entries has the tokens of one sequence,
unused entries are zero. Expert ids have three dimensions, too (``vllm``), hence ``holds_ids``.

Source: EfficientMoE/MoE-Infinity, ``moe_infinity/memory/expert_tracer.py``.
"""

import struct
import tokenize
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.workloads.formats.checks import as_counts, drop_dense_layers, sum_steps
from moeless.workloads.formats.expert_loads import Declared, ExpertLoads
from moeless.workloads.formats.table_checks import refuse_odd_table

_MAX_ID: Final = 1023
"""Larger numbers are counts; routers choose among some hundred experts."""

_SAMPLE: Final = 64
"""Entries that are looked at, and numbers from which on ids should have a small one."""


def read_npy(path: Path) -> NDArray[np.generic]:
    """Read the array of an ``.npy`` file, never an object.

    Args:
        path: The file.

    Raises:
        TraceError: Damaged, larger than memory, or it holds pickled objects.
    """
    try:
        with path.open("rb") as file:
            array: NDArray[np.generic] = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, struct.error, tokenize.TokenError) as error:
        if "object" in str(error).lower():
            raise TraceError(
                f"{path.name}: holds pickled objects, which can run code; save plain arrays of "
                f"numbers"
            ) from error
        raise TraceError(f"{path.name}: damaged .npy file: {error}") from error
    except MemoryError as error:
        raise TraceError(f"{path.name}: does not fit into memory; sum up its steps") from error
    return array


def as_array(values: Any, *, source: str) -> NDArray[np.generic]:
    """An array of what a JSON or ``.pt`` file holds.

    Raises:
        TraceError: Rows of unequal length, or anything that is no array of numbers.
    """
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise TraceError(
            f"{source}: rows of unequal length; expected [layers, experts]"
        ) from error
    if array.dtype.kind not in "iuf":
        raise TraceError(f"{source}: holds no array of numbers; expected [layers, experts]")
    return array


def holds_ids(array: NDArray[np.generic], num_experts: int | None = None) -> bool:
    """Whether an array is of experts' ids [tokens, layers, top_k], not of counts.

    The experts of a token differ from each other, and one of small number is always among them.
    Counts of an entry have the same sum in all layers, since every token passes all of them.

    Args:
        array: Any array.
        num_experts: E, if it is known.
    """
    if array.ndim != 3 or array.size == 0 or array.dtype.kind not in "iu":
        return False
    computed_TLK = array[(array != -1).any(axis=(1, 2))]
    if not len(computed_TLK):
        return bool(array.shape[2] != num_experts)
    highest = int(computed_TLK.max())
    if array.shape[2] == num_experts or highest > _MAX_ID:
        return False
    if computed_TLK.size >= _SAMPLE and int(computed_TLK.min()) > highest // 4:
        return False
    sample = computed_TLK[:_SAMPLE]
    sums_TL = sample.sum(axis=2, dtype=np.int64)
    same_TL = (sums_TL == sums_TL.max(axis=1, keepdims=True)) | (sums_TL == 0)
    if array.shape[1] > 1 and sums_TL.any() and same_TL.all():
        return False
    ordered = np.sort(sample.reshape(-1, array.shape[2]), axis=1)
    distinct = (ordered[:, 1:] != ordered[:, :-1]).all(axis=1).mean()
    return array.dtype == np.int16 or bool(distinct > 0.5)


def loads_of_array(
    array: NDArray[np.generic], declared: Declared, *, name: str, format_name: str | None = None
) -> ExpertLoads:
    """Loads from counts.

    Args:
        array: [layers, experts] or [n, layers, experts].
        declared: The model.
        name: The file.
        format_name: ``array`` or ``moe-infinity`` where only that will do.

    Raises:
        TraceError: Another shape, values that are no counts, or a matrix that is hardly of loads.
    """
    allowed = {"array": (2,), "moe-infinity": (3,)}.get(format_name or "", (2, 3))
    source = f"{name} ({'MoE-Infinity' if array.ndim == 3 else 'array'})"
    if array.ndim not in allowed or array.size == 0:
        forms = {2: "[layers, experts]", 3: "[sequences, layers, experts]"}
        raise TraceError(
            f"{name}: shape {array.shape}, expected {' or '.join(forms[n] for n in allowed)}"
        )
    counts = as_counts(array, source=source)
    loads_LE, steps = sum_steps(counts if counts.ndim == 3 else counts[None], source=source)
    loads_LE, layer_ids = drop_dense_layers(loads_LE, range(len(loads_LE)), source=source)
    loads = ExpertLoads(loads_LE=loads_LE, layer_ids=layer_ids, source=source, steps=steps)
    if array.ndim == 2:
        refuse_odd_table(loads, declared, layers_named=False, experts_named=False)
    return loads
