"""Says what the control loop was told, and what replicas came of it, for a record of decisions."""

import numpy as np

from moeless.core.events import LoadTaken, ReplicasChanged
from moeless.core.plan import LoadArray, ReplicaArray
from moeless.core.ports import Clock, EventSink
from moeless.functions.planning.load_intake import LoadConsumer
from moeless.functions.platform.model_placement import ModelPlacement


class LoadReport:
    """A control loop whose loads and plans are reported. A ``load_intake.LoadConsumer``.

    Args:
        consumer: The control loop.
        model: The model that it plans for.
        clock: The time.
        sink: Receives ``LoadTaken`` before, and ``ReplicasChanged`` after a load was dealt with.
    """

    def __init__(
        self, consumer: LoadConsumer, *, model: ModelPlacement, clock: Clock, sink: EventSink
    ) -> None:
        self._consumer = consumer
        self._model = model
        self._clock = clock
        self._sink = sink
        self._known: dict[int, bytes] = {}

    @property
    def adaptive(self) -> bool:
        """Whether plans follow loads."""
        return self._consumer.adaptive

    def start(self) -> None:
        """Plan every layer before the first step."""
        self._consumer.start()
        for layer in range(self._model.spec.num_layers):
            self._report_change(0, layer)

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """A load came true."""
        self._report("actual", step, layer, load_E)
        self._consumer.observe(step=step, layer=layer, load_E=load_E)
        self._report_change(step, layer)

    def forecast(
        self, *, step: int, layer: int, load_E: LoadArray, expected_error: float | None = None
    ) -> None:
        """A load is expected, and with it the share of its tokens that are misplaced."""
        self._report("forecast", step, layer, load_E)
        self._consumer.forecast(
            step=step, layer=layer, load_E=load_E, expected_error=expected_error
        )
        self._report_change(step, layer)

    def _report(self, kind: str, step: int, layer: int, load_E: LoadArray) -> None:
        self._sink.emit(
            LoadTaken(
                time_s=self._clock.now_s(),
                model=self._model.spec.model_id,
                kind=kind,
                step=step,
                layer=layer,
                tokens=float(load_E.sum()),
            )
        )

    def _report_change(self, step: int, layer: int) -> None:
        planned_ED = self._model.planned_ED(layer)
        replicas = planned_ED.tobytes()
        if self._known.get(layer) == replicas:
            return
        self._known[layer] = replicas
        self._sink.emit(
            ReplicasChanged(
                time_s=self._clock.now_s(),
                model=self._model.spec.model_id,
                step=step,
                layer=layer,
                devices_E=devices_of_experts(planned_ED),
            )
        )


def devices_of_experts(replicas_ED: ReplicaArray) -> tuple[tuple[int, ...], ...]:
    """The devices of each expert, a device repeated for several copies [E].

    Args:
        replicas_ED: Copies of expert e on device d, uint8 [E, D].
    """
    devices_D = np.arange(replicas_ED.shape[1])
    return tuple(tuple(np.repeat(devices_D, copies_D).tolist()) for copies_D in replicas_ED)
