"""What ``--predictor`` may say. Must not need torch: the supervisor asks, too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeless.errors import ConfigError
from moeless.policies.predictors import PREDICTORS

Kind = Literal["gate", "trained", "auto", "history"]

OFF = "off"
_NO_HISTORY = ("window",)
"""Predictors that are not offered: policies that need them bring them along."""
_DEFAULT_HISTORY = "previous"


@dataclass(frozen=True, kw_only=True)
class PredictorChoice:
    """How the loads of a served model are expected.

    Args:
        kind: ``gate`` looks ahead with copied gates, ``trained`` with what a directory holds,
            ``auto`` with gates that follow live traffic; ``history`` looks back.
        history: The predictor that looks back, alone or where looking ahead cannot see.
        directory: Of a trained predictor.
    """

    kind: Kind
    history: str = _DEFAULT_HISTORY
    directory: Path | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether the engine makes forecasts."""
        return self.kind != "history"

    @property
    def name(self) -> str:
        """What metrics call it."""
        return self.history if self.kind == "history" else self.kind


def choose_predictor(text: str) -> PredictorChoice:
    """Read ``--predictor``; a name goes before a directory of that name.

    Raises:
        ConfigError: It is neither a name nor a directory.
    """
    if text == "gate":
        return PredictorChoice(kind="gate")
    if text == "auto":
        return PredictorChoice(kind="auto")
    if text == OFF:
        return PredictorChoice(kind="history")
    histories = [name for name in PREDICTORS.names() if name not in _NO_HISTORY]
    if text in histories:
        return PredictorChoice(kind="history", history=text)
    if not Path(text).is_dir():
        known = ", ".join(("gate", "auto", OFF, *histories))
        raise ConfigError(
            f"predictor {text!r} is no directory, and none of: {known}; name one of those, or a "
            f"directory that moeless predictor train wrote"
        )
    return PredictorChoice(kind="trained", directory=Path(text))
