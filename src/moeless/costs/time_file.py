"""Time models in JSON files.

Either the coefficients of the linear model, in seconds (only ``token_s`` is required)::

    {"base_s": 6.5e-5, "touch_s": 7.2e-5, "token_s": 6.4e-7, "transfer_s": 1.8e-8}

or measured device times, one row per number of tokens and one column per number of experts
touched (without ``touched``, a plain list)::

    {"tokens": [1, 256, 4096], "touched": [1, 8], "seconds": [[...], [...], [...]]}

A table may have ``transfer_s`` as well, and both may have a ``label``.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.core.layer_cost import LayerCost
from moeless.costs.linear import LinearTime
from moeless.costs.table import TableTime
from moeless.errors import ConfigError, os_reason

_LINEAR_KEYS = {"base_s", "touch_s", "token_s", "transfer_s"}
_TABLE_KEYS = {"tokens", "touched", "seconds", "transfer_s"}


def read_time_model(path: Path) -> LinearTime | TableTime:
    """Read a time model.

    Args:
        path: The JSON file.

    Raises:
        ConfigError: The file cannot be read, is not JSON, has an unknown key, lacks one, or
            holds something that is not a time; the message names the file and the key.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {os_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object with token_s, or tokens and seconds")
    label = content.pop("label", f"file: {path.name}")
    if not isinstance(label, str):
        raise ConfigError(f"{path}: label must be text")
    try:
        return _table(content, label) if "seconds" in content else _linear(content, label)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _linear(content: dict[str, Any], label: str) -> LinearTime:
    _check_keys(content, known=_LINEAR_KEYS, required={"token_s"})
    numbers = {key: _number(content, key) for key in content}
    cost = LayerCost(
        base_s=numbers.get("base_s", 0.0),
        touch_s=numbers.get("touch_s", 0.0),
        token_s=numbers["token_s"],
        transfer_s=numbers.get("transfer_s", 0.0),
    )
    return LinearTime(cost=cost, label=label)


def _table(content: dict[str, Any], label: str) -> TableTime:
    _check_keys(content, known=_TABLE_KEYS, required={"tokens", "seconds"})
    seconds = _numbers(content, "seconds", levels=(1, 2))
    if "touched" not in content and seconds.ndim == 1:
        seconds = seconds[:, None]
    touched = _numbers(content, "touched", levels=(1,)) if "touched" in content else np.ones(1)
    return TableTime(
        tokens_A=_numbers(content, "tokens", levels=(1,)),
        touched_B=touched,
        seconds_AB=seconds,
        transfer_s=_number(content, "transfer_s") if "transfer_s" in content else 0.0,
        label=label,
    )


def _check_keys(content: dict[str, Any], *, known: set[str], required: set[str]) -> None:
    if unknown := sorted(content.keys() - known):
        raise ConfigError(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    if missing := sorted(required - content.keys()):
        raise ConfigError(f"{missing[0]} is missing")


def _number(content: dict[str, Any], key: str) -> float:
    value = content[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} is {value!r}; give a number")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{key} is too large a number") from None


def _numbers(content: dict[str, Any], key: str, *, levels: tuple[int, ...]) -> NDArray[np.float64]:
    try:
        array = np.array(content[key])
        # An array of booleans or text would convert, and an array of ragged lists would not.
        usable = array.dtype.kind in "iuf" and array.ndim in levels
    except ValueError:
        usable = False
    if not usable:
        shape = "a list" if levels == (1,) else "rows of equal length"
        raise ConfigError(f"{key} must be {shape} of numbers")
    return array.astype(np.float64)
