"""One set of held-out tokens, and what every predictor expects of them."""

from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from moeless.bootstrap.predictors.predictor_history import replay_history
from moeless.learned.batching import Batching
from moeless.learned.evaluation import Evaluation, Loads
from moeless.learned.metrics import LoadScores
from moeless.learned.shards import GateShards
from moeless.learned.token_rows import TokenRows
from moeless_experiments.context import Context
from moeless_experiments.recordings import tokens_of
from moeless_experiments.studies.adjustments import ADJUSTMENTS
from moeless_experiments.studies.predictor_kinds import (
    HELD_OUT,
    RIDGE,
    make_predictor,
)

HISTORIES: Final = ("previous", "ewma")
ADJUSTED: Final = {f"{RIDGE} + {name}": name for name in ADJUSTMENTS}


class View(NamedTuple):
    """How tokens are put into batches.

    Args:
        batching: See ``batch_tokens``.
        size: Tokens of a batch.
    """

    batching: Batching
    size: int

    def __str__(self) -> str:
        """For people."""
        return f"{self.batching}, {self.size} tokens"


LONG_PROMPTS, MANY_USERS, DECODING = View("recorded", 256), View("mixed", 256), View("decode", 16)
SMALL_BATCHES: Final = View("mixed", 64)
VIEWS: Final = (LONG_PROMPTS, MANY_USERS, SMALL_BATCHES, DECODING)


@dataclass(frozen=True, kw_only=True)
class MadeFacts:
    """Of a predictor that looks ahead: what is known of it when it is no longer there.

    Args:
        num_bytes: Of its models.
        layers_trained: See ``Made``.
        fit_tokens: See ``Made``.
    """

    num_bytes: int
    layers_trained: int | None
    fit_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a predictor is worth on these tokens.

    Args:
        made: The predictor; None for those that only look back.
        recall: Mean per-token top-k recall over predicted layers; None where tokens have none.
    """

    made: MadeFacts | None
    recall: float | None


class PredictorBench:
    """Held-out tokens of a model on prompts, at one distance.

    Args:
        context: Says how much to train.
        model: Demo model.
        trained_on: Prompts that predictors are fitted to.
        distance: d.
        evaluations: Of the held-out tokens, see ``evaluate``; conversations that predictors were
            fitted to are not among them.
    """

    def __init__(
        self,
        context: Context,
        model: str,
        trained_on: str,
        distance: int,
        evaluations: dict[View, Evaluation],
    ) -> None:
        self.model, self.trained_on, self.distance = model, trained_on, distance
        self._context = context
        self._evaluations = evaluations
        self._expected: dict[str, Expected] = {}

    @property
    def layers(self) -> range:
        """Predicted layers."""
        return self._evaluations[LONG_PROMPTS].layers

    def ask(self, name: str) -> Expected:
        """Ask a predictor, the first time only."""
        if name not in self._expected:
            self._expected[name] = self._ask(name)
        return self._expected[name]

    def scores(self, name: str, view: View) -> LoadScores | None:
        """Figures over all layers; None where there is no batch."""
        self.ask(name)
        return self._evaluations[view].scores(self._key(name), view.size)

    def layer_scores(self, name: str, view: View) -> dict[int, LoadScores | None]:
        """Figures of each predicted layer."""
        self.ask(name)
        return self._evaluations[view].layer_scores(self._key(name), view.size)

    def loads(self, name: str, view: View) -> tuple[Loads, Loads]:
        """Expected and true loads of all batches [N, L, E]."""
        self.ask(name)
        evaluation = self._evaluations[view]
        return evaluation.expected[self._key(name)][view.size], evaluation.actual[view.size]

    def _key(self, name: str) -> str:
        """Predictors of several sources are held against the same tokens."""
        return f"{self.trained_on}: {name}"

    def _ask(self, name: str) -> Expected:
        if name in HISTORIES:
            for evaluation in self._evaluations.values():
                evaluation.add_history(self._key(name), replay_history(name))
            return Expected(made=None, recall=None)
        if name in ADJUSTED:
            return self._adjust(name)
        made = make_predictor(self._context, self.model, self.trained_on, self.distance, name)
        asked = self._evaluations[LONG_PROMPTS].ask(made.predictor)
        for evaluation in self._evaluations.values():
            evaluation.add_shares(self._key(name), asked)
        facts = MadeFacts(
            num_bytes=made.predictor.num_bytes,
            layers_trained=made.layers_trained,
            fit_tokens=made.fit_tokens,
        )
        return Expected(made=facts, recall=float(asked.recall_L.mean()))

    def _adjust(self, name: str) -> Expected:
        found = self.ask(RIDGE)
        for view, evaluation in self._evaluations.items():
            expected = evaluation.expected[self._key(RIDGE)][view.size]
            evaluation.add_history(self._key(name), partial(ADJUSTMENTS[ADJUSTED[name]], expected))
        return Expected(made=found.made, recall=None)


def evaluate(context: Context, shards: GateShards, distance: int) -> dict[View, Evaluation]:
    """Held-out tokens of a recording, put together in all ways.

    Args:
        context: Says how many tokens.
        shards: The recording.
        distance: d.
    """
    known = shards.manifest
    _, held_out = shards.split(HELD_OUT, context.seed)
    rows = TokenRows(shards, held_out).first(tokens_of(context))
    return {
        view: Evaluation(
            rows,
            layers=known.num_layers,
            experts=known.num_experts,
            distance=distance,
            sizes=(view.size,),
            batching=view.batching,
        )
        for view in VIEWS
    }
