"""Experts in worker processes change no output token.

Each family is served in four ways; each way also puts one more strain on the token path.
"""

import pytest
from equality_reference import (
    assert_experts_came_and_went,
    assert_same_answers,
    assert_same_answers_until,
    replicas_shared_tokens,
    serving,
)

from families import FAMILIES

# A start of the workers takes seconds: one family stands for the others in the short run.
SLOW = pytest.mark.slow
SOON = ("granitemoeshared",)


def families(names=FAMILIES):
    """Names of families, most of them marked as slow."""
    return [pytest.param(name, marks=() if name in SOON else SLOW) for name in names]


PREDICTIONS = (
    {"predictor": "gate", "distance": 2},
    {"predictor": "previous"},
    {"predictor": "ewma"},
)


@pytest.mark.parametrize("family", families())
def test_fixed_experts_on_two_workers_give_the_answers_of_transformers(family, reference_of):
    reference = reference_of(family)
    with serving(reference.directory, invoker="process", devices=2, policy="static") as served:
        assert_same_answers(served, reference)
        snapshot = served.runtime.snapshot()
    assert (snapshot.device_tokens_LD > 0).any(axis=0).all(), "a worker had nothing to do"
    assert snapshot.worker_restarts_D == (0, 0)


@pytest.mark.parametrize("family", families())
def test_tokens_divided_over_two_workers_give_the_answers_of_transformers(
    family, reference_of, splits
):
    reference = reference_of(family)
    with serving(reference.directory, invoker="process", devices=2, policy="paper") as served:
        assert_same_answers_until(
            served, reference, lambda: replicas_shared_tokens(served, splits)
        )


@SLOW
@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_experts_that_come_and_go_on_three_workers_give_the_answers_of_transformers(
    family, reference_of
):
    reference = reference_of(family)
    with serving(
        reference.directory, invoker="process", devices=3, policy="static", tight=True
    ) as served:
        assert_same_answers(served, reference)
        assert_experts_came_and_went(served)


@SLOW
@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=list(FAMILIES))
def test_planned_experts_on_three_workers_compute_pieces_to_the_answers_of_transformers(
    number, reference_of, splits
):
    family = list(FAMILIES)[number]
    reference = reference_of(family)
    with serving(
        reference.directory,
        invoker="process",
        devices=3,
        policy="paper",
        max_rows=11,
        **PREDICTIONS[number % len(PREDICTIONS)],
    ) as served:
        assert_same_answers_until(
            served, reference, lambda: replicas_shared_tokens(served, splits)
        )
        snapshot = served.runtime.snapshot()
    assert snapshot.split_s.count > snapshot.layer_forward_s.count, "nothing came in pieces"


@pytest.mark.parametrize("family", families(["deepseek_v3", "granitemoeshared", "llama4"]))
def test_by_default_experts_on_two_workers_give_the_answers_of_transformers(family, reference_of):
    reference = reference_of(family)
    with serving(reference.directory, invoker="process", devices=2, memory_factor=2.0) as served:
        assert served.runtime.config.policy.policy == "moeless"
        assert_same_answers(served, reference)


@SLOW
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_planned_experts_that_come_and_go_on_two_workers_give_the_answers_of_transformers(
    family, reference_of
):
    reference = reference_of(family)
    with serving(
        reference.directory, invoker="process", devices=2, policy="paper", tight=True
    ) as served:
        assert_same_answers(served, reference)
        assert_experts_came_and_went(served)
