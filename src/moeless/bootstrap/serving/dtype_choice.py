"""Which dtype ``--dtype auto`` stands for: what the processor is fast at, if memory allows it.

The checkpoint's own is taken where its products are fast. bfloat16's are on every CPU that loops
can be compiled for: weights are widened in registers where there are no instructions for it. Where
torch emulates products instead (float16 on most CPUs), several times slower than float32, float32
is taken, unless it would not fit where the checkpoint's own does. With experts on GPUs it is
always the checkpoint's own.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from moeless.bootstrap.policies import PolicyOptions
from moeless.config import ExpertsConfig
from moeless.core.model import DTYPE_BYTES, ModelSpec
from moeless.core.processor import Processor, this_processor
from moeless.errors import FunctionError
from moeless.functions.host.physical_memory import usable_bytes
from moeless.functions.supervisor.admin_client import AdminClient
from moeless.functions.supervisor.pool_directory import find_directory

_EXPERTS_SHARE = 0.75
"""Part of the memory that experts may take; the rest is for everything else."""


@dataclass(frozen=True, kw_only=True)
class ProductSpeeds:
    """Dtypes whose matrix products are at least as fast as float32's.

    Args:
        experts: In experts.
        dense: In the layers that are not experts.
    """

    experts: frozenset[str]
    dense: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class DtypeChoice:
    """A dtype and why.

    Args:
        dtype: The one to compute in.
        reason: For the operator, in a few words.
    """

    dtype: str
    reason: str

    def describe(self) -> str:
        """In one line."""
        return f"computing in {self.dtype}: {self.reason}"


def choose_dtype(
    stored: str, *, speeds: ProductSpeeds, on_cpu: bool, float32_fits: bool
) -> DtypeChoice:
    """Decide what ``auto`` stands for.

    Args:
        stored: The checkpoint's own.
        speeds: What is fast here.
        on_cpu: Experts run on CPU devices.
        float32_fits: Experts fit in float32, or would not in ``stored`` either.
    """
    if not on_cpu:
        return DtypeChoice(dtype=stored, reason="the checkpoint's own")
    if stored in speeds.experts & speeds.dense:
        return DtypeChoice(dtype=stored, reason="the checkpoint's own, which this processor knows")
    if not float32_fits:
        return DtypeChoice(
            dtype=stored,
            reason="the checkpoint's own; this processor is faster in float32, but there is too "
            "little memory for it",
        )
    return DtypeChoice(
        dtype="float32",
        reason=f"this processor is slow in the checkpoint's {stored} (--dtype {stored} keeps it)",
    )


def product_speeds(processor: Processor) -> ProductSpeeds:
    """What a processor computes fast.

    Args:
        processor: Its abilities.
    """
    from moeless.functions.compute.panels import can_lay_out

    widened = {"bfloat16"} if can_lay_out("bfloat16") else set[str]()
    fast = processor.fast_dtypes | widened
    return ProductSpeeds(experts=fast, dense=fast)


def float32_fits(spec: ModelSpec, budgets_bytes: Sequence[int] | None, *, copies: float) -> bool:
    """Whether experts fit in float32 as they do in their own dtype.

    Args:
        spec: The model in its own dtype.
        budgets_bytes: What devices may hold [D]; None where that follows from the copies.
        copies: Copies of all experts that are to be held.
    """
    expert = spec.expert
    if budgets_bytes is None:
        limit = _EXPERTS_SHARE * usable_bytes()
        return copies * spec.num_functions * expert.num_parameters * DTYPE_BYTES["float32"] < limit
    # One copy of all is held, or else fewer than there could be.
    wide_bytes = replace(expert, dtype="float32").num_bytes
    return sum(budget // wide_bytes for budget in budgets_bytes) >= spec.num_functions


def dtype_chooser(
    config: ExpertsConfig, *, tell: Callable[[str], None] = lambda _: None
) -> Callable[[ModelSpec], str]:
    """What ``auto`` stands for with some devices; the loader asks it.

    Args:
        config: Devices and budgets.
        tell: Told the choice in a line.
    """
    on_cpu = all(device.kind == "cpu" for device in config.devices)
    budgets = None
    if config.device_memory_bytes is not None:
        budgets = [config.device_memory_bytes] * len(config.devices)
    if config.pool is not None:
        # A pool that does not answer is told of when the engine attaches to it.
        with (
            suppress(FunctionError),
            AdminClient(find_directory(config.pool).admin_socket) as pool,
        ):
            devices = [d for d in pool.list_devices() if d["budget_bytes"]]
            on_cpu = all(str(d["label"]).startswith("cpu") for d in devices)
            budgets = [int(d["budget_bytes"]) for d in devices]
    copies = PolicyOptions(memory_factor=config.policy.memory_factor).fixed_memory_factor

    def choose(spec: ModelSpec) -> str:
        choice = choose_dtype(
            spec.expert.dtype,
            speeds=product_speeds(this_processor()),
            on_cpu=on_cpu,
            float32_fits=float32_fits(spec, budgets, copies=max(1.0, copies)),
        )
        tell(choice.describe())
        return choice.dtype

    return choose
