"""From counters that only grow to what was used in each period. Pure; time comes as an argument.

A period's usage is the counters' growth since the period began, so writing it again changes
nothing. A counter that falls (the platform was started anew) counts on from where it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from moeless.telemetry.snapshot import RuntimeSnapshot

Counts = NDArray[np.float64]

ACCOUNTINGS = ("billed", "resident", "reserved", "paper")


@dataclass(frozen=True, kw_only=True)
class KeyCounts:
    """What one API key has used since the server began."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


KEY_FIELDS = tuple(field.name for field in fields(KeyCounts))
MODEL_FIELDS = (
    *(f"{name}_gb_s" for name in ACCOUNTINGS),
    "cold_starts",
    "warm_starts",
    "blocking_loads",
    "evictions",
    "worker_restarts",
)


class Growth:
    """How much counters have grown since the last look."""

    def __init__(self) -> None:
        self._last: Counts | None = None

    def take(self, values: Counts) -> Counts:
        """Growth since the last call; the values themselves at the first."""
        last, self._last = self._last, values.copy()
        if last is None:
            return values.copy()
        return np.where(values >= last, values - last, values)


class PeriodCounter:
    """Counters of one shape, period by period.

    Args:
        period_s: Length of a period; periods begin at its multiples of Unix time.
    """

    def __init__(self, period_s: int) -> None:
        self._period_s = period_s
        self._growth = Growth()
        self._total: Counts = np.zeros(())
        self._base: Counts = np.zeros(())
        self.period = -1
        """When the current period began, Unix seconds."""

    def take(self, values: Counts, now_s: float) -> Counts:
        """Growth since the current period began.

        Args:
            values: The counters now.
            now_s: Unix seconds.
        """
        return self.add(self._growth.take(values), now_s)

    def begin_anew(self) -> None:
        """The clock goes on elsewhere, even before the current period: a new one begins there."""
        self.period = -1

    def add(self, growth: Counts, now_s: float) -> Counts:
        """Like ``take``, from what the counters have grown by since the last time."""
        period = int(now_s // self._period_s) * self._period_s
        if period > self.period:  # a clock that is set back opens no old period again
            self.period = period
            self._base = self._total
        self._total = self._total + growth
        return self._total - self._base


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was used in the current periods.

    Args:
        minute: When the period of ``keys`` and ``model`` began, Unix seconds.
        hour: When the period of ``functions`` began.
        keys: Key name to counts in the order of ``KEY_FIELDS``.
        model: Counts in the order of ``MODEL_FIELDS``; None while the experts are silent.
        functions: Tokens, billed, resident and reserved GB·s of each function, [4, L, E].
    """

    minute: int
    hour: int
    keys: Mapping[str, Counts]
    model: Counts | None
    functions: Counts | None


class UsageMeter:
    """The usage of one server since it began."""

    def __init__(self) -> None:
        self._keys: dict[str, PeriodCounter] = {}
        self._model = PeriodCounter(60)
        self._functions = PeriodCounter(3600)
        self._growth = _FunctionGrowth()
        self._minute = -1

    def begin_anew(self) -> None:
        """See ``PeriodCounter``; what follows is to be kept apart from what came before."""
        for counter in (*self._keys.values(), self._model, self._functions):
            counter.begin_anew()
        self._minute = -1

    def take(
        self, keys: Mapping[str, KeyCounts], snapshot: RuntimeSnapshot | None, now_s: float
    ) -> Usage:
        """Usage of the current periods, with the counters as they are now."""
        used = {}
        for name, counts in keys.items():
            counter = self._keys.setdefault(name, PeriodCounter(60))
            values = np.array([getattr(counts, field) for field in KEY_FIELDS], dtype=np.float64)
            used[name] = counter.take(values, now_s)
        model = functions = None
        if snapshot is not None:
            model = self._model.take(_model_counts(snapshot), now_s)
            functions = self._functions.add(self._growth.take(snapshot), now_s)
        # As the counters' periods, which a clock that is set back does not take back.
        self._minute = max(self._minute, int(now_s // 60) * 60)
        return Usage(
            minute=self._minute,
            hour=self._functions.period,
            keys=used,
            model=model,
            functions=functions,
        )


class _FunctionGrowth:
    """Divides what layers have used over their functions, exactly in sum.

    Devices report how long a layer's instances computed, and the pools what a layer holds. All
    experts of a model are of one size, so billed GB·s go by tokens and resident ones by warm
    replicas; reserved ones belong to no function more than to another.
    """

    def __init__(self) -> None:
        self._tokens = Growth()
        self._layers = Growth()

    def take(self, snapshot: RuntimeSnapshot) -> Counts:
        tokens_LE = self._tokens.take(snapshot.tokens_LE.astype(np.float64))
        layers = np.array([snapshot.gb_s_L[name] for name in ACCOUNTINGS[:3]])
        billed_L, resident_L, reserved_L = self._layers.take(layers)
        replicas_LE = snapshot.replicas_LED.sum(axis=2, dtype=np.float64)
        return np.stack(
            [
                tokens_LE,
                _divide(billed_L, tokens_LE, snapshot.tokens_LE),
                _divide(resident_L, replicas_LE, snapshot.tokens_LE),
                _divide(reserved_L, np.zeros_like(tokens_LE), np.zeros_like(tokens_LE)),
            ]
        )


def _divide(amount_L: Counts, weight_LE: Counts, fallback_LE: NDArray[np.generic]) -> Counts:
    """Amounts of layers by weights; by others, or equally, where a layer has no weight."""
    weight_LE = np.where(weight_LE.sum(axis=1, keepdims=True) > 0, weight_LE, fallback_LE)
    weight_LE = np.where(weight_LE.sum(axis=1, keepdims=True) > 0, weight_LE, 1.0)
    shares: Counts = amount_L[:, None] * weight_LE / weight_LE.sum(axis=1, keepdims=True)
    return shares


def _model_counts(snapshot: RuntimeSnapshot) -> Counts:
    return np.array(
        [
            *(getattr(snapshot.gb_s, name) for name in ACCOUNTINGS),
            snapshot.cold_starts,
            snapshot.warm_starts,
            snapshot.blocking_loads,
            snapshot.evictions,
            sum(snapshot.worker_restarts_D),
        ],
        dtype=np.float64,
    )
