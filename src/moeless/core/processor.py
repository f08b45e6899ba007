"""What the processor and the system can do, read once, in one place.

Whoever needs to know asks here, so that a test or an operator can switch an ability off: with the
variables that the libraries heed themselves (``ONEDNN_MAX_CPU_ISA``, ``NUMBA_CPU_NAME``,
``NUMBA_CPU_FEATURES``, ``NUMBA_DISABLE_JIT``), or by its name in ``MOELESS_WITHOUT``, a list
separated by commas or spaces. This module must not know who uses an ability, nor how.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moeless.errors import ConfigError

WITHOUT_VARIABLE = "MOELESS_WITHOUT"
ABILITIES = {
    "bfloat16": "matrix products of bfloat16 as fast as those of float32, in torch",
    "float16": "the same for float16",
    "amx-loops": "AMX's registers in compiled loops",
    "bfloat16-loops": "the instruction avx512_bf16 in compiled loops",
    "ordered-memory": "stores seen by other cores in the order in which they were made (x86-64)",
    "real-time": "asking for real-time priority, for the control loop",
}
"""Names for ``MOELESS_WITHOUT``, and what each stands for."""

_CPU_INFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is ARM's
_FLOAT16_FLAGS = {"avx512_fp16", "amx_fp16", "asimdhp"}
# What oneDNN may use at most, by its own names; all and default are no limit.
_NO_LIMIT = ("", "ALL", "DEFAULT")
_BFLOAT16_ISAS = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10")
_FLOAT16_ISAS = ("AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10")
_NUMBA_VARIABLES = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Abilities of the processor that we run on, less those that are switched off.

    Args:
        fast_dtypes: Dtypes whose matrix products torch computes at least as fast as float32's;
            float32 is one of them. Others are emulated, at a fifth of that speed or less.
        has_amx: Compiled loops may use AMX's products of bfloat16, if the system grants it.
        has_bfloat16_dot: Compiled loops may use ``avx512_bf16``.
        keeps_memory_order: Loads are not moved before earlier loads, nor stores before earlier
            stores, as other cores see them.
        may_ask_for_real_time: Nobody has forbidden to ask; the system may still refuse.
    """

    fast_dtypes: frozenset[str]
    has_amx: bool
    has_bfloat16_dot: bool
    keeps_memory_order: bool
    may_ask_for_real_time: bool


def describe_processor(
    *, machine: str, flags: frozenset[str], environment: Mapping[str, str]
) -> Processor:
    """Conclude from facts what a processor can do.

    Args:
        machine: Its architecture, as ``platform.machine`` has it.
        flags: Features that the system lists.
        environment: Variables of the process.

    Raises:
        ConfigError: ``MOELESS_WITHOUT`` names an ability that there is not.
    """
    without = _switched_off(environment)
    isa = environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA", "")
    fast = {"float32"}
    for dtype, needs, isas in (
        ("bfloat16", _BFLOAT16_FLAGS, _BFLOAT16_ISAS),
        ("float16", _FLOAT16_FLAGS, _FLOAT16_ISAS),
    ):
        if dtype not in without and needs & flags and _allows(isa, isas):
            fast.add(dtype)
    jit_off = environment.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    numba_changed = jit_off or any(environment.get(name) for name in _NUMBA_VARIABLES)
    is_x86 = machine in ("x86_64", "AMD64")
    return Processor(
        fast_dtypes=frozenset(fast),
        has_amx={"amx_bf16", "avx512f"} <= flags
        and not numba_changed
        and "amx-loops" not in without,
        has_bfloat16_dot="avx512_bf16" in flags
        and not numba_changed
        and "bfloat16-loops" not in without,
        keeps_memory_order=is_x86 and "ordered-memory" not in without,
        may_ask_for_real_time="real-time" not in without,
    )


@cache
def this_processor() -> Processor:
    """The processor that we run on; what is switched off is asked once in a process.

    Raises:
        ConfigError: See ``describe_processor``.
    """
    return describe_processor(
        machine=platform.machine(), flags=_read_flags(_CPU_INFO), environment=os.environ
    )


def _switched_off(environment: Mapping[str, str]) -> set[str]:
    names = set(environment.get(WITHOUT_VARIABLE, "").replace(",", " ").split())
    unknown = sorted(names - set(ABILITIES))
    if unknown:
        raise ConfigError(
            f"{WITHOUT_VARIABLE} names {unknown[0]!r}, which is no ability; use some of "
            f"{', '.join(ABILITIES)}"
        )
    return names


def _allows(isa: str, isas: tuple[str, ...]) -> bool:
    limit = isa.strip().upper()
    return limit in _NO_LIMIT or limit.startswith(isas)


def _read_flags(path: Path) -> frozenset[str]:
    """Features of the first core; none where the system does not say."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
