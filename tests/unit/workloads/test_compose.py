"""Steps composed of requests and arrivals."""

import numpy as np
import pytest
from trace_makers import as_arrays, assert_same, make_meta, make_trace

from moeless.errors import ConfigError, TraceError
from moeless.workloads import compose
from moeless.workloads.arrivals import Arrivals
from moeless.workloads.compose import compose_decode, compose_prefill
from moeless.workloads.routing_trace import RoutingTrace


def make_arrivals(times, generated=None):
    counts = np.ones(len(times), dtype=np.int64)
    return Arrivals(
        time_s_R=np.array(times, dtype=np.float64),
        prompt_tokens_R=counts,
        generated_tokens_R=counts if generated is None else np.array(generated, dtype=np.int64),
    )


def drawn(trace, count, seed):
    return np.random.default_rng(seed).integers(0, len(trace), size=count)


def test_prefill_batches_hold_the_drawn_requests_of_one_second():
    trace = make_trace(unit="requests", entries=20)
    steps = compose_prefill(trace, make_arrivals([0.0, 0.4, 0.999, 1.0, 4.5]), seed=7)
    chosen = drawn(trace, 5, 7)
    assert steps.time_s_N.tolist() == [0.0, 1.0, 4.0]
    for step, batch in enumerate((chosen[:3], chosen[3:4], chosen[4:])):
        assert steps.tokens_N[step] == trace.tokens_N[batch].sum()
        np.testing.assert_array_equal(steps.loads_NLE[step], trace.loads_NLE[batch].sum(axis=0))
    assert steps.meta.unit == "steps"
    assert steps.meta.phase == "prefill"
    assert steps.meta.licence == trace.meta.licence
    assert steps.decode_tokens_N.tolist() == [0, 0, 0]


def test_a_request_may_be_drawn_more_than_once():
    trace = make_trace(unit="requests", tokens=[3])
    steps = compose_prefill(trace, make_arrivals([0.0, 0.1, 0.2]), seed=0)
    np.testing.assert_array_equal(steps.loads_NLE[0], trace.loads_NLE[0] * 3)


def test_predicted_loads_add_up_as_the_loads_do():
    trace = make_trace(unit="requests", full=True)
    steps = compose_prefill(trace, make_arrivals([0.0, 0.1]), seed=1)
    wanted = trace.predicted_NLE[drawn(trace, 2, 1)].sum(axis=0)
    np.testing.assert_allclose(steps.predicted_NLE[0], wanted, rtol=1e-6)
    assert steps.meta.predictor == trace.meta.predictor


@pytest.mark.parametrize("composer", [compose_prefill, compose_decode])
def test_small_blocks_change_nothing(composer, monkeypatch):
    trace = make_trace(unit="requests", entries=9)
    arrivals = make_arrivals(np.linspace(0, 1, 30), generated=[3] * 30)
    whole = composer(trace, arrivals, seed=3)
    monkeypatch.setattr(compose, "_BLOCK_BYTES", 200)
    assert_same_counts(whole, composer(trace, arrivals, seed=3))


def assert_same_counts(left, right):
    np.testing.assert_array_equal(left.tokens_N, right.tokens_N)
    np.testing.assert_array_equal(left.loads_NLE, right.loads_NLE)


@pytest.mark.parametrize("composer", [compose_prefill, compose_decode])
def test_a_trace_of_steps_is_not_composed(composer):
    with pytest.raises(TraceError, match=r"meta\.unit is 'steps'"):
        composer(make_trace(), make_arrivals([0.0]), seed=0)


def test_a_request_decodes_one_token_per_step_until_it_is_done():
    trace = make_trace(unit="requests")
    arrivals = make_arrivals([0.0, 0.06, 1.0], generated=[3, 2, 1])
    steps = compose_decode(trace, arrivals, seed=0, step_s=0.05)
    np.testing.assert_allclose(steps.time_s_N, [0.0, 0.05, 0.1, 0.15, 1.0])
    assert steps.tokens_N.tolist() == [1, 1, 2, 1, 1]
    assert steps.decode_tokens_N.tolist() == steps.tokens_N.tolist()


def test_composed_decoding_says_that_it_is_synthetic():
    steps = compose_decode(make_trace(unit="requests"), make_arrivals([0.0]), seed=0)
    assert steps.meta.phase == "decode (synthetic)"
    assert "drawn from each request's frequencies" in steps.meta.source
    assert steps.meta.extra["decode"] == {"step_s": 0.05, "max_steps": 4096, "whole": True}
    assert steps.predicted_NLE is None


def test_decoding_stops_after_the_steps_it_may_take():
    arrivals = make_arrivals([0.0, 0.3], generated=[4, 10])
    trace = make_trace(unit="requests")
    whole = compose_decode(trace, arrivals, seed=0)
    cut = compose_decode(trace, arrivals, seed=0, max_steps=5)
    assert len(whole) == 14
    assert len(cut) == 5
    assert_same(
        RoutingTrace(
            meta=cut.meta,
            **{
                name: getattr(whole, name)[:5]
                for name in ("loads_NLE", "tokens_N", "time_s_N", "decode_tokens_N")
            },
        ),
        cut,
    )
    assert cut.meta.extra["decode"]["whole"] is False


def test_an_expert_that_every_token_of_a_request_chose_is_always_chosen():
    loads = np.array([[[4, 2, 1, 1], [0, 0, 4, 4]]], dtype=np.uint16)
    trace = RoutingTrace(
        meta=make_meta(unit="requests"), loads_NLE=loads, tokens_N=np.array([4], dtype=np.int32)
    )
    steps = compose_decode(trace, make_arrivals([0.0], generated=[200]), seed=5)
    assert (steps.loads_NLE[:, 0, 0] == 1).all()
    np.testing.assert_array_equal(steps.loads_NLE[:, 1], [[0, 0, 1, 1]] * 200)


def test_decoding_follows_each_requests_own_frequencies():
    loads = np.array([[[7, 5, 3, 1], [1, 3, 5, 7]]], dtype=np.uint16)
    trace = RoutingTrace(
        meta=make_meta(unit="requests"), loads_NLE=loads, tokens_N=np.array([8], dtype=np.int32)
    )
    steps = compose_decode(trace, make_arrivals([0.0], generated=[4000]), seed=11)
    np.testing.assert_allclose(steps.loads_NLE.mean(axis=0), loads[0] / 8, atol=0.03)


def test_all_pairs_of_experts_occur_together():
    loads = np.full((1, 2, 4), 2, dtype=np.uint16)
    trace = RoutingTrace(
        meta=make_meta(unit="requests"), loads_NLE=loads, tokens_N=np.array([4], dtype=np.int32)
    )
    steps = compose_decode(trace, make_arrivals([0.0], generated=[300]), seed=2)
    pairs = {tuple(np.flatnonzero(load)) for load in steps.loads_NLE[:, 0]}
    assert len(pairs) == 6


def test_a_request_without_tokens_cannot_decode():
    with pytest.raises(TraceError, match=r"tokens\[0\] is 0"):
        compose_decode(make_trace(unit="requests", tokens=[0]), make_arrivals([0.0]), seed=0)


def test_nothing_to_decode_is_an_error():
    arrivals = make_arrivals([0.0, 1.0], generated=[0, 0])
    with pytest.raises(TraceError, match="generates a token"):
        compose_decode(make_trace(unit="requests"), arrivals, seed=0)


@pytest.mark.parametrize("options", [{"step_s": 0}, {"step_s": np.nan}, {"max_steps": 0}])
def test_wrong_options_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        compose_decode(make_trace(unit="requests"), make_arrivals([0.0]), seed=0, **options)


def test_a_step_beyond_int32_is_refused():
    tokens = np.array([2**31 - 1], dtype=np.int32)
    half = np.full((1, 2, 4), 0, dtype=np.uint32)
    half[:, :, :2] = 2**31 - 1
    trace = RoutingTrace(meta=make_meta(unit="requests"), loads_NLE=half, tokens_N=tokens)
    with pytest.raises(TraceError, match="step 0 has 4294967294 tokens"):
        compose_prefill(trace, make_arrivals([0.0, 0.1]), seed=0)


def test_more_steps_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr(compose, "_MAX_TRACE_BYTES", 64)
    with pytest.raises(TraceError, match="the arrivals give 3 steps"):
        compose_prefill(make_trace(unit="requests"), make_arrivals([0.0, 1.0, 2.0]), seed=0)


def test_composing_leaves_its_inputs_alone():
    trace = make_trace(unit="requests", full=True)
    before = {name: array.copy() for name, array in as_arrays(trace).items()}
    compose_prefill(trace, make_arrivals([0.0, 0.5]), seed=0)
    compose_decode(trace, make_arrivals([0.0, 0.5]), seed=0)
    for name, array in as_arrays(trace).items():
        np.testing.assert_array_equal(array, before[name])
