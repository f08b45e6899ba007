"""Numbers of an option that are numbers: ``nan`` passes every comparison of a plain range."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range of floats without ``nan`` and infinities."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read an option's text."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
