"""Reasons to refuse recorded loads: they would give a plan that looks right and is wrong.

This module must not know any file format; readers call the checks that fit theirs.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.workloads.formats.expert_loads import Declared, ExpertLoads, LoadMatrix

_DENSE_SHARE = 0.25
"""Leading layers that may be dense, as a share of all (DeepSeek-V3: 3 of 61)."""

_DUMMY_TOKENS = 4
"""Identical tokens in one step from which on they are taken for a warm-up batch."""


def as_counts(values: NDArray[np.generic], *, source: str) -> LoadMatrix:
    """Turn an array into int64, or into float64 if it has fractions.

    Args:
        values: Any real array.
        source: The file, for messages.

    Raises:
        TraceError: Not numbers.
    """
    if values.dtype.kind in "iu":
        if values.dtype.kind == "u" and values.size and values.max() > np.iinfo(np.int64).max:
            raise TraceError(f"{source}: {values.max()} is not a token count; it exceeds 2^63")
        return values.astype(np.int64)
    if values.dtype.kind != "f":
        raise TraceError(f"{source}: holds {values.dtype} values, expected token counts")
    floats = values.astype(np.float64)
    whole = np.isfinite(floats).all() and (floats == np.floor(floats)).all()
    if whole and (np.abs(floats) <= 2.0**53).all():
        return floats.astype(np.int64)
    return floats


def sum_steps(counts_SLE: LoadMatrix, *, source: str) -> tuple[LoadMatrix, int]:
    """Add up steps, and count those that hold any token.

    Recorders with a ring buffer leave the steps that they have not reached at zero.

    Args:
        counts_SLE: Tokens per step [S, L, E].
        source: The file, for messages.

    Returns:
        Loads [L, E] and the number of steps with tokens (at least 1).

    Raises:
        TraceError: A value is no token count, or a step is a batch of identical dummy tokens.
    """
    good_SLE = counts_SLE >= 0
    if counts_SLE.dtype.kind == "f":
        good_SLE &= np.isfinite(counts_SLE)
    if not good_SLE.all():
        step, layer, expert = np.argwhere(~good_SLE)[0]
        raise TraceError(
            f"{source}: step {step}, layer {layer}, expert {expert}: load "
            f"{counts_SLE[step, layer, expert]} is not a token count; loads are finite and not "
            f"negative"
        )
    refuse_dummy_steps(counts_SLE, source=source)
    if float(counts_SLE.sum(axis=0, dtype=np.float64).max(initial=0.0)) > 2.0**53:
        raise TraceError(f"{source}: an expert's tokens add up to more than 2^53")
    steps = int(np.count_nonzero(counts_SLE.any(axis=(1, 2))))
    return counts_SLE.sum(axis=0), max(steps, 1)


def refuse_dummy_steps(counts_SLE: LoadMatrix, *, source: str) -> None:
    """Refuse a step whose tokens were all routed alike in every layer: a warm-up batch.

    Equal tokens take equal ways. So in a batch of dummies the experts of a layer that have any
    token have all of them, in each layer the same number.

    Args:
        counts_SLE: Tokens per step [S, L, E].
        source: The file, for messages.

    Raises:
        TraceError: A step looks so.
    """
    layers, experts = counts_SLE.shape[1:]
    if layers < 2:
        return
    most_S = counts_SLE.max(axis=(1, 2))
    alike_SLE = (counts_SLE == 0) | (counts_SLE == most_S[:, None, None])
    chosen_SL = np.count_nonzero(counts_SLE, axis=2)
    busy_SL = chosen_SL > 0
    same_S = (chosen_SL == chosen_SL.max(axis=1, keepdims=True)).sum(axis=1) == busy_SL.sum(axis=1)
    dummy_S = (
        (most_S >= _DUMMY_TOKENS)
        & alike_SLE.all(axis=(1, 2))
        & same_S
        & (busy_SL.sum(axis=1) >= 2)
        & (chosen_SL.max(axis=1) < experts)
    )
    if dummy_S.any():
        step = int(np.argmax(dummy_S))
        raise TraceError(
            f"{source}: step {step}: all {most_S[step]:g} tokens go to the same "
            f"{chosen_SL[step].max()} experts in every layer, so they are warm-up dummies and no "
            f"traffic; record after the warm-up, or leave those steps out"
        )


def drop_dense_layers(
    loads_LE: LoadMatrix, layer_ids: Sequence[int], *, source: str
) -> tuple[LoadMatrix, tuple[int, ...]]:
    """Leave out layers that have no experts, and refuse if others have no tokens.

    A recorder that counts by absolute layer leaves dense layers at zero: the first few of a model,
    or all but every n-th. Any other layer without tokens was not recorded.

    Args:
        loads_LE: Tokens [L, E].
        layer_ids: Absolute layers, ascending.
        source: The file, for messages.

    Returns:
        The loads and ids of the MoE layers; all layers where no layer has a token.

    Raises:
        TraceError: Layers are missing.
    """
    busy_L: NDArray[np.bool_] = (loads_LE != 0).any(axis=1)
    if not busy_L.any() or busy_L.all():
        return loads_LE, tuple(layer_ids)
    kept = tuple(layer for layer, busy in zip(layer_ids, busy_L, strict=True) if busy)
    refuse_missing_layers(kept, source=source)
    stride = kept[1] - kept[0] if len(kept) > 1 else 1
    first, last = int(np.argmax(busy_L)), len(busy_L) - 1 - int(np.argmax(busy_L[::-1]))
    leading = first if stride == 1 else first // stride
    trailing = (len(busy_L) - 1 - last) // stride
    if trailing or leading > _DENSE_SHARE * len(busy_L):
        raise TraceError(
            f"{source}: layers missing: only {len(kept)} of {len(busy_L)} layers have tokens "
            f"({kept[0]} to {kept[-1]}); record all pipeline stages"
        )
    return loads_LE[busy_L], kept


def refuse_missing_layers(layer_ids: Sequence[int], *, source: str) -> None:
    """Refuse layer ids with gaps; every n-th layer is no gap (models that alternate).

    Args:
        layer_ids: Absolute layers, ascending.
        source: The file, for messages.

    Raises:
        TraceError: Layers are missing.
    """
    if len(layer_ids) < 2:
        return
    steps = np.diff(np.asarray(layer_ids))
    stride = int(steps.min())
    if stride < 1 or (steps == stride).all():
        return
    expected = range(layer_ids[0], layer_ids[-1] + 1, stride)
    missing = sorted(set(expected) - set(layer_ids))
    shown = ", ".join(str(layer) for layer in missing[:8]) + (", ..." if len(missing) > 8 else "")
    raise TraceError(
        f"{source}: layers missing: {len(layer_ids)} of {len(expected)} layers between "
        f"{layer_ids[0]} and {layer_ids[-1]} are there, not {shown}; record all of them"
    )


def refuse_partial(loads_LE: LoadMatrix, *, source: str) -> None:
    """Refuse loads in which only one rank's experts have tokens, the same ones in every layer.

    Args:
        loads_LE: Tokens [L, E].
        source: The file, for messages.

    Raises:
        TraceError: It looks like the dump of one rank of several.
    """
    busy_L = loads_LE.any(axis=1)
    layers, experts = int(busy_L.sum()), loads_LE.shape[1]
    # One layer, or a handful of tokens, may well stay within a block by chance or on purpose.
    if layers < 2 or loads_LE.sum() < layers * experts:
        return
    used = np.flatnonzero(loads_LE.any(axis=0))
    for ranks in (n for n in range(experts, 1, -1) if experts % n == 0):
        block = experts // ranks
        if used[0] // block == used[-1] // block:
            first = used[0] // block * block
            raise TraceError(
                f"{source}: a partial dump: in all {layers} layers with tokens only experts "
                f"{first} to {first + block - 1} of {experts} have any, one rank of {ranks}; add "
                f"up the dumps of all ranks (--allow-partial if that is really the traffic)"
            )


def refuse_repeats(loads: ExpertLoads) -> None:
    """Refuse layers in which an expert has more tokens than there are.

    Args:
        loads: Loads whose ``top_k`` may be known; a token goes to K different experts.

    Raises:
        TraceError: Ids repeat within tokens, as they do in warm-up dummies and padding.
    """
    if loads.top_k is None:
        return
    most_L = loads.loads_LE.max(axis=1)
    tokens_L = loads.loads_LE.sum(axis=1) / loads.top_k
    bad_L = most_L > tokens_L * (1 + 1e-9)
    if bad_L.any():
        layer = int(np.argmax(bad_L))
        expert = int(loads.loads_LE[layer].argmax())
        raise TraceError(
            f"{loads.source}: layer {loads.layer_ids[layer]}, expert {expert}: counted "
            f"{most_L[layer]:g} times, but only {tokens_L[layer]:g} tokens chose "
            f"{loads.top_k} experts each; ids repeat, as in warm-up dummies or padding"
        )


def refuse_other_model(loads: ExpertLoads, declared: Declared) -> None:
    """Refuse loads that do not fit the model that the caller named.

    Args:
        loads: The loads.
        declared: What is known of the model.

    Raises:
        TraceError: Too many columns (physical slots), too few (a partial dump), another number of
            layers, or the two the wrong way round.
    """
    experts = declared.num_experts
    shape = (loads.num_experts, loads.num_layers)
    if shape == (declared.num_layers, experts) and declared.num_layers != experts:
        raise TraceError(
            f"{loads.source}: {shape[1]} rows and {shape[0]} columns, but {declared.origin} has "
            f"{shape[0]} layers of {experts} experts: transpose the table"
        )
    if experts is not None and loads.num_experts > experts:
        raise TraceError(
            f"{loads.source}: {loads.num_experts} columns, but {declared.origin} has {experts} "
            f"logical experts: these are physical slots, whose meaning changes with every "
            f"placement; export counts of logical experts"
        )
    if experts is not None and loads.num_experts < experts:
        raise TraceError(
            f"{loads.source}: {loads.num_experts} of the {experts} experts of {declared.origin}: "
            f"a partial dump; add up the dumps of all ranks"
        )
    layers = declared.num_layers
    if layers is not None and loads.num_layers != layers:
        raise TraceError(
            f"{loads.source}: layers missing or too many: {loads.num_layers} layers, "
            f"{declared.origin} has {layers} MoE layers; record all of them"
        )
