"""Keeps every idle instance warm for the same time."""

from moeless.core.model import FunctionId
from moeless.errors import ConfigError


class FixedKeepAlive:
    """The same keep-alive for all functions.

    Args:
        seconds: How long an instance may stay idle; 0 retires at once, ``inf`` never.

    Raises:
        ConfigError: ``seconds`` is negative or NaN.
    """

    def __init__(self, seconds: float) -> None:
        self._keep_s = check_seconds(seconds)

    def used(self, function: FunctionId, *, at_s: float) -> None:
        """An instance of the function was used; that changes nothing here."""

    def keep_s(self, function: FunctionId, *, idle_s: float) -> float:
        """Seconds an instance may go unused before it is retired."""
        del function, idle_s
        return self._keep_s


def check_seconds(seconds: float) -> float:
    """Refuse what is no duration.

    Raises:
        ConfigError: ``seconds`` is negative or NaN.
    """
    if not seconds >= 0.0:
        raise ConfigError(
            f"keep-alive of {seconds} s is not a duration; use 0, a number of seconds, or inf"
        )
    return float(seconds)
