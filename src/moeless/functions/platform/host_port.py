"""What the platform asks of a device, whoever carries it out."""

from typing import Protocol

from moeless.core.model import FunctionId


class HostPort(Protocol):
    """Carries out orders on one device and reports back to the platform later."""

    def load(self, *functions: FunctionId) -> None:
        """Begin to load, one after the other.

        Each load ends in ``Platform.loaded``, together with others or by itself, or in
        ``Platform.failed``. There are several where ``LoadLimits`` say so.
        """
        ...

    def evict(self, function: FunctionId, *, reason: str) -> None:
        """Begin to evict; ends in ``Platform.evicted``."""
        ...
