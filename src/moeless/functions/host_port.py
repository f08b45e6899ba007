"""What the platform asks of a device, whoever carries it out."""

from typing import Protocol

from moeless.core.model import FunctionId


class HostPort(Protocol):
    """Carries out orders on one device and reports back to the platform later."""

    def load(self, function: FunctionId) -> None:
        """Begin to load; ends in ``Platform.loaded`` or ``Platform.failed``."""
        ...

    def evict(self, function: FunctionId, *, reason: str) -> None:
        """Begin to evict; ends in ``Platform.evicted``."""
        ...
