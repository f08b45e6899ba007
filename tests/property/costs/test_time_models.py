import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.costs.busiest_rank import draw_busiest_rank
from moeless.costs.fitting import fit_kernels
from moeless.costs.models import KNOWN_MODELS
from moeless.costs.table import TableTime
from moeless.costs.time_models import TIME_MODEL_NAMES, build_time_model

names = st.sampled_from(TIME_MODEL_NAMES)
shapes = st.sampled_from([model.expert for model in KNOWN_MODELS])


def ascending(least):
    return st.lists(st.integers(1, 5000), min_size=least, max_size=6, unique=True).map(sorted)


@st.composite
def splits(draw):
    experts, devices = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    cell = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 10**6))
    cells = draw(st.lists(cell, min_size=experts * devices, max_size=experts * devices))
    return np.array(cells, dtype=np.int64).reshape(experts, devices)


@st.composite
def tables(draw):
    tokens, touched = draw(ascending(2)), draw(ascending(1))
    size = len(tokens) * len(touched)
    noise = draw(st.lists(st.floats(0.0, 3.0), min_size=size, max_size=size))
    seconds = np.array(noise).reshape(len(tokens), len(touched)) + 1.0
    # Enough growth for a slope, whatever the noise.
    seconds += 4.0 * np.array(tokens)[:, None]
    return TableTime(
        tokens_A=np.array(tokens, dtype=np.float64),
        touched_B=np.array(touched, dtype=np.float64),
        seconds_AB=seconds,
    )


@given(names, shapes, splits())
def test_the_bound_is_never_above_the_time_of_any_split(name, shape, tokens):
    model = build_time_model(name, shape, tokens.shape[1])
    bound = model.cost.bound_s(tokens.sum(axis=1), tokens.shape[1])
    assert bound <= model.layer_s(tokens) * (1 + 1e-9)


@given(names, shapes, splits(), st.data())
def test_one_more_token_never_makes_a_layer_faster(name, shape, tokens, data):
    model = build_time_model(name, shape, tokens.shape[1])
    more = tokens.copy()
    expert = data.draw(st.integers(0, tokens.shape[0] - 1))
    more[expert, data.draw(st.integers(0, tokens.shape[1] - 1))] += 1
    assert model.layer_s(more) >= model.layer_s(tokens)
    assert (model.device_s(more) >= model.device_s(tokens)).all()


@given(tables(), st.integers(1, 10_000), st.integers(1, 10_000), st.integers(0, 10_000))
def test_a_table_grows_with_tokens_and_with_touched_experts(table, tokens, touched, more):
    pairs = np.array([(tokens, touched), (tokens + more, touched), (tokens, touched + more)])
    here, more_tokens, more_touched = table.seconds(pairs[:, 0], pairs[:, 1])
    assert more_tokens >= here * (1 - 1e-12)
    assert more_touched >= here * (1 - 1e-12)


@given(tables())
def test_a_table_returns_its_own_points_unless_they_fall(table):
    tokens, touched = np.meshgrid(table.tokens_A, table.touched_B, indexing="ij")
    found = table.seconds(tokens.astype(np.int64).ravel(), touched.astype(np.int64).ravel())
    given_AB = table.seconds_AB
    rising = np.maximum.accumulate(np.maximum.accumulate(given_AB, axis=0), axis=1)
    assert found == pytest.approx(rising.ravel())


@given(
    st.floats(0, 1e-3),
    st.floats(0, 1e-3),
    st.floats(1e-9, 1e-5),
    st.lists(st.tuples(st.integers(1, 30_000), st.integers(1, 64)), min_size=6, max_size=30),
)
def test_a_fit_is_never_worse_than_the_truth(base_s, touch_s, token_s, work):
    tokens, touched = np.array(work, dtype=np.float64).T
    seconds = base_s + touch_s * touched + token_s * tokens
    fit = fit_kernels(tokens, touched, seconds)
    assert min(fit.base_s, fit.touch_s, fit.token_s) >= 0
    assert fit.predict_s(tokens, touched) == pytest.approx(seconds, rel=1e-3)


@given(
    st.integers(0, 2**32),
    st.integers(1, 5000),
    st.sampled_from([(8, 2), (16, 1), (128, 8), (4, 4)]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1.0, 1.01, 1.2, 2.0]),
)
def test_a_draw_is_the_busiest_rank_of_a_possible_batch(seed, tokens, model, ranks, exponent):
    experts, top_k = model
    count = draw_busiest_rank(
        np.random.default_rng(seed),
        tokens=tokens,
        num_experts=experts,
        top_k=top_k,
        num_ranks=ranks,
        exponent=exponent,
    )
    assert count.shape == (experts // ranks,)
    assert count.min() >= 0
    assert count.max() <= tokens
    assert -(-tokens * top_k // ranks) <= count.sum() <= tokens * top_k
    if ranks == 1:
        assert count.sum() == tokens * top_k
