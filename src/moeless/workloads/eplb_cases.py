"""Small loads on which EPLB's greedy replication falls short, to measure other planners against.

The balancedness (mean ÷ max device load, each expert's load split evenly over its copies) was
measured with the public implementation, github.com/deepseek-ai/EPLB.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.workloads.routing_trace import RoutingTrace, TraceMeta


@dataclass(frozen=True, kw_only=True)
class EplbCase:
    """One layer's load, and the slots it may be replicated into.

    Args:
        name: A short one.
        loads: Tokens of each expert.
        slots: Replicas in all.
        devices: D.
        eplb_balancedness: What EPLB reaches; None where it is no number (no load).
        reachable_balancedness: What the same slots allow.
    """

    name: str
    loads: tuple[int, ...]
    slots: int
    devices: int
    eplb_balancedness: float | None
    reachable_balancedness: float | None

    @property
    def load_E(self) -> NDArray[np.float64]:
        """The loads as planners take them, float64 [E]."""
        return np.array(self.loads, dtype=np.float64)

    def as_trace(self, steps: int = 1) -> RoutingTrace:
        """The same load at every step, top-1, one layer.

        Args:
            steps: N.
        """
        tokens = sum(self.loads)
        meta = TraceMeta(
            model="synthetic",
            num_layers=1,
            num_experts=len(self.loads),
            top_k=1,
            layer_ids=(0,),
            unit="steps",
            phase="synthetic",
            source=f"synthetic EPLB case {self.name}",
            licence="synthetic",
        )
        return RoutingTrace(
            meta=meta,
            loads_NLE=np.tile(np.array(self.loads, dtype=np.uint32), (steps, 1, 1)),
            tokens_N=np.full(steps, tokens, dtype=np.int32),
            time_s_N=np.arange(steps, dtype=np.float64),
        )


def eplb_table_cases() -> tuple[EplbCase, ...]:
    """All cases."""
    return (
        _case("one hot", (800, *[0] * 7), (16, 8), 0.563, 1.0),
        _case("two hot", (500, 300, *[10] * 6), (16, 8), 0.717, 0.977),
        _case("two hot of sixteen", (1000, 500, *[1] * 14), (24, 8), 0.660, 0.937),
        _case("sloped", (420, 390, 180, 120, 90, 60, 50, 40), (16, 8), 0.900, 0.964),
        _case("even", (10,) * 8, (12, 4), 1.0, 1.0),
        _case("idle", (0,) * 8, (16, 8), None, None),
    )


def _case(
    name: str,
    loads: tuple[int, ...],
    slots_and_devices: tuple[int, int],
    eplb: float | None,
    reachable: float | None,
) -> EplbCase:
    slots, devices = slots_and_devices
    return EplbCase(
        name=name,
        loads=loads,
        slots=slots,
        devices=devices,
        eplb_balancedness=eplb,
        reachable_balancedness=reachable,
    )
