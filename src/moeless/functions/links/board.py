"""The boards: arrays that engines and the function platform share.

A model has one *model board*, which the platform writes and all engines of the model read. Each
engine has one *engine board*: what it is doing, what it expects and what came true. So the
engines of a model share its instances and its plans, and none of them can disturb another.

Each array has exactly one writer; readers may see a value that is a moment old, and everything
that depends on a board is safe then: a replica believed warm may have left (the worker says so
and the tokens go elsewhere), a plan may be one step old. So nobody ever locks or waits here.
What belongs together is marked while it is written, and a reader that finds the same mark before
and after has read it whole (``ordering`` says why marks are seen in time).

The buffers are anonymous shared memory between processes, or plain memory inside one process.
"""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moeless.functions.links.ordering import Fence, new_fence

_Fields = tuple[tuple[str, str, str], ...]

_MODEL_FIELDS: _Fields = (
    # name, dtype, shape; all written by the platform
    ("warm_LED", "u1", "LED"),
    ("planned_LED", "u1", "LED"),
    ("plan_load_LE", "f8", "LE"),
    ("device_up_D", "i8", "D"),
    ("device_generation_D", "i8", "D"),
)
_ENGINE_FIELDS: _Fields = (
    # written by the platform
    ("plan_step_L", "i8", "L"),
    # written by the engine
    ("step", "i8", "1"),
    ("layer", "i8", "1"),
    ("forecast_LE", "f8", "LE"),
    ("forecast_error_L", "f8", "L"),
    ("forecast_step_L", "i8", "L"),
    ("actual_LE", "f8", "LE"),
    ("actual_step_L", "i8", "L"),
    ("busy_ns_LD", "i8", "LD"),
    ("used_ns_LED", "i8", "LED"),
    ("speed_D", "f8", "D"),
    ("speed_note", "i8", "1"),
    ("used_step_L", "i8", "L"),
)


def _layout(
    given: _Fields, L: int, E: int, D: int
) -> tuple[dict[str, tuple[int, str, tuple[int, ...]]], int]:
    sizes = {"L": L, "E": E, "D": D, "1": 1}
    fields: dict[str, tuple[int, str, tuple[int, ...]]] = {}
    offset = 0
    for name, dtype, axes in given:
        shape = tuple(sizes[axis] for axis in axes)
        fields[name] = (offset, dtype, shape)
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        offset += -(-num_bytes // 64) * 64  # a cache line never has two writers
    return fields, offset


def _map(part: object, given: _Fields, buffer: Any, L: int, E: int, D: int) -> None:
    fields, size = _layout(given, L, E, D)
    view = memoryview(buffer)
    assert view.nbytes >= size
    for name, (offset, dtype, shape) in fields.items():
        count = int(np.prod(shape))
        array = np.frombuffer(view, dtype=dtype, count=count, offset=offset).reshape(shape)
        setattr(part, name, array)


class ModelBoard:
    """What the platform tells the engines of one model.

    Args:
        buffer: At least ``ModelBoard.num_bytes(...)`` bytes, zeroed before the first use.
        num_layers: L.
        num_experts: E.
        num_devices: D.
    """

    warm_LED: NDArray[np.uint8]
    """1 where an instance is warm."""
    planned_LED: NDArray[np.uint8]
    """Copies that the plan in force has of each replica; see ``core.copies``."""
    plan_load_LE: NDArray[np.float64]
    """Loads that the plans in force were made for, of all engines together, tokens."""
    device_up_D: NDArray[np.int64]
    """1 while the device's worker lives."""
    device_generation_D: NDArray[np.int64]
    """Counts the workers that a device has had."""

    def __init__(
        self, buffer: Any, *, num_layers: int, num_experts: int, num_devices: int
    ) -> None:
        _map(self, _MODEL_FIELDS, buffer, num_layers, num_experts, num_devices)

    @staticmethod
    def num_bytes(*, num_layers: int, num_experts: int, num_devices: int) -> int:
        """Bytes of a model board of this shape."""
        return _layout(_MODEL_FIELDS, num_layers, num_experts, num_devices)[1]


class EngineBoard:
    """What one engine tells the platform, and for which of its steps plans were made.

    Args:
        buffer: At least ``EngineBoard.num_bytes(...)`` bytes, zeroed before the first use.
        num_layers: L.
        num_experts: E.
        num_devices: D.
    """

    plan_step_L: NDArray[np.int64]
    """Latest of the engine's steps that each layer's plan is for: until then no forecast of it is
    needed."""
    step: NDArray[np.int64]
    """The engine's iteration, from 1."""
    layer: NDArray[np.int64]
    """The MoE layer whose gate spoke last; -1 once the step has ended, and before the first."""
    forecast_LE: NDArray[np.float64]
    """Loads that the look-ahead predictor expects, tokens."""
    forecast_error_L: NDArray[np.float64]
    """Share of the tokens that each forecast is expected to misplace; NaN where not known."""
    forecast_step_L: NDArray[np.int64]
    """The step each forecast is for; 0 while the forecast is being written."""
    actual_LE: NDArray[np.float64]
    """Loads that came true, tokens."""
    actual_step_L: NDArray[np.int64]
    """The step each actual load belongs to; 0 while it is being written."""
    busy_ns_LD: NDArray[np.int64]
    """Execution time of each layer's instances since the engine attached; all are of one size."""
    used_ns_LED: NDArray[np.int64]
    """When the engine last used each instance, monotonic clock."""
    speed_D: NDArray[np.float64]
    """How fast the engine finds each device, relative to the usual one; 0 where it does not
    know."""
    speed_note: NDArray[np.int64]
    """Counts the engine's notes of speeds; negative while one is being written, 0 before the
    first."""
    used_step_L: NDArray[np.int64]
    """The step in which it last used instances of a layer; 0 while those times are being
    written."""

    def __init__(
        self, buffer: Any, *, num_layers: int, num_experts: int, num_devices: int
    ) -> None:
        _map(self, _ENGINE_FIELDS, buffer, num_layers, num_experts, num_devices)
        self.fence: Fence | None = new_fence()
        """Between a mark and what it marks; None where it is not needed."""

    def post_forecast(
        self, layer: int, load_E: NDArray[np.number], *, error: float, step: int
    ) -> None:
        """Say what is expected of a layer.

        A reader that finds the same step before and after it read has read one forecast.

        Args:
            layer: MoE layer.
            load_E: Expected tokens per expert [E].
            error: Share of them that is expected to be misplaced; NaN where not known.
            step: The step it is for.
        """
        self.forecast_step_L[layer] = 0
        self._keep_order()
        self.forecast_LE[layer] = load_E
        self.forecast_error_L[layer] = error
        self._keep_order()
        self.forecast_step_L[layer] = step

    def post_actual(self, layer: int, load_E: NDArray[np.number], *, step: int) -> None:
        """Say what load of a layer came true, as for a forecast.

        Args:
            layer: MoE layer.
            load_E: Tokens per expert [E].
            step: The step it was.
        """
        self.actual_step_L[layer] = 0
        self._keep_order()
        self.actual_LE[layer] = load_E
        self._keep_order()
        self.actual_step_L[layer] = step

    def post_speeds(self, speed_D: NDArray[np.float64]) -> None:
        """Say how fast devices are, marked while it is written.

        Args:
            speed_D: Relative to the usual one, 0 where not known [D].
        """
        note = int(self.speed_note[0])
        self.speed_note[0] = -1 - note
        self._keep_order()
        self.speed_D[:] = speed_D
        self._keep_order()
        self.speed_note[0] = note + 1

    def read_speeds(self) -> NDArray[np.float64] | None:
        """What the engine said last of devices' speeds [D]; None if nothing can be read now."""
        read = self.read_marked(self.speed_note, 0, self.speed_D[None])
        return None if read is None else read[1][0]

    def post_used(self, layer: int, used_ED: NDArray[np.bool_], *, at_ns: int, step: int) -> None:
        """Say which instances of a layer were used, as for a forecast.

        Args:
            layer: MoE layer.
            used_ED: Which ones [E, D].
            at_ns: When, monotonic clock.
            step: In which step.
        """
        self.used_step_L[layer] = 0
        self._keep_order()
        np.copyto(self.used_ns_LED[layer], at_ns, where=used_ED)
        self._keep_order()
        self.used_step_L[layer] = step

    def read_marked(
        self, mark_L: NDArray[np.int64], place: int, *values: NDArray[Any]
    ) -> tuple[int, list[Any]] | None:
        """Read what is marked while it is written.

        Args:
            mark_L: Marks, positive where something whole is there.
            place: Which mark, and which of the values.
            values: What it marks.

        Returns:
            The mark and copies of the values there; None if nothing whole can be read now.
        """
        mark = int(mark_L[place])
        self._keep_order()
        copies = [each[place].copy() for each in values]
        self._keep_order()
        return (mark, copies) if mark > 0 and int(mark_L[place]) == mark else None

    def _keep_order(self) -> None:
        if self.fence is not None:
            self.fence()

    @staticmethod
    def num_bytes(*, num_layers: int, num_experts: int, num_devices: int) -> int:
        """Bytes of an engine board of this shape."""
        return _layout(_ENGINE_FIELDS, num_layers, num_experts, num_devices)[1]


class Board(ModelBoard, EngineBoard):
    """Both boards as one engine sees them.

    Args:
        model_buffer: Its model's board; may be readable only.
        engine_buffer: Its own.
        num_layers: L.
        num_experts: E.
        num_devices: D.
    """

    def __init__(
        self,
        model_buffer: Any,
        engine_buffer: Any,
        *,
        num_layers: int,
        num_experts: int,
        num_devices: int,
    ) -> None:
        _map(self, _MODEL_FIELDS, model_buffer, num_layers, num_experts, num_devices)
        _map(self, _ENGINE_FIELDS, engine_buffer, num_layers, num_experts, num_devices)
        self.fence = new_fence()

    @classmethod
    def in_process(cls, *, num_layers: int, num_experts: int, num_devices: int) -> Self:
        """Boards in plain memory, for an engine and a platform in one process."""
        shape = {"num_layers": num_layers, "num_experts": num_experts, "num_devices": num_devices}
        model_bytes, engine_bytes = ModelBoard.num_bytes(**shape), EngineBoard.num_bytes(**shape)
        return cls(bytearray(model_bytes), bytearray(engine_bytes), **shape)
