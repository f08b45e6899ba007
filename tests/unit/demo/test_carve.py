"""One block, carved: nothing lost, nothing doubled, and exact where all experts are used."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from moeless.engines.demo.carve import (  # noqa: E402 (torch may be missing)
    CarvedBlock,
    CarveShape,
    Correction,
    FeedForward,
    carve_block,
    check_partition,
    run_carved,
)
from moeless.errors import ModelError  # noqa: E402

HIDDEN, NEURONS, TOKENS = 24, 96, 640
SHAPE = CarveShape(experts=4, expert_width=16, top_k=2)


@pytest.fixture
def block() -> FeedForward:
    random = torch.Generator().manual_seed(1)

    def draw(*size: int) -> "torch.Tensor":
        return torch.randn(*size, generator=random) / HIDDEN**0.5

    return FeedForward(
        gate_IH=draw(NEURONS, HIDDEN), up_IH=draw(NEURONS, HIDDEN), down_HI=draw(HIDDEN, NEURONS)
    )


@pytest.fixture
def x_TH() -> "torch.Tensor":
    random = torch.Generator().manual_seed(2)
    topic = torch.randn(5, HIDDEN, generator=random)
    chosen = torch.randint(0, 5, (TOKENS,), generator=random)
    return topic[chosen] + 0.5 * torch.randn(TOKENS, HIDDEN, generator=random)


def answer_of(block: FeedForward, x_TH: "torch.Tensor") -> "torch.Tensor":
    return block.activate(x_TH) @ block.down_HI.T


def relative_error(answer: "torch.Tensor", wanted: "torch.Tensor") -> float:
    return float((answer - wanted).norm() / wanted.norm())


def test_using_all_experts_equals_the_dense_block(block, x_TH):
    shape = replace(SHAPE, top_k=SHAPE.experts)
    carved, answer = carve_block(block, x_TH, shape)
    wanted = answer_of(block, x_TH)
    torch.testing.assert_close(answer, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(carved.down_HI, block.down_HI, rtol=1e-4, atol=1e-4)
    again, load_E = run_carved(block, carved, x_TH, shape.top_k)
    torch.testing.assert_close(again, wanted, rtol=1e-4, atol=1e-4)
    assert load_E.tolist() == [TOKENS] * SHAPE.experts


def test_every_neuron_is_used_exactly_once_and_experts_have_equal_size(block, x_TH):
    carved, _ = carve_block(block, x_TH, SHAPE)
    assert carved.groups_EW.shape == (SHAPE.experts, SHAPE.expert_width)
    used = torch.cat([carved.shared, carved.groups_EW.flatten()])
    assert sorted(used.tolist()) == list(range(NEURONS))


def test_the_shared_expert_holds_the_neurons_that_matter_most(block, x_TH):
    carved, _ = carve_block(block, x_TH, SHAPE)
    matter_I = block.activate(x_TH).abs().mean(0) * block.down_HI.norm(dim=0)
    assert matter_I[carved.shared].min() >= matter_I[carved.groups_EW.flatten()].max()


def test_every_token_uses_top_k_experts(block, x_TH):
    carved, _ = carve_block(block, x_TH, SHAPE)
    chosen_TE = carved.route(x_TH, SHAPE.top_k)
    assert chosen_TE.sum(1).tolist() == [SHAPE.top_k] * TOKENS


def test_the_fitted_projection_beats_the_dense_one_under_the_same_routing(block, x_TH):
    carved, _ = carve_block(block, x_TH, SHAPE)
    wanted = answer_of(block, x_TH)
    fitted, _ = run_carved(block, carved, x_TH, SHAPE.top_k)
    plain, _ = run_carved(block, replace(carved, down_HI=block.down_HI), x_TH, SHAPE.top_k)
    assert relative_error(fitted, wanted) < relative_error(plain, wanted)


def test_a_correction_is_the_same_bits_in_whatever_order_it_is_summed(block, x_TH):
    correction = carve_block(block, x_TH, SHAPE)[0].correction
    turned = replace(
        correction,
        left_IR=correction.left_IR.flip(1),
        right_RH=correction.right_RH.flip(0),
        exponent_R=correction.exponent_R.flip(0),
    )
    assert torch.equal(correction.apply(block.down_HI), turned.apply(block.down_HI))
    assert int(correction.left_IR.abs().max()) <= 7


def test_in_float64_the_result_does_not_depend_on_the_order_of_sums(block, x_TH):
    """Another order is what other threads and other processors come to."""
    turn = torch.arange(HIDDEN).flip(0)
    gate_IH, up_IH, x_TH = block.gate_IH.double(), block.up_IH.double(), x_TH.double()
    exact = replace(block, gate_IH=gate_IH, up_IH=up_IH, down_HI=block.down_HI.double())
    turned = replace(exact, gate_IH=gate_IH[:, turn], up_IH=up_IH[:, turn])
    first, _ = carve_block(exact, x_TH, SHAPE)
    second, _ = carve_block(turned, x_TH[:, turn], SHAPE)
    assert torch.equal(first.groups_EW, second.groups_EW)
    assert torch.equal(first.router_EH, second.router_EH[:, turn])
    assert torch.equal(first.down_HI, second.down_HI)


def test_the_fitted_gate_beats_a_random_one(block, x_TH):
    carved, _ = carve_block(block, x_TH, SHAPE)
    carved = replace(carved, down_HI=block.down_HI)
    random = torch.Generator().manual_seed(3)
    blind = replace(carved, router_EH=torch.randn(SHAPE.experts, HIDDEN, generator=random))
    wanted = answer_of(block, x_TH)
    guided, _ = run_carved(block, carved, x_TH, SHAPE.top_k)
    guessed, _ = run_carved(block, blind, x_TH, SHAPE.top_k)
    assert relative_error(guided, wanted) < relative_error(guessed, wanted)


def test_the_same_seed_carves_the_same_block(block, x_TH):
    first, first_answer = carve_block(block, x_TH, SHAPE)
    second, second_answer = carve_block(block, x_TH, SHAPE)
    for of, names in (
        (lambda carved: carved, ("shared", "groups_EW", "router_EH", "down_HI")),
        (lambda carved: carved.correction, Correction.__dataclass_fields__),
    ):
        for name in names:
            assert torch.equal(getattr(of(first), name), getattr(of(second), name)), name
    assert torch.equal(first_answer, second_answer)


def test_the_router_survives_bfloat16(block, x_TH):
    carved, _ = carve_block(block, x_TH, SHAPE)
    assert torch.equal(carved.router_EH.bfloat16().float(), carved.router_EH)


def test_tokens_with_a_long_residual_count_less(block, x_TH):
    residual_TH = torch.ones(TOKENS, HIDDEN)
    residual_TH[: TOKENS // 2] *= 1e4
    wanted = answer_of(block, x_TH)
    _, even = carve_block(block, x_TH, SHAPE)
    _, weighted = carve_block(block, x_TH, SHAPE, residual_TH=residual_TH)
    half = slice(TOKENS // 2, None)
    assert relative_error(weighted[half], wanted[half]) < relative_error(even[half], wanted[half])


def test_experts_that_leave_no_shared_neuron_are_refused(block, x_TH):
    with pytest.raises(ModelError, match="also needs a shared expert"):
        carve_block(block, x_TH, CarveShape(experts=4, expert_width=24, top_k=2))


@pytest.mark.parametrize(
    ("shared", "groups", "message"),
    [
        ([0, 1], [[2, 3], [4, 4]], "neuron 4 is used 2 times"),
        ([0, 1], [[2, 3], [4, 6]], "neuron 5 is used 0 times"),
    ],
)
def test_a_lost_or_doubled_neuron_is_found(shared, groups, message):
    carved = CarvedBlock(
        shared=torch.tensor(shared),
        groups_EW=torch.tensor(groups),
        router_EH=torch.zeros(2, HIDDEN),
        correction=None,
        down_HI=torch.zeros(HIDDEN, 6),
    )
    with pytest.raises(ModelError, match=message):
        check_partition(carved, 6)
