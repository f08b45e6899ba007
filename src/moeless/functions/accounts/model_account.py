"""What a model has used, and what of that each of its engines has.

Single-threaded like the platform. It must not know torch, sockets or processes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from moeless.core.plan import CountArray, SpeedArray
from moeless.core.ports import Clock
from moeless.functions.accounts.billing import GB, ResidencyMeter
from moeless.functions.accounts.load_meter import LoadMeter
from moeless.functions.accounts.usage_split import Usage, UsageSplit
from moeless.functions.pool.lifecycle import State
from moeless.functions.pool.pool import DevicePool
from moeless.telemetry.percentiles import SampleWindow
from moeless.telemetry.snapshot import Timing


class AccountedModel(Protocol):
    """A model with its counters."""

    function_bytes: int
    cold_starts_L: CountArray
    loads: LoadMeter
    blocking_loads: int
    evictions: int
    failed_loads: Counter[int]
    plans: int
    plan_s: SampleWindow

    def busy_ns_L(self, engine: int | None = None) -> CountArray:
        """How long each layer's instances have computed, for one engine or for all."""
        ...

    def speed_D(self) -> SpeedArray | None:
        """Relative speeds that plans are made for [D]; None where all are equal."""
        ...


class ModelAccount:
    """Keeps the books of one model.

    Args:
        model_id: Its id.
        model: Its counters.
        pools: One per device; kept up to date by the owner.
        meter: Its bytes over time.
        clock: The time.
    """

    def __init__(
        self,
        model_id: str,
        model: AccountedModel,
        *,
        pools: Sequence[DevicePool],
        meter: ResidencyMeter,
        clock: Clock,
    ) -> None:
        self._model_id = model_id
        self._model = model
        self._pools = pools
        self._meter = meter
        self._clock = clock
        self._reserved_byte_s = 0.0
        self._reserved_bytes = 0
        self._settled_s = clock.now_s()
        self._engines: list[int] = []
        self._split = UsageSplit(self._total())

    def join(self, engine: int) -> None:
        """An engine begins to use the model."""
        self.settle()
        self._engines.append(engine)
        self._split.join(engine)

    def leave(self, engine: int) -> None:
        """An engine, whose counters are still there, uses the model no more."""
        self.settle()
        self._engines.remove(engine)
        self._split.leave(engine)

    def reserve(self, num_bytes: int) -> None:
        """The model has so many bytes of device budgets to itself from now on."""
        self.settle()
        self._reserved_bytes = num_bytes

    def settle(self) -> None:
        """Divide what was used since the last time; call it now and then."""
        now_s = self._clock.now_s()
        self._reserved_byte_s += self._reserved_bytes * (now_s - self._settled_s)
        self._settled_s = now_s
        busy_ns = {engine: int(self._model.busy_ns_L(engine).sum()) for engine in self._engines}
        self._split.settle(self._total(), busy_ns)

    def _total(self) -> Usage:
        model = self._model
        failed_D = [model.failed_loads[pool.device] for pool in self._pools]
        single = [model.blocking_loads, model.evictions, model.plans]
        resident_L = self._meter.gb_s_L(now_s=self._clock.now_s())
        return Usage(
            pieces=np.concatenate(
                [model.cold_starts_L, failed_D, model.loads.counts_D, single]
            ).astype(np.int64),
            amounts=np.concatenate(
                [
                    resident_L,
                    model.loads.amounts,
                    [self._reserved_byte_s / GB, model.plan_s.total],
                ]
            ),
        )

    def report(self, engine: int | None = None) -> dict[str, Any]:
        """Counters as a JSON object; lists of GB·s and starts are by layer.

        Args:
            engine: Whose part since it joined; None for all of the model's.
        """
        self.settle()
        used = self._total() if engine is None else self._split.of(engine)
        layers, devices = len(self._model.cold_starts_L), len(self._pools)
        cold_starts_L, failed_D, loads_D, rest = np.split(
            used.pieces, np.cumsum([layers, devices, devices])
        )
        blocking_loads, evictions, plans = rest.tolist()
        resident_L, loads, rest_amounts = np.split(used.amounts, np.cumsum([layers, 3 * devices]))
        reserved, plan_s = rest_amounts.tolist()
        busy_ns_L = self._model.busy_ns_L(engine)
        timing = Timing.of(self._model.plan_s)
        speed_D = self._model.speed_D()
        return {
            "cold_starts_L": cold_starts_L.tolist(),
            "blocking_loads": blocking_loads,
            "evictions": evictions,
            "failed_loads_D": failed_D.tolist(),
            **self._model.loads.report(loads_D.tolist(), loads),
            "plans": plans,
            "plan_s": asdict(timing) | {"count": plans, "total_s": plan_s},
            "instances_D": self._instances_D(),
            "resident_bytes_D": self._resident_bytes_D(),
            "budget_bytes_D": [pool.budget_bytes for pool in self._pools],
            "planned_speed_D": [1.0] * devices if speed_D is None else speed_D.tolist(),
            "gb_s_L": {
                "billed": (busy_ns_L * self._model.function_bytes / (1e9 * GB)).tolist(),
                "resident": resident_L.tolist(),
                # Whole devices belong to no layer more than to another.
                "reserved": [reserved / layers] * layers,
            },
        }

    def _instances_D(self) -> dict[str, list[int]]:
        states_D: dict[str, list[int]] = {s.value: [0] * len(self._pools) for s in State}
        for pool in self._pools:
            for instance in pool.instances():
                if instance.function.model == self._model_id:
                    states_D[instance.state.value][pool.device] += 1
        return states_D

    def _resident_bytes_D(self) -> list[int]:
        return [
            sum(i.num_bytes for i in pool.instances() if i.function.model == self._model_id)
            for pool in self._pools
        ]
