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
        return format(found[0], form)
    low, high, middle = min(found), max(found), float(np.median(found))
    return f"{low:{form}} to {high:{form}}, median {middle:{form}} of {len(found)}"


def span(values: Iterable[float], form: str = ".2f") -> str:
    """From the least to the most; one number where both are written alike."""
    found = list(values)
    low, high = format(min(found), form), format(max(found), form)
    return low if low == high else f"{low} to {high}"


def listed(values: Mapping[str, float], form: str = "+.1%") -> dict[str, str]:
    """Each case's value as it is written."""
    return {label: format(value, form) for label, value in values.items()}
