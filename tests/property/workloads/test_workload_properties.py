"""What holds for every trace, not only for those somebody thought of."""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from trace_makers import as_arrays, assert_same, make_meta, make_trace

from effort import drawn
from moeless.errors import TraceError
from moeless.workloads.arrivals import Arrivals
from moeless.workloads.compose import compose_decode, compose_prefill
from moeless.workloads.decode_schedule import DecodeSchedule
from moeless.workloads.routing_trace import RoutingTrace, read_trace, write_trace
from moeless.workloads.synthetic import FAMILIES, make_synthetic

seeds = st.integers(0, 2**32)


@st.composite
def traces(draw, unit=None, full=None):
    return make_trace(
        seed=draw(seeds),
        unit=unit or draw(st.sampled_from(["steps", "requests"])),
        full=draw(st.booleans()) if full is None else full,
        tokens=draw(st.lists(st.integers(0 if unit is None else 1, 9), min_size=1, max_size=6)),
    )


@st.composite
def arrival_traces(draw):
    gaps = draw(st.lists(st.floats(0, 3), min_size=0, max_size=12))
    count = len(gaps) + 1
    generated = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    return Arrivals(
        time_s_R=np.concatenate([[0.0], np.cumsum(gaps)]),
        prompt_tokens_R=np.ones(count, dtype=np.int64),
        generated_tokens_R=np.array(generated, dtype=np.int64),
    )


@given(trace=traces())
@drawn(50)
def test_a_file_gives_back_what_was_written(trace):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        write_trace(trace, path)
        assert_same(trace, read_trace(path))


CORRUPTIBLE = [
    "loads",
    "tokens",
    "time_s",
    "decode_tokens",
    "topk_ids",
    "topk_offsets",
    "predicted",
]


def corrupt(array, data):
    """Change one element to what is always wrong there: a value out of range."""
    index = tuple(data.draw(st.integers(0, extent - 1)) for extent in array.shape)
    changed = array.copy()
    wrong = [np.iinfo(array.dtype).max] if array.dtype.kind == "u" else [-1, -100]
    if array.dtype.kind == "f":
        wrong = [np.nan, -np.inf, np.inf, -1.0]
    changed[index] = data.draw(st.sampled_from(wrong))
    return changed


@given(data=st.data(), name=st.sampled_from(CORRUPTIBLE))
@drawn(150)
def test_one_corrupt_element_of_any_array_is_refused_with_one_line(data, name):
    trace = make_trace(seed=data.draw(seeds), full=True)
    arrays = as_arrays(trace)
    arrays[name] = corrupt(arrays[name], data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        np.savez(path, **arrays)
        with pytest.raises(TraceError) as caught:
            read_trace(path)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@given(trace=traces(), data=st.data())
@drawn(100)
def test_one_token_more_or_less_anywhere_is_named(trace, data):
    loads = trace.loads_NLE.copy()
    n, layer, expert = (data.draw(st.integers(0, extent - 1)) for extent in loads.shape)
    down = loads[n, layer, expert] > 0 and data.draw(st.booleans())
    loads[n, layer, expert] = int(loads[n, layer, expert]) + (-1 if down else 1)
    with pytest.raises(TraceError, match=rf"loads\[n={n}, l={layer}\]"):
        RoutingTrace(
            meta=trace.meta,
            loads_NLE=loads,
            tokens_N=trace.tokens_N,
            time_s_N=trace.time_s_N,
        )


@given(trace=traces(unit="requests"), arrivals=arrival_traces(), seed=seeds)
@drawn(100)
def test_composed_prefill_conserves_every_token(trace, arrivals, seed):
    steps = compose_prefill(trace, arrivals, seed=seed)
    chosen = np.random.default_rng(seed).integers(0, len(trace), size=len(arrivals))
    assert steps.tokens_N.sum() == trace.tokens_N[chosen].sum()
    np.testing.assert_array_equal(
        steps.loads_NLE.sum(axis=0), trace.loads_NLE[chosen].sum(axis=0, dtype=np.int64)
    )
    assert set(steps.time_s_N.tolist()) == set(np.floor(arrivals.time_s_R).tolist())
    assert_same(steps, compose_prefill(trace, arrivals, seed=seed))


@given(trace=traces(unit="requests"), arrivals=arrival_traces(), seed=seeds)
@drawn(100)
def test_composed_decoding_gives_every_generated_token_one_step(trace, arrivals, seed):
    generated = int(arrivals.generated_tokens_R.sum())
    if generated == 0:
        with pytest.raises(TraceError, match="nothing decodes"):
            compose_decode(trace, arrivals, seed=seed)
        return
    steps = compose_decode(trace, arrivals, seed=seed)
    assert steps.tokens_N.sum() == generated
    assert (steps.tokens_N > 0).all()
    assert (np.diff(steps.time_s_N) > 0).all()
    assert_same(steps, compose_decode(trace, arrivals, seed=seed))
    chosen = np.random.default_rng(seed).integers(0, len(trace), size=len(arrivals))
    never = trace.loads_NLE[chosen].sum(axis=0) == 0
    assert steps.loads_NLE[:, never].sum() == 0


@given(
    requests=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=12),
    limit=st.integers(1, 60),
)
def test_the_schedule_agrees_with_looking_at_every_slot(requests, limit):
    begin, length = (np.array(x, dtype=np.int64) for x in zip(*sorted(requests), strict=True))
    wanted = {
        slot: [r for r, (b, n) in enumerate(zip(begin, length, strict=True)) if b <= slot < b + n]
        for slot in range(50)
    }
    busy = [slot for slot, active in wanted.items() if active]
    schedule = DecodeSchedule(begin_R=begin, length_R=length)
    slots, whole = schedule.busy_slots(limit)
    assert slots.tolist() == busy[:limit]
    assert whole == (len(busy) <= limit)
    for slot, active in zip(slots.tolist(), schedule.active(slots), strict=True):
        assert active.tolist() == wanted[slot]


@given(
    name=st.sampled_from(sorted(FAMILIES)),
    num_experts=st.integers(1, 12),
    top_k=st.integers(1, 12),
    tokens=st.integers(0, 60),
    steps=st.integers(1, 5),
    seed=seeds,
)
@drawn(150)
def test_synthetic_traces_are_valid_and_repeat_with_their_seed(
    name, num_experts, top_k, tokens, steps, seed
):
    size = {
        "num_layers": 2,
        "num_experts": num_experts,
        "top_k": min(top_k, num_experts),
        "steps": steps,
        "tokens": tokens,
    }
    trace = make_synthetic(name, **size, seed=seed)  # validates itself
    assert_same(trace, make_synthetic(name, **size, seed=seed))


@given(seed=seeds)
@drawn(20)
def test_other_seeds_give_other_draws(seed):
    size = {"num_layers": 2, "num_experts": 16, "top_k": 2, "steps": 3, "tokens": 200}
    one, other = (make_synthetic("uniform", **size, seed=s) for s in (seed, seed + 1))
    assert (one.loads_NLE != other.loads_NLE).any()


@given(
    kept=st.dictionaries(
        st.text(min_size=1).map(lambda text: f"x-{text}"),
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.lists(st.text()),
        max_size=4,
    )
)
@drawn(100)
def test_further_meta_keys_survive(kept):
    base = make_trace()
    trace = RoutingTrace(
        meta=make_meta(extra=kept),
        loads_NLE=base.loads_NLE,
        tokens_N=base.tokens_N,
        time_s_N=base.time_s_N,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_trace(trace, Path(folder) / "a.npz")
        assert read_trace(Path(folder) / "a.npz").meta.extra == kept
