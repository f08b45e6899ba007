"""What ranks the functions of a device: for loading, and for making room."""

from collections.abc import Mapping
from typing import Protocol

from moeless.core.model import FunctionId
from moeless.functions.pool.lifecycle import Instance


class PoolOrder(Protocol):
    """Ranks functions: what is needed first, and what would be missed least."""

    def moment(self) -> object:
        """Something that differs from before whenever an answer of ``needed_in`` may."""
        ...

    def needed_in(self, function: FunctionId) -> int:
        """Layers until the function's layer runs next; lower is loaded first."""
        ...

    def waits_since(self, function: FunctionId) -> int:
        """Place of those whose tokens wait for the function; lower waits for longer."""
        ...

    def worth(self, instance: Instance) -> tuple[float, ...]:
        """Lower goes first."""
        ...

    def turn_of(
        self,
        victim: Instance,
        *,
        for_load: FunctionId,
        blocking: bool,
        leaving: Mapping[str, int],
    ) -> int | None:
        """When a victim has to make room for a function; None if it need not.

        Args:
            victim: A warm instance.
            for_load: The function.
            blocking: Tokens wait for it.
            leaving: Bytes that make room for it already, by model.
        """
        ...
