"""Coefficients of the linear model on GPUs: measured where there are measurements, else scaled.

Measured: vLLM 0.22's grouped bfloat16 kernels on an H200 (public aiconfigurator data), fitted
as one launch per device. Scaled: the weights are read at the device's memory bandwidth, and a
token costs in proportion to hidden x intermediate, at the efficiency of the measured shape that
is nearest in size. For another GPU, tokens cost in proportion to its peak rate as well.
"""

from dataclasses import dataclass
from math import log
from typing import Final

from moeless.core.layer_cost import LayerCost
from moeless.core.model import DTYPE_BYTES, ExpertShape
from moeless.costs.presets import DEVICES, DevicePreset


@dataclass(frozen=True, kw_only=True)
class _Measured:
    name: str
    hidden: int
    intermediate: int
    base_s: float
    touch_s: float
    token_s: float

    @property
    def size(self) -> int:
        return self.hidden * self.intermediate


_H200: Final = DEVICES["h200"]
_MEASURED: Final = (
    _Measured(
        name="Mixtral-8x7B",
        hidden=4096,
        intermediate=14336,
        base_s=0.065e-3,
        touch_s=0.072e-3,
        token_s=0.637e-6,
    ),
    _Measured(
        name="Llama-4-Scout",
        hidden=5120,
        intermediate=8192,
        base_s=0.051e-3,
        touch_s=0.054e-3,
        token_s=0.536e-6,
    ),
)


def gpu_cost(
    shape: ExpertShape, device: DevicePreset, *, num_devices: int
) -> tuple[LayerCost, str]:
    """Coefficients of one expert shape on one kind of GPU.

    Args:
        shape: The experts.
        device: The GPU.
        num_devices: D; a single device transfers nothing.

    Returns:
        The coefficients, and a label that says whether they were measured or scaled.
    """
    size = shape.hidden * shape.intermediate
    nearest = min(_MEASURED, key=lambda measured: abs(log(size / measured.size)))
    exact = (shape.hidden, shape.intermediate) == (nearest.hidden, nearest.intermediate)
    transfer_s = 0.0
    if num_devices > 1:
        transfer_s = shape.hidden * DTYPE_BYTES[shape.dtype] / device.device_link_bytes_s
    if exact and device is _H200 and shape.dtype != "float32":
        cost = LayerCost(
            base_s=nearest.base_s,
            touch_s=nearest.touch_s,
            token_s=nearest.token_s,
            transfer_s=transfer_s,
        )
        return cost, f"measured: {nearest.name} experts on an H200, fitted"
    # Half-precision arithmetic is twice as fast as float32 on the tensor cores.
    slower = DTYPE_BYTES[shape.dtype] / 2 * _H200.flops / device.flops
    cost = LayerCost(
        base_s=nearest.base_s,
        touch_s=shape.num_bytes / device.memory_bandwidth_bytes_s,
        token_s=nearest.token_s * size / nearest.size * slower,
        transfer_s=transfer_s,
    )
    return cost, f"scaled: {device.name}, from {nearest.name} experts on an H200"
