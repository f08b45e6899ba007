"""Slots of a layer's stack: nobody moves, and memory comes and goes with the instances."""

import gc

import psutil
import pytest
import torch

from moeless.core.model import ExpertShape
from moeless.functions.compute.weight_stack import WeightStack
from moeless.functions.store.expert_weights import ExpertWeights


def weights_of(shape, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator).to(getattr(torch, shape.dtype))

    hidden, inner = shape.hidden, shape.intermediate
    return ExpertWeights(
        gate=draw(inner, hidden),
        up=draw(inner, hidden),
        down=draw(hidden, inner),
        gate_bias=draw(inner) if shape.bias else None,
        up_bias=draw(inner) if shape.bias else None,
        down_bias=draw(hidden) if shape.bias else None,
    )


def assert_holds(slot, weights):
    assert torch.equal(slot.gate_up, torch.cat([weights.gate, weights.up]))
    assert torch.equal(slot.down, weights.down)
    if weights.gate_bias is None:
        assert slot.gate_up_bias is None
        assert slot.down_bias is None
    else:
        assert torch.equal(slot.gate_up_bias, torch.cat([weights.gate_bias, weights.up_bias]))
        assert torch.equal(slot.down_bias, weights.down_bias)


@pytest.mark.parametrize("input_major", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_instances_that_share_pages_come_and_go_without_touching_each_other(
    dtype, bias, input_major
):
    # Slots of 1,110 or 2,220 bytes: several on a page, and some across the border of two.
    shape = ExpertShape(hidden=37, intermediate=5, dtype=dtype, bias=bias)
    stack = WeightStack(shape, 24, input_major=input_major)
    held = {}
    turn = torch.Generator().manual_seed(0)
    for step in range(400):
        expert = int(torch.randint(24, (), generator=turn))
        if expert in held:
            held.pop(expert)[0].give_back()
        else:
            weights = weights_of(shape, step)
            held[expert] = (stack.put(weights), weights)
        for slot, weights in held.values():
            assert_holds(slot, weights)


def test_an_instance_gets_the_lowest_free_slot_and_stays_there():
    shape = ExpertShape(hidden=8, intermediate=4, dtype="float32")
    stack = WeightStack(shape, 4)
    slots = [stack.put(weights_of(shape, seed)) for seed in range(4)]
    assert [slot.index for slot in slots] == [0, 1, 2, 3]
    addresses = [slot.gate_up.data_ptr() for slot in slots]
    slots[2].give_back()
    slots[0].give_back()
    assert stack.put(weights_of(shape, 5)).index == 0
    assert stack.put(weights_of(shape, 6)).index == 2
    assert [slot.gate_up.data_ptr() for slot in slots] == addresses


def test_with_inputs_first_each_input_has_its_outputs_side_by_side():
    shape = ExpertShape(hidden=8, intermediate=4, dtype="float32")
    stack = WeightStack(shape, 2, input_major=True)
    slot, weights = stack.put(weights_of(shape, 0)), weights_of(shape, 0)
    assert_holds(slot, weights)
    assert stack.stored_gate_up.is_contiguous()
    assert torch.equal(stack.stored_gate_up[0], torch.cat([weights.gate, weights.up]).t())
    assert torch.equal(stack.stored_down[0], weights.down.t())


def test_a_full_stack_and_impossible_sizes_are_memory_errors():
    shape = ExpertShape(hidden=8, intermediate=4, dtype="float32")
    stack = WeightStack(shape, 1)
    stack.put(weights_of(shape, 0))
    with pytest.raises(MemoryError, match="all 1 slots of the layer are in use"):
        stack.put(weights_of(shape, 1))
    with pytest.raises(MemoryError, match="no address space"):
        WeightStack(ExpertShape(hidden=1 << 20, intermediate=1 << 20, dtype="float32"), 1 << 16)


def test_weights_that_do_not_fit_leave_their_slot_free():
    shape = ExpertShape(hidden=8, intermediate=4, dtype="float32")
    stack = WeightStack(shape, 1)
    with pytest.raises(RuntimeError):
        stack.put(weights_of(ExpertShape(hidden=7, intermediate=4, dtype="float32"), 0))
    assert stack.put(weights_of(shape, 1)).index == 0


def test_memory_is_taken_by_loads_and_given_back_by_evictions():
    shape = ExpertShape(hidden=1024, intermediate=1000, dtype="float32")
    weights = weights_of(shape, 0)
    process = psutil.Process()

    def rss():
        return process.memory_info().rss

    slack = shape.num_bytes * 9 // 10  # others' garbage, but never an instance
    gc.collect()
    empty = rss()
    stack = WeightStack(shape, 64)  # 786 MB of address space
    assert rss() < empty + slack
    slots = [stack.put(weights) for _ in range(12)]
    full = rss()
    assert abs(full - empty - 12 * shape.num_bytes) < slack
    for slot in slots[1::2]:
        slot.give_back()
    half = rss()
    assert abs(half - empty - 6 * shape.num_bytes) < slack
    assert torch.count_nonzero(slots[1].gate_up) < 2048  # zeros, but for shared pages
    assert rss() < half + slack, "reading a free slot took memory"
    assert_holds(slots[0], weights)
    for slot in slots[::2]:
        slot.give_back()
    assert rss() < empty + slack
