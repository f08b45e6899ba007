"""Abilities follow what the system lists, less what is switched off."""

import platform

import pytest

from moeless.core.processor import ABILITIES, Processor, describe_processor, this_processor
from moeless.errors import ConfigError

OLD = frozenset({"sse4_2", "avx2", "fma", "f16c"})
NEW = OLD | {"avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile"}
ARM = frozenset({"asimd", "asimdhp", "bf16", "i8mm"})


def described(flags, machine="x86_64", **environment):
    return describe_processor(machine=machine, flags=flags, environment=environment)


def test_a_processor_with_the_instructions_is_fast_in_all_dtypes():
    assert described(NEW) == Processor(
        fast_dtypes=frozenset({"float32", "bfloat16", "float16"}),
        has_amx=True,
        has_bfloat16_dot=True,
        keeps_memory_order=True,
        may_ask_for_real_time=True,
    )


def test_a_processor_without_them_is_fast_in_float32_only():
    found = described(OLD)
    assert found.fast_dtypes == {"float32"}
    assert not found.has_amx
    assert not found.has_bfloat16_dot
    assert found.keeps_memory_order


def test_an_arm_processor_knows_bfloat16_but_keeps_no_order():
    found = described(ARM, machine="aarch64")
    assert found.fast_dtypes == {"float32", "bfloat16", "float16"}
    assert not found.has_bfloat16_dot
    assert not found.keeps_memory_order
    assert described(ARM - {"bf16", "asimdhp"}, machine="aarch64").fast_dtypes == {"float32"}


def test_nothing_is_known_of_a_system_that_lists_nothing():
    assert described(frozenset(), machine="riscv64").fast_dtypes == {"float32"}


@pytest.mark.parametrize(
    ("isa", "fast"),
    [
        ("AVX2", set()),
        ("avx512_core", set()),
        ("AVX512_CORE_VNNI", set()),
        ("AVX512_CORE_BF16", {"bfloat16"}),
        ("AVX512_CORE_AMX", {"bfloat16", "float16"}),
        ("avx10_1_512_amx", {"bfloat16", "float16"}),
        ("ALL", {"bfloat16", "float16"}),
        ("", {"bfloat16", "float16"}),
    ],
)
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_what_onednn_may_use_bounds_what_is_fast(variable, isa, fast):
    assert described(NEW, **{variable: isa}).fast_dtypes == {"float32"} | fast


@pytest.mark.parametrize(
    ("variable", "value", "kept"),
    [
        ("NUMBA_CPU_NAME", "haswell", False),
        ("NUMBA_CPU_FEATURES", "+avx2", False),
        ("NUMBA_DISABLE_JIT", "1", False),
        ("NUMBA_DISABLE_JIT", "0", True),
        ("NUMBA_CPU_NAME", "", True),
    ],
)
def test_loops_do_not_use_what_their_compiler_is_told_not_to(variable, value, kept):
    found = described(NEW, **{variable: value})
    assert found.has_bfloat16_dot is kept
    assert "bfloat16" in found.fast_dtypes


def test_each_ability_can_be_switched_off_by_name_and_leaves_the_others():
    def flat(processor):
        return {
            "bfloat16": "bfloat16" in processor.fast_dtypes,
            "float16": "float16" in processor.fast_dtypes,
            "amx-loops": processor.has_amx,
            "bfloat16-loops": processor.has_bfloat16_dot,
            "ordered-memory": processor.keeps_memory_order,
            "real-time": processor.may_ask_for_real_time,
        }

    assert set(flat(described(NEW))) == set(ABILITIES)
    for name in ABILITIES:
        expected = {other: other != name for other in ABILITIES}
        assert flat(described(NEW, MOELESS_WITHOUT=f" {name},")) == expected
    assert not any(flat(described(NEW, MOELESS_WITHOUT=" ".join(ABILITIES))).values())


def test_an_ability_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"MOELESS_WITHOUT names 'avx9'.*use some of bfloat16,"):
        described(NEW, MOELESS_WITHOUT="avx9")


def test_the_processor_that_we_run_on_is_described_once():
    assert this_processor() is this_processor()
    assert "float32" in this_processor().fast_dtypes
    if platform.machine() != "x86_64":
        assert not this_processor().keeps_memory_order
