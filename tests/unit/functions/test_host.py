"""Invocations of one device compute each expert's rows, however they are batched."""

import threading

import numpy as np
import psutil
import pytest
import torch
from torch.nn.functional import linear, relu, silu

from moeless.core.model import ExpertShape, FunctionId, ModelSpec
from moeless.errors import CheckpointError, FunctionError
from moeless.functions.compute import together
from moeless.functions.compute.kernels import gated_activation, is_packed, is_stacked
from moeless.functions.compute.padded import Padding, small_activation
from moeless.functions.host.headroom import SMALL_BYTES, invocation_bytes
from moeless.functions.host.host import NOT_WARM, OK, ExpertHost, function_bytes
from moeless.functions.store.digest import digest_weights
from moeless.functions.store.expert_weights import ExpertWeights
from moeless.functions.worker.weight_pages import weight_pages

EXPERTS = 6


class Store:
    """Random weights, the same for the same expert."""

    def __init__(self, shape):
        self._shape = shape
        self.seed = 0
        self.load_bytes = shape.num_bytes

    def load(self, layer, expert, *, memory=None):
        generator = torch.Generator().manual_seed(self.seed + 100 * layer + expert)
        hidden, inner = self._shape.hidden, self._shape.intermediate
        dtype = getattr(torch, self._shape.dtype)

        if memory is not None:
            memory.begin()

        def draw(*size):
            drawn = (torch.randn(*size, generator=generator) / size[-1] ** 0.5).to(dtype)
            return drawn if memory is None else memory.take(size, dtype).copy_(drawn)

        bias = self._shape.bias
        return ExpertWeights(
            gate=draw(inner, hidden),
            up=draw(inner, hidden),
            down=draw(hidden, inner),
            gate_bias=draw(inner) if bias else None,
            up_bias=draw(inner) if bias else None,
            down_bias=draw(hidden) if bias else None,
        )


class DecodingStore(Store):
    """What it reads takes more memory than what comes of it."""

    def load(self, layer, expert, *, memory=None):
        weights = super().load(layer, expert, memory=memory)
        if memory is not None:
            memory.take((self._shape.num_bytes,), torch.uint8)
        return weights


def make_host(shape, *, warm=range(EXPERTS), experts=EXPERTS, store=Store):
    spec = ModelSpec(
        model_id="m", family="f", layer_ids=(0, 1), num_experts=experts, top_k=1, expert=shape
    )
    host, store = ExpertHost("cpu"), store(shape)
    host.add_model(store, spec)
    for expert in warm:
        host.load(FunctionId("m", 1, expert))
    return host, store


WAYS = ("apart", "padded", "row by row", "bfloat16 tiles")


def choose(monkeypatch, way):
    """Have small experts always run in one way, where they can."""

    def find_padding(_gate_up, slots_n, sizes_n):
        lowest = min(slots_n)
        slots = max(slots_n) - lowest + 1
        return Padding(lowest=lowest, slots=slots, rows=max(sizes_n), needed=sum(sizes_n))

    def row_loops_can(stack, _sizes_n):
        return stack.gate_up.dtype == torch.float32 and stack.gate_up_bias is None

    def tiles_can(stack, _sizes_n):
        return stack.is_input_major

    chosen = find_padding if way == "padded" else lambda *_: None
    monkeypatch.setattr(together, "find_padding", chosen)
    pays = row_loops_can if way == "row by row" else lambda *_: False
    monkeypatch.setattr(together, "row_loops_pay", pays)
    pays = tiles_can if way == "bfloat16 tiles" else lambda *_: False
    monkeypatch.setattr(together, "bfloat16_loops_pay", pays)


def expected(shape, weights, x):
    """The formula, in float64."""

    def apply(rows, weight, bias):
        return linear(rows, weight.double(), None if bias is None else bias.double())

    gate = apply(x.double(), weights.gate, weights.gate_bias)
    up = apply(x.double(), weights.up, weights.up_bias)
    if shape.activation == "swiglu_clamped":
        gate = gate.clamp(max=shape.limit)
        up = up.clamp(min=-shape.limit, max=shape.limit)
        inner = (up + 1) * gate * torch.sigmoid(shape.alpha * gate)
    elif shape.activation == "relu":
        inner = relu(gate) * up
    else:
        inner = silu(gate) * up
    return apply(inner, weights.down, weights.down_bias)


def invoke_and_check(host, store, shape, segments, *, warm, tokens=9):
    """Invoke the segments and compare each row; rows of nobody must stay as they were."""
    dtype = getattr(torch, shape.dtype)
    total = max((stop for _, _, stop in segments), default=0) + 2
    x_TH = torch.randn(tokens, shape.hidden).to(dtype)
    token_S = torch.randint(tokens, (total,))
    y_SH = torch.full((total, shape.hidden), 77.0, dtype=dtype)
    status_n = np.full(len(segments), 9, dtype=np.uint8)
    host.invoke(
        "m",
        1,
        x_TH=x_TH,
        token_S=token_S,
        segments_n3=np.array(segments, dtype=np.int32).reshape(-1, 3),
        y_SH=y_SH,
        status_n=status_n,
    )
    untouched = torch.ones(total, dtype=torch.bool)
    for status, (expert, start, stop) in zip(status_n, segments, strict=True):
        assert status == (OK if expert in warm else NOT_WARM)
        if expert not in warm:
            continue
        untouched[start:stop] = False
        wanted = expected(shape, store.load(1, expert), x_TH[token_S[start:stop]])
        atol = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(y_SH[start:stop].double(), wanted, atol=atol, rtol=atol)
    assert (y_SH[untouched] == 77.0).all()


ROUTES = {
    "all experts": [(e, 5 * e, 5 * e + 5) for e in range(EXPERTS)],
    "one row each": [(e, e, e + 1) for e in range(EXPERTS)],
    "very different": [(0, 0, 1), (1, 1, 40), (3, 40, 42), (5, 42, 43)],
    "rows of others between": [(0, 3, 5), (2, 9, 20), (3, 20, 21), (5, 30, 37)],
    "one expert": [(4, 0, 7)],
    "nothing": [],
}
SHAPES = {
    "small": ExpertShape(hidden=40, intermediate=24, dtype="float32"),
    "small, bfloat16": ExpertShape(hidden=40, intermediate=24, dtype="bfloat16"),
    "clamped with biases": ExpertShape(
        hidden=40, intermediate=24, activation="swiglu_clamped", bias=True, dtype="float32"
    ),
    "clamped with biases, bfloat16": ExpertShape(
        hidden=40, intermediate=24, activation="swiglu_clamped", bias=True, dtype="bfloat16"
    ),
    "whole tiles, bfloat16": ExpertShape(hidden=96, intermediate=48, dtype="bfloat16"),
    "relu": ExpertShape(hidden=40, intermediate=24, activation="relu", dtype="float32"),
    "relu, whole tiles, bfloat16": ExpertShape(
        hidden=64, intermediate=16, activation="relu", dtype="bfloat16"
    ),
    "large": ExpertShape(hidden=512, intermediate=264, dtype="float32"),
    "large, bfloat16": ExpertShape(hidden=512, intermediate=264, dtype="bfloat16"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_is_its_experts_output(shape, route, way, monkeypatch):
    choose(monkeypatch, way)
    host, store = make_host(SHAPES[shape])
    invoke_and_check(host, store, SHAPES[shape], ROUTES[route], warm=range(EXPERTS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_cold_experts_are_refused_and_the_others_computed(shape, way, monkeypatch):
    choose(monkeypatch, way)
    host, store = make_host(SHAPES[shape], warm=[5, 1, 2])
    segments = ROUTES["all experts"]
    invoke_and_check(host, store, SHAPES[shape], segments, warm=[5, 1, 2])
    host.evict(FunctionId("m", 1, 1))
    invoke_and_check(host, store, SHAPES[shape], segments, warm=[5, 2])
    host.load(FunctionId("m", 1, 4))
    invoke_and_check(host, store, SHAPES[shape], segments, warm=[5, 2, 4])
    for expert in (5, 2, 4):
        host.evict(FunctionId("m", 1, expert))
    invoke_and_check(host, store, SHAPES[shape], segments, warm=[])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 4, 300, 6000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whatever_the_rules_choose_rows_are_right(dtype, rows, threads):
    shape = ExpertShape(hidden=96, intermediate=48, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        host, store = make_host(shape)
        segments = [(e, rows * e, rows * e + rows) for e in range(EXPERTS)]
        invoke_and_check(host, store, shape, segments, warm=range(EXPERTS), tokens=rows)
    finally:
        torch.set_num_threads(before)


def test_few_float32_rows_go_through_the_compiled_loops(monkeypatch):
    loops = []
    run = together.run_row_loops
    monkeypatch.setattr(together, "run_row_loops", lambda *a, **k: loops.append(1) or run(*a, **k))
    shape = ExpertShape(hidden=96, intermediate=48, dtype="float32")
    host, store = make_host(shape)
    segments = [(e, e, e + 1) for e in range(EXPERTS)]
    invoke_and_check(host, store, shape, segments, warm=range(EXPERTS))
    assert loops == [1]


def test_rows_need_not_be_contiguous_in_memory():
    shape = SHAPES["small"]
    host, store = make_host(shape)
    x_TH = torch.randn(shape.hidden, 3).t()
    y_SH, status_n = torch.zeros(3, shape.hidden), np.zeros(1, dtype=np.uint8)
    host.invoke(
        "m",
        1,
        x_TH=x_TH,
        token_S=torch.arange(3),
        segments_n3=np.array([[2, 0, 3]], dtype=np.int32),
        y_SH=y_SH,
        status_n=status_n,
    )
    assert status_n.tolist() == [OK]
    wanted = expected(shape, store.load(1, 2), x_TH).float()
    torch.testing.assert_close(y_SH, wanted, atol=1e-5, rtol=1e-5)


def test_a_single_token_may_go_to_several_experts(monkeypatch):
    for way in WAYS:
        choose(monkeypatch, way)
        host, store = make_host(SHAPES["small"])
        segments = [(1, 0, 1), (2, 1, 2), (5, 2, 3)]
        invoke_and_check(host, store, SHAPES["small"], segments, warm=range(EXPERTS), tokens=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_instances_hold_the_bytes_that_were_announced(shape):
    host, _ = make_host(SHAPES[shape])
    each = function_bytes(SHAPES[shape], "cpu")
    assert each >= SHAPES[shape].num_bytes
    assert host.resident_bytes == EXPERTS * each
    assert host.load(FunctionId("m", 1, 0)) == each  # once more: nothing changes
    assert host.resident_bytes == EXPERTS * each
    host.evict(FunctionId("m", 1, 0))
    assert host.resident_bytes == (EXPERTS - 1) * each


LARGE = [name for name in SHAPES if name.startswith("large")]


def lay_out_all(host):
    """Returns how many instances there were to lay out."""
    return len(list(iter(host.lay_out_next, False)))


def has_layout(shape):
    """Whether experts get a layout of their own: not where torch has none for their dtype."""
    return is_packed(shape, "cpu")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", LARGE)
def test_large_experts_compute_as_they_were_read_until_they_are_laid_out(shape, route):
    host, store = make_host(SHAPES[shape])
    held = host.resident_bytes
    for _ in range(EXPERTS):
        invoke_and_check(host, store, SHAPES[shape], ROUTES[route], warm=range(EXPERTS))
        assert host.lay_out_next() is has_layout(SHAPES[shape])
    invoke_and_check(host, store, SHAPES[shape], ROUTES[route], warm=range(EXPERTS))
    assert not host.lay_out_next()
    assert host.resident_bytes == held


def test_only_experts_with_a_layout_of_their_own_have_to_be_laid_out():
    for name, shape in SHAPES.items():
        assert is_stacked(shape, "cpu") is (name not in LARGE)
        assert not (has_layout(shape) and is_stacked(shape, "cpu"))
        assert lay_out_all(make_host(shape)[0]) == (EXPERTS if has_layout(shape) else 0)


def test_an_instance_that_has_left_is_not_laid_out():
    host, store = make_host(SHAPES["large"], warm=[1, 2])
    host.evict(FunctionId("m", 1, 1))
    assert lay_out_all(host) == 1
    invoke_and_check(host, store, SHAPES["large"], ROUTES["all experts"], warm=[2])


def test_without_memory_for_another_layout_an_instance_stays_as_it_was_read(monkeypatch):
    host, store = make_host(SHAPES["large"])

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("moeless.functions.host.host.build_kernel", fail)
    assert lay_out_all(host) == EXPERTS
    segments = ROUTES["all experts"]
    invoke_and_check(host, store, SHAPES["large"], segments, warm=range(EXPERTS))


def test_what_reading_left_too_large_is_laid_out_at_once():
    host, store = make_host(SHAPES["large"], store=DecodingStore)
    assert lay_out_all(host) == 0
    segments = ROUTES["all experts"]
    invoke_and_check(host, store, SHAPES["large"], segments, warm=range(EXPERTS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_experts_hold_no_more_memory_than_their_bytes_before_and_after(dtype):
    shape = ExpertShape(hidden=1024, intermediate=1024, dtype=dtype)
    host, _ = make_host(shape, warm=(), experts=8)
    process = psutil.Process()
    instances = [FunctionId("m", 0, expert) for expert in range(8)]

    def fill():
        with weight_pages():
            for function in instances:
                host.load(function)
            as_read = process.memory_info().rss
            assert lay_out_all(host) == (len(instances) if has_layout(shape) else 0)
        return as_read, process.memory_info().rss

    fill()  # what the libraries need stays
    for function in instances:
        host.evict(function)
    before = process.memory_info().rss
    for rss in fill():
        assert rss - before < 1.2 * host.resident_bytes


def test_only_what_is_large_is_worth_fetching_before_its_load():
    for hidden, worth in ((64, False), (1024, True)):
        host, _ = make_host(ExpertShape(hidden=hidden, intermediate=512), warm=())
        assert host.should_fetch(FunctionId("m", 0, 0)) is worth
        assert not host.should_fetch(FunctionId("another model", 0, 0))


def test_a_small_instance_takes_its_own_bytes_and_no_padding():
    for shape in ("small", "small, bfloat16", "clamped with biases"):
        assert function_bytes(SHAPES[shape], "cpu") == SHAPES[shape].num_bytes


def test_small_experts_give_their_memory_back_to_the_system():
    # 1.4 MB each, in pieces that malloc would serve from its heap.
    shape = ExpertShape(hidden=1000, intermediate=120, dtype="float32")
    host, _ = make_host(shape, warm=(), experts=64)
    process = psutil.Process()
    instances = [FunctionId("m", layer, expert) for layer in range(2) for expert in range(64)]
    host.load(instances[0])  # what reading an expert needs for itself stays
    before = process.memory_info().rss
    for function in instances:
        host.load(function)
    held = host.resident_bytes
    assert held == 128 * shape.num_bytes
    after = process.memory_info().rss
    assert 0.9 * held < after - before < 1.1 * held
    for function in instances[1:]:
        host.evict(function)
    assert process.memory_info().rss - before < 0.1 * held


def test_loads_and_evictions_do_not_disturb_invocations_of_others():
    shape = ExpertShape(hidden=64, intermediate=40, dtype="float32")
    host, store = make_host(shape, warm=[0, 2, 4])
    segments = [(0, 0, 6), (2, 6, 9), (4, 9, 20)]
    stop, failures = threading.Event(), []

    def come_and_go():
        try:
            while not stop.is_set():
                for expert in (1, 3, 5):
                    host.load(FunctionId("m", 1, expert))
                for expert in (3, 1, 5):
                    host.evict(FunctionId("m", 1, expert))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(200):
            invoke_and_check(host, store, shape, segments, warm=[0, 2, 4])
    finally:
        stop.set()
        thread.join()
    assert not failures


def test_memory_that_runs_out_is_said_with_the_instance(monkeypatch):
    host, _ = make_host(SHAPES["small"], warm=())

    def fail(*_, **__):
        raise MemoryError("no address space for 6 experts")

    monkeypatch.setattr("moeless.functions.host.host.WeightStack", fail)
    with pytest.raises(FunctionError, match=r"cpu cannot hold .*no address space for 6 experts"):
        host.load(FunctionId("m", 1, 0))
    assert host.resident_bytes == 0


def without_room(monkeypatch):
    """What is looked for: what a load takes, and what it leaves; there is none from now on."""
    asked = []

    def refuse(load_bytes, headroom_bytes):
        asked.append((load_bytes, headroom_bytes))
        raise MemoryError("no room")

    monkeypatch.setattr("moeless.functions.host.host.require_room", refuse)
    return asked


@pytest.mark.parametrize("shape", SHAPES)
def test_without_room_a_load_does_not_even_begin_to_read(shape, monkeypatch):
    host, store = make_host(SHAPES[shape], warm=(0,))
    monkeypatch.setattr(store, "load", lambda *_, **__: pytest.fail("it was read"))
    without_room(monkeypatch)
    with pytest.raises(FunctionError, match=r"cpu cannot hold .*no room"):
        host.load(FunctionId("m", 1, 1))
    invoke_and_check(host, Store(SHAPES[shape]), SHAPES[shape], ROUTES["all experts"], warm=[0])


def test_a_model_whose_instances_find_no_room_is_refused(monkeypatch):
    without_room(monkeypatch)
    with pytest.raises(FunctionError, match="cpu cannot hold m: no room"):
        make_host(SHAPES["large"])


def test_without_room_for_another_layout_an_instance_stays_as_it_was_read(monkeypatch):
    host, store = make_host(SHAPES["large"])
    without_room(monkeypatch)
    assert lay_out_all(host) == EXPERTS
    segments = ROUTES["all experts"]
    invoke_and_check(host, store, SHAPES["large"], segments, warm=range(EXPERTS))


def test_loads_leave_room_for_the_largest_invocation_that_any_engine_may_ask_for(monkeypatch):
    shape = SHAPES["large"]
    host, _ = make_host(shape, warm=())
    asked = without_room(monkeypatch)
    for rows in (8, 512, 64):
        host.expect_rows("m", rows)
        with pytest.raises(FunctionError):
            host.load(FunctionId("m", 1, 0))
    most = SMALL_BYTES + invocation_bytes(shape, 512)
    assert asked == [
        (shape.num_bytes, SMALL_BYTES + invocation_bytes(shape, 8)),
        (shape.num_bytes, most),
        (shape.num_bytes, most),
    ]


def test_what_is_decoded_takes_room_for_what_was_read_and_what_comes_of_it(monkeypatch):
    host, store = make_host(SHAPES["large"], warm=(), store=DecodingStore)
    store.load_bytes = 3 * SHAPES["large"].num_bytes
    asked = without_room(monkeypatch)
    with pytest.raises(FunctionError):
        host.load(FunctionId("m", 1, 0))
    assert asked[0][0] == store.load_bytes + function_bytes(SHAPES["large"], "cpu")


def test_the_first_instance_of_a_layer_takes_room_for_the_stack_of_all(monkeypatch):
    shape = SHAPES["small"]
    host, _ = make_host(shape, warm=(0,))
    asked = without_room(monkeypatch)
    for layer in (0, 1):
        with pytest.raises(FunctionError):
            host.load(FunctionId("m", layer, 1))
    assert asked[0][0] - asked[1][0] == EXPERTS * shape.num_bytes


def test_a_thread_that_loads_leaves_the_threads_of_others_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        host, _ = make_host(SHAPES["large"], warm=())
        seen = {}

        def load():
            host.load(FunctionId("m", 1, 0))
            seen["loader"] = torch.get_num_threads()

        def look():
            seen["later"] = torch.get_num_threads()

        for run in (load, look):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        assert seen == {"loader": 1, "later": 2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_weights_that_changed_since_they_were_first_loaded_are_refused():
    host, store = make_host(ExpertShape(hidden=8, intermediate=4), warm=[2])
    function = FunctionId("m", 1, 2)
    known = host.digest(function)
    host.evict(function)
    store.seed = 7
    with pytest.raises(CheckpointError, match="layer 1, expert 2 are not those that were served"):
        host.load(function)
    store.seed = 0
    host.load(function)
    assert host.digest(function) == known


def test_weights_that_differ_from_what_another_host_loaded_are_refused():
    host, _ = make_host(ExpertShape(hidden=8, intermediate=4), warm=[2])
    other, store = make_host(ExpertShape(hidden=8, intermediate=4), warm=[])
    function = FunctionId("m", 1, 2)
    store.seed = 7
    with pytest.raises(CheckpointError, match="restore it"):
        other.load(function, digest=host.digest(function))
    store.seed = 0
    other.load(function, digest=host.digest(function))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_digest_heeds_every_value_and_its_place(dtype):
    shape = ExpertShape(hidden=64, intermediate=48, dtype=dtype, bias=True)
    weights = Store(shape).load(0, 0)
    before = digest_weights(weights)
    for tensor in weights.tensors():
        flat = tensor.view(-1)
        for place in (0, len(flat) // 2, len(flat) - 1):
            kept = flat[place].clone()
            flat[place] += 1
            assert digest_weights(weights) != before
            flat[place] = kept
    first = weights.down.view(-1)[0].clone()
    weights.down.view(-1)[0] = weights.down.view(-1)[1]
    weights.down.view(-1)[1] = first
    assert digest_weights(weights) != before


def test_the_compiled_activation_is_torchs_to_the_bit_for_every_bfloat16():
    shape = ExpertShape(hidden=8, intermediate=3, dtype="bfloat16")
    compiled, plain = small_activation(shape, "cpu"), gated_activation(shape)
    every = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16)).view(torch.bfloat16)
    for factor in (1.0, -3.25, 0.0, 1e30):
        up = torch.full_like(every, factor)
        h = torch.stack([every, every.flip(0), every.roll(77), up, up, up], dim=1)
        torch.testing.assert_close(compiled(h), plain(h), rtol=0, atol=0, equal_nan=True)


def test_only_small_bfloat16_experts_on_a_cpu_have_the_compiled_activation():
    def is_compiled(device="cpu", **changes):
        facts = {"hidden": 64, "intermediate": 16, "dtype": "bfloat16"} | changes
        return small_activation(ExpertShape(**facts), device).__name__ == "compiled"

    assert is_compiled()
    assert not is_compiled(dtype="float32")
    assert not is_compiled(activation="gelu")
    assert not is_compiled(hidden=4096, intermediate=14336)
    assert not is_compiled(device="cuda:0")


def test_small_experts_take_no_pages_of_their_own():
    for hidden, takes in ((64, False), (1024, True)):
        host, _ = make_host(ExpertShape(hidden=hidden, intermediate=512), warm=())
        assert host.takes_pages(FunctionId("m", 0, 0)) is takes
