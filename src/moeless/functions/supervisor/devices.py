"""Devices that join, leave and change their budgets while engines are served.

It says what may be done and has fleet and platform do it, step by step: a device joins when its
worker is ready and knows the models; it leaves when nothing is left on it.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from moeless.core.cluster import Device, parse_device
from moeless.core.events import BudgetChanged, DeviceDrained, DeviceJoined
from moeless.core.ports import Clock, EventSink
from moeless.errors import BudgetError, ConfigError
from moeless.functions.host.physical_memory import check_budget
from moeless.functions.platform.platform import Platform
from moeless.functions.supervisor.config import WorkerConfig
from moeless.functions.supervisor.fleet import Fleet
from moeless.functions.supervisor.slot import Slot, SlotState


class Devices:
    """What an operator can do with devices.

    Args:
        fleet: Workers.
        platform: Budgets, and what devices hold.
        clock: The time.
        sink: Receives events.
        replan: Has all models planned again; called when devices or budgets have changed.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        platform: Platform,
        clock: Clock,
        sink: EventSink,
        replan: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._platform = platform
        self._clock = clock
        self._sink = sink
        self._replan = replan

    def describe(self) -> list[dict[str, Any]]:
        """All slots as JSON objects."""
        return [self._describe(slot) for slot in self._fleet.slots]

    def _describe(self, slot: Slot) -> dict[str, Any]:
        pool = self._platform.pools[slot.device]
        worker, speed_D = self._fleet.worker(slot.device), self._platform.speeds.speed_D
        return {
            "device": slot.device,
            "label": slot.label,
            "state": slot.state,
            "pid": worker.process.pid if worker is not None else None,
            "budget_bytes": slot.config.budget_bytes if slot.config and not slot.is_free else 0,
            "held_bytes": pool.held_bytes,
            "instances": sum(1 for _ in pool.instances()),
            "restarts": slot.restarts,
            "speed": 1.0 if speed_D is None else float(speed_D[slot.device]),
            "note": slot.note,
        }

    def add(self, kind: str, *, budget_bytes: int | None = None, cores: Sequence[int] = ()) -> int:
        """Start the worker of another device; it joins when that is ready.

        Args:
            kind: ``cpu``, or ``cuda:N``; of the kind of the devices that are there.
            budget_bytes: What it may hold; None takes the largest budget that another one has.
            cores: Where the worker stays; empty takes those that fewest workers have.

        Returns:
            Its number.

        Raises:
            ConfigError: No slot is free, the device cannot be had, or it has less memory.
            BudgetError: The budget does not hold one expert.
        """
        others = [s for s in self._fleet.slots if s.config is not None and not s.is_free]
        model = next((s.config for s in others if s.config), self._fleet.slots[0].config)
        assert model is not None
        device = parse_device(kind)
        self._check_kind(device, others, model)
        if budget_bytes is None:
            budget_bytes = max(
                (s.config.budget_bytes for s in others if s.config), default=model.budget_bytes
            )
        self._check_holds_one(budget_bytes)
        check_budget(budget_bytes, kind=device.kind, option="a budget")
        config = dataclasses.replace(
            model,
            torch_device=device.torch_name,
            budget_bytes=budget_bytes,
            cores=self._choose_cores(cores, others, model) if device.kind == "cpu" else (),
        )
        return self._fleet.add(config).device

    def drain(self, device: int) -> None:
        """Have a device move what it holds and end; ``follow`` sees to the end.

        Raises:
            ConfigError: No such device, or it is not in use.
            BudgetError: The others cannot hold what models need at the same time.
        """
        slot = self._slot(device)
        if slot.is_free or slot.state is SlotState.DRAINING:
            raise ConfigError(f"device {device} is {slot.state}: it cannot be drained")
        if not slot.joined:
            self._fleet.retire(slot)  # it has not begun
            return
        others = [s for s in self._fleet.slots if s is not slot and s.state is SlotState.UP]
        if not others:
            raise BudgetError(f"device {device} cannot be drained: no other device is up")
        try:
            self._platform.check_budgets([self._budget(s.device) for s in others])
        except BudgetError as error:
            raise BudgetError(f"without device {device} {error}") from error
        slot.drain_began_s = self._clock.now_s()
        slot.state = SlotState.DRAINING
        self._platform.set_budget(device, 0)
        self._replan()

    def keep(self, device: int) -> None:
        """Take back that a device is drained; it is used again at once, with what it still holds.

        Raises:
            ConfigError: No such device, or it is not being drained.
        """
        slot = self._slot(device)
        if slot.state is not SlotState.DRAINING:
            raise ConfigError(
                f"device {device} is {slot.state}: there is no draining to take back"
            )
        assert slot.config is not None
        slot.state, slot.drain_began_s = SlotState.UP, 0.0
        self._change_budget(device, before=0, num_bytes=slot.config.budget_bytes)

    def set_budget(self, device: int, num_bytes: int) -> None:
        """Give a device another budget; what is held beyond it leaves.

        Raises:
            ConfigError: No such device, it is not in use, or the machine has less memory.
            BudgetError: It, or all devices together, could not hold what models need at once.
        """
        slot = self._slot(device)
        if slot.config is None or slot.is_free or slot.state is SlotState.DRAINING:
            raise ConfigError(f"device {device} is {slot.state}: it has no budget to change")
        self._check_holds_one(num_bytes)
        kind = "cpu" if slot.config.torch_device == "cpu" else "cuda"
        check_budget(num_bytes, kind=kind, option="a budget")
        before = slot.config.budget_bytes
        if slot.joined:
            in_use = {d: self._budget(d) for d in self._platform.in_use}
            self._platform.check_budgets(list((in_use | {device: num_bytes}).values()))
        slot.config = dataclasses.replace(slot.config, budget_bytes=num_bytes)
        if slot.joined and num_bytes != before:
            self._change_budget(device, before=before, num_bytes=num_bytes)

    def _change_budget(self, device: int, *, before: int, num_bytes: int) -> None:
        self._platform.set_budget(device, num_bytes)
        self._sink.emit(
            BudgetChanged(
                time_s=self._clock.now_s(),
                model="",
                device=device,
                before_bytes=before,
                budget_bytes=num_bytes,
            )
        )
        self._replan()

    def follow(self) -> None:
        """Take in devices whose workers are ready, and end those on which nothing is left."""
        for slot in self._fleet.slots:
            if slot.state is SlotState.STARTING and slot.device in self._platform.orders.hosts:
                slot.state = SlotState.UP
                if not slot.joined:
                    self._take_in(slot)
            holds = self._platform.pools[slot.device].held_bytes > 0
            if slot.state is SlotState.DRAINING and not holds:
                self._fleet.retire(slot)
            if slot.state is SlotState.DRAINED and slot.drain_began_s:
                now_s = self._clock.now_s()
                took_s, slot.drain_began_s = now_s - slot.drain_began_s, 0.0
                self._sink.emit(
                    DeviceDrained(time_s=now_s, model="", device=slot.device, drain_s=took_s)
                )

    def _take_in(self, slot: Slot) -> None:
        assert slot.config is not None
        slot.joined = True
        self._platform.set_budget(slot.device, slot.config.budget_bytes)
        now_s = self._clock.now_s()
        self._sink.emit(
            DeviceJoined(
                time_s=now_s,
                model="",
                device=slot.device,
                label=slot.label,
                budget_bytes=slot.config.budget_bytes,
                start_s=now_s - slot.started_s,
            )
        )
        self._replan()

    def _slot(self, device: int) -> Slot:
        if not 0 <= device < len(self._fleet.slots):
            raise ConfigError(
                f"there is no device {device}; devices are 0 to {len(self._fleet.slots) - 1}"
            )
        return self._fleet.slots[device]

    def _budget(self, device: int) -> int:
        return self._platform.pools[device].budget_bytes

    def _check_holds_one(self, budget_bytes: int) -> None:
        models = self._platform.models.values()
        largest = max(models, key=lambda m: m.function_bytes, default=None)
        if largest is not None and budget_bytes < largest.function_bytes:
            raise BudgetError(
                f"a budget of {budget_bytes:,} bytes does not hold one expert of "
                f"{largest.spec.model_id}, which takes {largest.function_bytes:,}; drain a "
                f"device to take it out of use"
            )

    def _check_kind(self, device: Device, others: Sequence[Slot], model: WorkerConfig) -> None:
        kind = "cuda" if model.torch_device.startswith("cuda") else "cpu"
        if device.kind != kind:
            raise ConfigError(f"this pool has {kind} devices; {device.label} cannot join it")
        taken = [s.device for s in others if s.config and s.label == device.label]
        if kind == "cuda" and taken:
            raise ConfigError(f"{device.label} is there already, as device {taken[0]}")

    def _choose_cores(
        self, wish: Sequence[int], others: Sequence[Slot], model: WorkerConfig
    ) -> tuple[int, ...]:
        allowed = sorted(os.sched_getaffinity(0))
        if missing := sorted(set(wish) - set(allowed)):
            raise ConfigError(
                f"core {missing[0]} is not among those that this pool may use: "
                f"{', '.join(map(str, allowed))}"
            )
        if wish or not model.cores:
            return tuple(wish)
        used = Counter(core for slot in others if slot.config for core in slot.config.cores)
        chosen = sorted(allowed, key=lambda core: (used[core], core))[: model.threads]
        return tuple(sorted(chosen))
