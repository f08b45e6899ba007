"""Batches and dtypes at the edge: no token, one token, idle experts, half precision."""

import pytest
import torch
from equality_reference import assert_same_answers, assert_same_logits, forward, serving
from transformers import AutoModelForCausalLM

from families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_token_leaves_all_but_its_own_experts_idle(family, reference_of):
    reference = reference_of(family)
    with serving(reference.directory, invoker="inline", devices=2, policy="paper") as served:
        assert_same_logits(served, reference.cases["one token"])
        snapshot, spec = served.runtime.snapshot(), served.loaded.spec
    assert ((snapshot.tokens_LE > 0).sum(axis=1) == spec.top_k).all()
    assert (snapshot.tokens_LE.sum(axis=1) == spec.top_k).all()


def assert_empty_batches_pass_through(served):
    spec = served.loaded.spec
    for layer in range(spec.num_layers):
        x_TH = torch.zeros(0, spec.expert.hidden)
        ids_TK = torch.zeros(0, spec.top_k, dtype=torch.int64)
        y_TH = served.runtime.dispatcher(layer, x_TH, ids_TK, torch.zeros(0, spec.top_k))
        assert y_TH.shape == x_TH.shape
        assert y_TH.dtype == x_TH.dtype
    assert served.runtime.snapshot().tokens_LE.sum() == 0


@pytest.mark.parametrize("policy", ["static", "paper", "moeless"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_batch_gives_an_empty_answer_and_harms_no_later_one(family, policy, reference_of):
    reference = reference_of(family)
    with serving(reference.directory, invoker="inline", devices=2, policy=policy) as served:
        assert_empty_batches_pass_through(served)
        assert_same_answers(served, reference)


@pytest.mark.slow
def test_an_empty_batch_to_workers_gives_an_empty_answer_and_harms_no_later_one(reference_of):
    reference = reference_of("llama4")
    with serving(reference.directory, invoker="process", devices=2, policy="paper") as served:
        assert_empty_batches_pass_through(served)
        assert_same_answers(served, reference)


def assert_close_in_bfloat16(reference, served):
    """Rounding differs, and now and then it turns the choice of an expert: close, not equal."""
    model = AutoModelForCausalLM.from_pretrained(reference.directory, dtype=torch.bfloat16).eval()
    likenesses = []
    for case in reference.cases.values():
        expected = forward(model, case.input_ids, case.attention_mask)
        logits = forward(served.loaded.model, case.input_ids, case.attention_mask)
        assert logits.dtype == expected.dtype == torch.bfloat16
        chosen = case.attention_mask.bool()
        found, wanted = logits[chosen].float(), expected[chosen].float()
        likenesses.append(torch.nn.functional.cosine_similarity(found, wanted))
    likeness = torch.cat(likenesses)
    assert likeness.median() > 0.999
    assert (likeness > 0.98).float().mean() > 0.85


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_close_to_transformers(family, reference_of):
    reference = reference_of(family)
    with serving(
        reference.directory, invoker="inline", devices=2, policy="paper", dtype="bfloat16"
    ) as served:
        assert_close_in_bfloat16(reference, served)


@pytest.mark.slow
def test_bfloat16_in_workers_stays_close_to_transformers(reference_of):
    reference = reference_of("mixtral")
    with serving(
        reference.directory, invoker="process", devices=2, policy="paper", dtype="bfloat16"
    ) as served:
        assert_close_in_bfloat16(reference, served)
