"""The engine's view of the platform, wherever it runs."""

from collections.abc import Sequence
from typing import Any, Protocol

from moeless.functions.links.board import Board

Report = dict[str, Any]
"""Counters of the platform; see ``Supervisor._report`` for the fields."""


def describe_wait(layer: int, experts: Sequence[int], timeout_s: float) -> str:
    """What tokens have waited for in vain, for the error."""
    names = ", ".join(map(str, experts))
    what = f"expert {names} was" if len(experts) == 1 else f"experts {names} were"
    return f"layer {layer}: {what} not loaded within {timeout_s:g} s"


class PlatformClient(Protocol):
    """What an engine may ask of the platform; all but ``report`` from the engine's thread only."""

    @property
    def board(self) -> Board:
        """The shared arrays."""
        ...

    @property
    def num_devices(self) -> int:
        """D."""
        ...

    @property
    def function_bytes(self) -> int:
        """Bytes of one instance."""
        ...

    @property
    def wants_loads(self) -> bool:
        """Whether plans follow loads; False where they are fixed."""
        ...

    def announce_loads(self) -> None:
        """Loads on the board are new; never blocks."""
        ...

    def demand(self, *, layer: int, experts: list[int]) -> int:
        """Ask for experts without a warm replica; returns a ticket at once."""
        ...

    def await_demand(self, ticket: int, *, timeout_s: float) -> None:
        """Wait until the demanded experts are warm.

        Raises:
            UnavailableError: An expert cannot be made warm anywhere, or it took too long.
        """
        ...

    def check_alive(self) -> None:
        """Look whether the platform is still there. May be called from any thread.

        Raises:
            FunctionError: It is gone.
        """
        ...

    def report(self) -> Report:
        """Counters of the platform. May be called from any thread."""
        ...

    def close(self) -> None:
        """Leave the platform."""
        ...
