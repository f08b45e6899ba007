"""Small traces for the tests of workloads."""

import json

import numpy as np

from moeless.workloads.routing_trace import RoutingTrace, TraceMeta


def make_meta(**changes):
    fields = {
        "model": "tests/tiny",
        "num_layers": 2,
        "num_experts": 4,
        "top_k": 2,
        "layer_ids": (1, 3),
        "unit": "steps",
        "phase": "prefill",
        "source": "a test",
        "licence": "CC0",
    }
    return TraceMeta(**{**fields, **changes})


def make_trace(*, seed=0, entries=3, unit="steps", full=False, tokens=None):
    """A valid trace; ``full`` has every optional array."""
    rng = np.random.default_rng(seed)
    meta = make_meta(unit=unit, predictor={"kind": "gate", "distance": 1} if full else None)
    if tokens is None:
        tokens = rng.integers(1, 6, size=entries)
    tokens_N = np.asarray(tokens, dtype=np.int32)
    entries, total = len(tokens_N), int(tokens_N.sum())
    ids = np.argsort(rng.random((total, 2, 4)), axis=2)[:, :, :2].astype(np.int16)
    offsets = np.concatenate([[0], np.cumsum(tokens_N)]).astype(np.int64)
    loads = np.zeros((entries, 2, 4), dtype=np.uint16)
    for n in range(entries):
        for token in ids[offsets[n] : offsets[n + 1]]:
            for layer in range(2):
                loads[n, layer, token[layer]] += 1
    optional = {}
    if full:
        optional = {
            "decode_tokens_N": (tokens_N // 2).astype(np.int32),
            "topk_ids_TLK": ids,
            "topk_offsets": offsets,
            "group_N": np.array([f"group {n}" for n in range(entries)]),
            "predicted_NLE": rng.random((entries, 2, 4), dtype=np.float32),
        }
    if unit == "steps":
        optional["time_s_N"] = np.arange(entries, dtype=np.float64) / 2
    return RoutingTrace(meta=meta, loads_NLE=loads, tokens_N=tokens_N, **optional)


def as_arrays(trace):
    """What the file of a trace holds, by name."""
    arrays = {
        "version": np.int32(1),
        "meta": np.array(trace.meta.to_json()),
        "loads": trace.loads_NLE,
        "tokens": trace.tokens_N,
        "time_s": trace.time_s_N,
        "decode_tokens": trace.decode_tokens_N,
        "topk_ids": trace.topk_ids_TLK,
        "topk_offsets": trace.topk_offsets,
        "group": trace.group_N,
        "predicted": trace.predicted_NLE,
    }
    return {name: array for name, array in arrays.items() if array is not None}


def with_meta(arrays, **changes):
    """The arrays with fields of ``meta`` changed; None removes a field."""
    document = {**json.loads(str(arrays["meta"])), **changes}
    kept = {name: value for name, value in document.items() if value is not None}
    return {**arrays, "meta": np.array(json.dumps(kept))}


def assert_same(left, right):
    assert left.meta == right.meta
    for name, array in as_arrays(left).items():
        if name != "meta":
            np.testing.assert_array_equal(array, as_arrays(right)[name])
    assert as_arrays(left).keys() == as_arrays(right).keys()
