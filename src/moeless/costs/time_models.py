"""Time models by name: ``paper``, ``h200``, ``a6000``, or a JSON file."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from moeless.core.layer_cost import LayerCost
from moeless.core.model import ExpertShape
from moeless.costs.gpu_cost import gpu_cost
from moeless.costs.linear import LinearTime
from moeless.costs.presets import DEVICES
from moeless.costs.table import TableTime
from moeless.costs.time_file import read_time_model
from moeless.errors import ConfigError

TIME_MODEL_NAMES: Final = ("paper", "h200", "a6000")


def build_time_model(
    name_or_path: str,
    shape: ExpertShape,
    num_devices: int,
    *,
    speeds: tuple[float, ...] = (),
) -> LinearTime | TableTime:
    """Build the time model of one layer's experts.

    ``paper`` follows the MoEless paper, section 3: expert time is alpha x tokens and one
    exchange beta x tokens, with no launch and no reading of weights. The paper gives no values:
    alpha is that of the ``a6000`` model, beta the time of one hidden state on its link.

    Args:
        name_or_path: ``paper``, ``h200``, ``a6000``, or the path of a JSON file.
        shape: The experts; a file's times are taken as they are, whatever the shape.
        num_devices: D; a single device transfers nothing.
        speeds: Relative speed of each device; empty where all are equal.

    Raises:
        ConfigError: Neither a known name nor a usable file, or no device.
    """
    if num_devices < 1:
        raise ConfigError(f"time model: {num_devices} devices; use 1 or more")
    if name_or_path not in TIME_MODEL_NAMES:
        return _with_speeds(_from_file(name_or_path), speeds)
    device = DEVICES["a6000" if name_or_path == "paper" else name_or_path]
    cost, label = gpu_cost(shape, device, num_devices=num_devices)
    if name_or_path == "paper":
        cost = LayerCost(token_s=cost.token_s, transfer_s=cost.transfer_s)
        label = f"the paper's linear model; seconds per token {label}"
    return _with_speeds(LinearTime(cost=cost, label=label), speeds)


def _with_speeds(
    model: LinearTime | TableTime, speeds: tuple[float, ...]
) -> LinearTime | TableTime:
    if not speeds:
        return model
    if isinstance(model, LinearTime):
        return replace(model, cost=replace(model.cost, speeds=speeds))
    return replace(model, speeds=speeds)


def _from_file(text: str) -> LinearTime | TableTime:
    path = Path(text)
    try:
        exists = path.exists()
    except OSError:  # for example a name that is too long
        exists = False
    if not exists:
        raise ConfigError(
            f"time model {text!r} is neither {', '.join(TIME_MODEL_NAMES)} nor a file that exists"
        )
    return read_time_model(path)
