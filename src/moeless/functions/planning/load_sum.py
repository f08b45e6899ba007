"""The loads of all engines of a model, as the one load that its replicas are planned for.

Engines run their steps whenever they like, so loads that devices get at the same time were
announced at different times. What counts is what each engine said last; an engine that stands
still has nothing to do and counts no more.

It must not know torch, sockets or processes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from moeless.core.plan import LoadArray
from moeless.functions.planning.load_intake import LoadConsumer
from moeless.functions.platform.model_placement import ModelPlacement


@dataclass(frozen=True, kw_only=True)
class _Said:
    step: int
    load_E: LoadArray
    error: float | None = 0.0


@dataclass(kw_only=True)
class _Voice:
    """What one engine said last, by layer."""

    expected: dict[int, _Said] = field(default_factory=dict)
    actual: dict[int, _Said] = field(default_factory=dict)


class LoadSum:
    """Hands the control loop of a model the sum of what its engines send.

    The control loop counts the steps of all engines together; the plan that it makes is for the
    engine that spoke. One engine alone is handed through.

    Args:
        consumer: The control loop.
        model: The model, whose engines are those that count.
    """

    def __init__(self, consumer: LoadConsumer, *, model: ModelPlacement) -> None:
        self._consumer = consumer
        self._model = model
        self._voices: dict[int, _Voice] = {}
        self._earlier_steps = 0
        self._forecast_step: dict[int, int] = {}

    def of(self, engine: int) -> LoadConsumer:
        """Where the loads of one engine go."""
        return _EngineLoads(self, engine, self._consumer)

    def forget(self, engine: int) -> None:
        """An engine leaves, its board still there; its load counts no more."""
        self._voices.pop(engine, None)
        self._earlier_steps += int(self._model.engines[engine].step[0])

    def observe(self, engine: int, *, step: int, layer: int, load_E: LoadArray) -> None:
        """A load came true in one engine's step."""
        voice = self._hear(engine)
        said = voice.actual[layer] = _Said(step=step, load_E=load_E)
        total = _total(said, (other.actual.get(layer) for other in self._others(engine)))
        count = self._count(engine, step)
        expected = voice.expected.get(layer)
        if expected is not None and expected.step == step:
            count = self._forecast_step[layer]  # the newest forecast has that one in it
        with self._speaking(engine, count - step):
            self._consumer.observe(step=count, layer=layer, load_E=total.load_E)

    def forecast(
        self, engine: int, *, step: int, layer: int, load_E: LoadArray, error: float | None
    ) -> None:
        """A load is expected of one engine's step."""
        voice = self._hear(engine)
        said = voice.expected[layer] = _Said(step=step, load_E=load_E, error=error)
        others = (
            other.expected.get(layer, other.actual.get(layer)) for other in self._others(engine)
        )
        total = _total(said, others)
        count = self._forecast_step[layer] = self._count(engine, step)
        with self._speaking(engine, count - step):
            self._consumer.forecast(
                step=count, layer=layer, load_E=total.load_E, expected_error=total.error
            )

    def _hear(self, engine: int) -> _Voice:
        self._model.activity.look(engine)
        return self._voices.setdefault(engine, _Voice())

    def _others(self, engine: int) -> Iterator[_Voice]:
        """Engines that do something, though they may say nothing while their plans stand."""
        for number, voice in self._voices.items():
            if number != engine and self._model.activity.is_busy(number):
                yield voice

    def _count(self, engine: int, step: int) -> int:
        """The step of one engine, counted together with the steps of all others."""
        others = (board for number, board in self._model.engines.items() if number != engine)
        return step + self._earlier_steps + sum(int(board.step[0]) for board in others)

    @contextmanager
    def _speaking(self, engine: int, ahead: int) -> Iterator[None]:
        """Plans are for this engine meanwhile."""
        self._model.speaker = engine, ahead
        try:
            yield
        finally:
            self._model.speaker = None


def _total(said: _Said, others: Iterable[_Said | None]) -> _Said:
    for other in others:
        if other is None:
            continue
        load_E, error = said.load_E + other.load_E, None
        tokens = float(load_E.sum())
        if said.error is not None and other.error is not None and tokens > 0:
            wrong = said.error * said.load_E.sum() + other.error * other.load_E.sum()
            error = float(wrong) / tokens
        said = _Said(step=said.step, load_E=load_E, error=error)
    return said


class _EngineLoads:
    """The loads of one engine. A ``load_intake.LoadConsumer``."""

    def __init__(self, loads: LoadSum, engine: int, consumer: LoadConsumer) -> None:
        self._loads = loads
        self._engine = engine
        self._consumer = consumer

    @property
    def adaptive(self) -> bool:
        return self._consumer.adaptive

    def start(self) -> None:
        self._consumer.start()

    def observe(self, *, step: int, layer: int, load_E: LoadArray) -> None:
        self._loads.observe(self._engine, step=step, layer=layer, load_E=load_E)

    def forecast(
        self, *, step: int, layer: int, load_E: LoadArray, expected_error: float | None = None
    ) -> None:
        self._loads.forecast(
            self._engine, step=step, layer=layer, load_E=load_E, error=expected_error
        )
