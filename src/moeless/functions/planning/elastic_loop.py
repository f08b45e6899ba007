"""A control loop that is built anew when other devices are in use.

A planner's memory of a layer's replicas is about the devices that it saw. So when a device joins
or leaves, a new controller begins with the plans in force, and keeps of them what the new devices
allow. What the old one knew of loads is handed over.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from moeless.core.plan import LoadArray
from moeless.core.ports import Placement
from moeless.functions.planning.device_view import DeviceView
from moeless.functions.platform.model_placement import ModelPlacement


class Loop(Protocol):
    """A control loop; ``control.Controller`` is one."""

    @property
    def adaptive(self) -> bool:
        """Whether plans follow loads."""
        ...

    def start(self) -> None:
        """Plan every layer before the first step."""
        ...

    def replan(self, layer: int, *, step: int, load_E: LoadArray) -> None:
        """Plan a layer again for a load that was planned for before."""
        ...

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """A load came true."""
        ...

    def forecast(
        self, *, step: int, layer: int, load_E: LoadArray, expected_error: float | None = None
    ) -> None:
        """A load is expected."""
        ...


LoopT = TypeVar("LoopT", bound=Loop)


class ElasticLoop(Generic[LoopT]):
    """Plans a model for the devices in use. A ``load_intake.LoadConsumer``.

    Args:
        model: The model that it plans for; says which devices are in use.
        build: Builds a control loop for a placement, with what an earlier one knows of loads.
    """

    def __init__(
        self, model: ModelPlacement, *, build: Callable[[Placement, LoopT | None], LoopT]
    ) -> None:
        self._model = model
        self._build = build
        self._devices: tuple[int, ...] = ()
        self._loop = self._begin(model.devices_in_use, earlier=None)

    @property
    def adaptive(self) -> bool:
        """Whether plans follow loads."""
        return self._loop.adaptive

    def start(self) -> None:
        """Plan every layer: before the first step, and when devices have changed.

        Layers that have been planned for a load are planned for it again.
        """
        self._follow_devices()
        load_LE = self._model.board.plan_load_LE
        if not load_LE.any():
            self._loop.start()
            return
        engines = self._model.engines.values()
        for layer in range(self._model.spec.num_layers):
            step = max((int(board.plan_step_L[layer]) for board in engines), default=0)
            self._loop.replan(layer, step=step, load_E=load_LE[layer].copy())

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """A load came true."""
        self._follow_devices()
        self._loop.observe(step=step, layer=layer, load_E=load_E)

    def forecast(
        self, *, step: int, layer: int, load_E: LoadArray, expected_error: float | None = None
    ) -> None:
        """A load is expected, and with it the share of its tokens that are misplaced."""
        self._follow_devices()
        self._loop.forecast(step=step, layer=layer, load_E=load_E, expected_error=expected_error)

    def _follow_devices(self) -> None:
        devices = self._model.devices_in_use
        if devices is not self._devices and devices != self._devices:
            self._loop = self._begin(devices, earlier=self._loop)

    def _begin(self, devices: tuple[int, ...], *, earlier: LoopT | None) -> LoopT:
        self._devices = devices
        whole = len(devices) == self._model.num_devices
        return self._build(self._model if whole else DeviceView(self._model, devices), earlier)
