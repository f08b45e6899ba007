"""Experts in the engine's own process change no output token, whatever the policy."""

import pytest
from equality_reference import (
    assert_experts_came_and_went,
    assert_same_answers,
    assert_same_answers_until,
    assert_same_logits,
    replicas_shared_tokens,
    serving,
)

from families import FAMILIES

PREDICTIONS = {
    "gate, one layer ahead": {"predictor": "gate", "distance": 1},
    "gate, two layers ahead": {"predictor": "gate", "distance": 2},
    "previous": {"predictor": "previous"},
    "ewma": {"predictor": "ewma"},
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_experts_give_the_answers_of_transformers(family, devices, reference_of):
    reference = reference_of(family)
    with serving(
        reference.directory, invoker="inline", devices=devices, policy="static"
    ) as served:
        assert_same_answers(served, reference)
        assert served.runtime.snapshot().steps > 0


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_experts_give_the_answers_of_transformers(
    family, prediction, devices, reference_of
):
    reference = reference_of(family)
    with serving(
        reference.directory,
        invoker="inline",
        devices=devices,
        policy="paper",
        **PREDICTIONS[prediction],
    ) as served:
        assert_same_answers(served, reference)
        snapshot = served.runtime.snapshot()
    # More than the plans every layer starts with: plans did follow the loads.
    assert snapshot.plans > snapshot.num_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_beyond_the_largest_invocation_are_computed_in_pieces(family, reference_of):
    reference = reference_of(family)
    with serving(
        reference.directory, invoker="inline", devices=2, policy="paper", max_rows=7
    ) as served:
        assert_same_logits(served, reference.cases["long"])
        pieces = -(-reference.cases["long"].input_ids.numel() // 7)
        assert served.runtime.snapshot().split_s.count >= pieces * served.loaded.spec.num_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_divided_over_replicas_give_the_answers_of_transformers(
    family, reference_of, splits
):
    reference = reference_of(family)
    with serving(reference.directory, invoker="inline", devices=3, policy="paper") as served:
        assert_same_answers_until(
            served, reference, lambda: replicas_shared_tokens(served, splits)
        )


@pytest.mark.parametrize(
    "policy",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("static", "paper")), "moeless"],
)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_come_and_go_give_the_answers_of_transformers(
    family, devices, policy, reference_of
):
    reference = reference_of(family)
    with serving(
        reference.directory, invoker="inline", devices=devices, policy=policy, tight=True
    ) as served:
        assert_same_answers(served, reference)
        assert_experts_came_and_went(served)
