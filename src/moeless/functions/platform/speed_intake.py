"""From engines' boards to the speeds of devices that plans are made for.

Engines of all models compute on the same devices, so what each of them measures counts for all.
Single-threaded like the platform. It must not know torch, sockets or processes.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from moeless.core.plan import SpeedArray
from moeless.core.ports import Clock
from moeless.functions.platform.heeded_speeds import HeededSpeeds
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.pool.pool import DevicePool

_log = logging.getLogger(__name__)


class SpeedIntake:
    """Reads what engines measure, and says what plans are to heed of it.

    Args:
        models: By id; kept up to date by the owner.
        pools: One per device, empty yet; kept up to date by the owner.
        num_devices: D.
        clock: The time.
    """

    def __init__(
        self,
        models: Mapping[str, ModelPlacement],
        pools: Sequence[DevicePool],
        *,
        num_devices: int,
        clock: Clock,
    ) -> None:
        self._models = models
        self._pools = pools
        self._clock = clock
        self._heeded = HeededSpeeds(num_devices)

    @property
    def speed_D(self) -> SpeedArray | None:
        """Relative speeds that plans are to heed [D]; None where all are equal."""
        speed_D = self._heeded.speed_D
        return speed_D.copy() if (speed_D < 1.0).any() else None

    def take(self) -> bool:
        """Look at all boards; call it now and then.

        Returns:
            Whether other speeds are to be heeded now; all models are planned again then, each
            layer when its next load is known.
        """
        before_D = self._heeded.speed_D.copy()
        changed = False
        for pool in self._pools:
            if not pool.budget_bytes:
                changed |= self._heeded.forget(pool.device)
        said = [
            said_D
            for model in self._models.values()
            for engine, board in model.engines.items()
            if model.activity.is_busy(engine) and (said_D := board.read_speeds()) is not None
        ]
        if said:
            changed |= self._heeded.hear(np.stack(said), now_s=self._clock.now_s())
        if changed:
            self._tell(before_D)
            for model in self._models.values():
                model.unsettle()
        return changed

    def _tell(self, before_D: SpeedArray) -> None:
        for device, speed in enumerate(self._heeded.speed_D.tolist()):
            if speed < 1.0 and speed != before_D[device]:
                _log.warning(
                    "device %d computes at about 1/%.0f of the others' speed; plans heed that",
                    *(device, 1.0 / speed),
                )
            elif speed == 1.0 and before_D[device] < 1.0 and self._pools[device].budget_bytes:
                _log.warning("device %d is as fast as the others again", device)
