"""Many cases in one line, so that a finding can be read at a glance."""

from collections.abc import Iterable, Mapping

import numpy as np


def spread(values: Iterable[float], form: str = "+.1%") -> str:
    """Least, most and median of some cases.

    Args:
        values: One per case.
        form: How each is written.
    """
    found = list(values)
    if len(found) == 1:
        return _write(found[0], form)
    low, high, middle = (
        _write(value, form) for value in (min(found), max(found), float(np.median(found)))
    )
    if low == high:
        return f"{low} in all {len(found)}"
    return f"{low} to {high}, median {middle} of {len(found)}"


def span(values: Iterable[float], form: str = ".2f") -> str:
    """From the least to the most; one number where both are written alike."""
    found = list(values)
    low, high = _write(min(found), form), _write(max(found), form)
    return low if low == high else f"{low} to {high}"


def listed(values: Mapping[str, float], form: str = "+.1%") -> dict[str, str]:
    """Each case's value as it is written."""
    return {label: _write(value, form) for label, value in values.items()}


def _write(value: float, form: str) -> str:
    """A number, without a sign where it is written as nought."""
    text = format(value, form)
    return text if any(digit in text for digit in "123456789") else text.lstrip("+-")
