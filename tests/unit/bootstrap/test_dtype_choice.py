"""What ``--dtype auto`` stands for, by what a processor is fast at, devices and memory."""

from dataclasses import replace

import pytest

from moeless.bootstrap.serving import dtype_choice
from moeless.bootstrap.serving.dtype_choice import (
    ProductSpeeds,
    choose_dtype,
    dtype_chooser,
    float32_fits,
    product_speeds,
)
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.processor import describe_processor

ALL, PLAIN = frozenset({"float32", "bfloat16", "float16"}), frozenset({"float32"})
FAST = ProductSpeeds(experts=ALL, dense=ALL)
SPEC = ModelSpec(
    model_id="m",
    family="mixtral",
    layer_ids=(0, 1),
    num_experts=8,
    top_k=2,
    expert=ExpertShape(hidden=64, intermediate=128),
)
WIDE_BYTES = 3 * 64 * 128 * 4


def chosen(stored="bfloat16", *, speeds=FAST, on_cpu=True, float32_fits=True):
    return choose_dtype(stored, speeds=speeds, on_cpu=on_cpu, float32_fits=float32_fits)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_a_fast_processor_keeps_the_checkpoints_dtype(stored):
    assert chosen(stored).dtype == stored


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "speeds",
    [
        ProductSpeeds(experts=PLAIN, dense=PLAIN),
        ProductSpeeds(experts=ALL, dense=PLAIN),
        ProductSpeeds(experts=PLAIN, dense=ALL),
    ],
)
def test_a_processor_that_is_slow_in_any_part_gets_float32_and_the_reason(stored, speeds):
    choice = chosen(stored, speeds=speeds)
    assert choice.dtype == "float32"
    assert choice.describe() == (
        f"computing in float32: this processor is slow in the checkpoint's {stored} "
        f"(--dtype {stored} keeps it)"
    )
    assert chosen("float32", speeds=speeds).dtype == "float32"


def test_without_memory_for_float32_the_checkpoints_dtype_stays_and_that_is_said():
    choice = chosen(speeds=ProductSpeeds(experts=PLAIN, dense=PLAIN), float32_fits=False)
    assert choice.dtype == "bfloat16"
    assert "too little memory" in choice.describe()


def test_experts_on_gpus_keep_the_checkpoints_dtype_whatever_the_processor():
    assert chosen(speeds=ProductSpeeds(experts=PLAIN, dense=PLAIN), on_cpu=False).dtype == (
        "bfloat16"
    )


def test_a_budget_has_to_hold_all_experts_in_float32():
    all_of_them = SPEC.num_functions // 2 * WIDE_BYTES
    assert float32_fits(SPEC, [all_of_them] * 2, copies=1.0)
    assert not float32_fits(SPEC, [all_of_them, all_of_them - 1], copies=1.0)


def test_without_a_budget_the_copies_that_are_wanted_have_to_fit_in_memory(monkeypatch):
    wide = SPEC.num_functions * WIDE_BYTES
    monkeypatch.setattr(dtype_choice, "usable_bytes", lambda: 2 * wide)
    assert float32_fits(SPEC, None, copies=1.0)
    assert not float32_fits(SPEC, None, copies=1.5)


@pytest.mark.parametrize(
    ("devices", "memory", "stored", "flags", "dtype"),
    [
        ("cpu:2", None, "float16", {"avx2"}, "float32"),
        ("cpu:2", None, "float16", {"avx2", "avx512_fp16"}, "float16"),
        ("cpu:2", WIDE_BYTES * 4, "float16", {"avx2"}, "float16"),
        ("cpu:2", WIDE_BYTES * 8, "float16", {"avx2"}, "float32"),
        ("cpu:2", None, "bfloat16", {"avx2"}, "bfloat16"),
        ("cuda:0", None, "float16", {"avx2"}, "float16"),
    ],
)
def test_devices_budgets_and_processor_are_put_together_and_told_once(
    devices, memory, stored, flags, dtype, monkeypatch
):
    spec = replace(SPEC, expert=replace(SPEC.expert, dtype=stored))
    processor = describe_processor(machine="x86_64", flags=frozenset(flags), environment={})
    monkeypatch.setattr(dtype_choice, "this_processor", lambda: processor)
    config = ExpertsConfig(
        devices=parse_devices(devices),
        device_memory_bytes=memory,
        policy=PolicyConfig(memory_factor=1.0),
    )
    said = []
    assert dtype_chooser(config, tell=said.append)(spec) == dtype
    assert len(said) == 1
    assert said[0].startswith(f"computing in {dtype}: ")


def test_bfloat16_is_slow_where_torch_emulates_it_and_nothing_can_be_compiled(monkeypatch):
    old = describe_processor(machine="x86_64", flags=frozenset({"avx2"}), environment={})
    assert "bfloat16" in product_speeds(old).experts
    monkeypatch.setattr("moeless.functions.compute.panels.can_lay_out", lambda _: False)
    assert product_speeds(old) == ProductSpeeds(experts=PLAIN, dense=PLAIN)
