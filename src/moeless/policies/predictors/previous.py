"""Expects the load of the last iteration again."""

from moeless.core.plan import LoadArray, checked_load


class PreviousPredictor:
    """Predicts that a layer's load stays what it was when last observed.

    Source: the MoEless paper uses it where no gate prediction exists yet (the first layers of an
    iteration).
    """

    def __init__(self) -> None:
        self._last: dict[int, LoadArray] = {}

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        """Remember the load that came true, tokens [E].

        Raises:
            PlanError: A value is not a token count.
        """
        del step
        load = checked_load(load_E, layer=layer).copy()
        load.flags.writeable = False
        self._last[layer] = load

    def predict(self, *, step: int, layer: int) -> LoadArray | None:
        """The last observed load [E], read-only; None before the first observation."""
        del step
        return self._last.get(layer)
