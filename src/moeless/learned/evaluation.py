"""Holds predictors against what a model did: loads of batches, expected and true."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.errors import TraceError
from moeless.learned.batching import Batching
from moeless.learned.expected_shares import one_hot
from moeless.learned.judging import Judge
from moeless.learned.load_predictor import LoadPredictor, finish_load
from moeless.learned.metrics import LoadScores, recalled, score_loads
from moeless.learned.token_rows import TokenRows

Loads = NDArray[np.float64]
History = Callable[[Loads], Loads]
"""From the true loads of batches in their order [N, L, E] to what is expected of each from
those before it."""


class AskedShares(NamedTuple):
    """What a predictor expects of tokens.

    Args:
        shares_L: For each predicted layer, float32 [T, E].
        recall_L: Share of the chosen experts that were expected, per layer.
    """

    shares_L: tuple[torch.Tensor, ...]
    recall_L: NDArray[np.float64]


class Evaluation:
    """Expected and true loads of some tokens in batches.

    Args:
        rows: The tokens, of conversations that no predictor was fitted to.
        layers: L.
        experts: E.
        distance: d of the predictors.
        sizes: Tokens of a batch, several.
        batching: How tokens are put together.
    """

    def __init__(
        self,
        rows: TokenRows,
        *,
        layers: int,
        experts: int,
        distance: int,
        sizes: Sequence[int],
        batching: Batching = "recorded",
    ) -> None:
        self.distance, self.sizes, self.batching = distance, tuple(sizes), batching
        self.layers = range(distance, layers)
        self._rows, self._experts = rows, experts
        self._judge = Judge(rows, sizes, batching)
        self.actual = self._true_loads()
        self.expected: dict[str, dict[int, Loads]] = {}
        self.recall: dict[str, NDArray[np.float64]] = {}

    def add_predictor(self, name: str, predictor: LoadPredictor) -> None:
        """Ask a predictor for all batches.

        Args:
            name: What it is called in the results.
            predictor: Of this evaluation's distance.
        """
        self.add_shares(name, self.ask(predictor))

    def ask(self, predictor: LoadPredictor) -> AskedShares:
        """What a predictor expects of each token; evaluations of the same tokens may share it.

        Args:
            predictor: Of this evaluation's distance.
        """
        shares_L: list[list[torch.Tensor]] = [[] for _ in self.layers]
        hits_L, wanted_L = np.zeros(len(self.layers)), np.zeros(len(self.layers))
        for chunk in self._rows:
            for n, ahead in enumerate(self.layers):
                layer = ahead - self.distance
                share_TE = predictor.shares(layer, chunk.states(layer, predictor.reads))
                assert share_TE is not None
                ids_TK = chunk.topk_ids(ahead)
                expected_TK = torch.topk(share_TE, ids_TK.shape[1], dim=1).indices
                hits_L[n] += recalled(expected_TK, ids_TK)
                wanted_L[n] += ids_TK.numel()
                shares_L[n].append(share_TE)
        return AskedShares(
            tuple(torch.cat(shares) for shares in shares_L), hits_L / np.maximum(wanted_L, 1)
        )

    def add_shares(self, name: str, asked: AskedShares) -> None:
        """Make loads of batches of what a predictor expects.

        Args:
            name: What it is called in the results.
            asked: What ``ask`` gave, of the same tokens.
        """
        self.recall[name] = asked.recall_L
        self.expected[name] = {
            size: finish_load(
                np.stack([self._judge.loads(each, size) for each in asked.shares_L], axis=1),
                self.actual[size].sum(axis=-1),
            )
            for size in self.sizes
        }

    def add_history(self, name: str, history: History) -> None:
        """Ask something that sees loads only.

        Args:
            name: What it is called in the results.
            history: Expects each batch from those before it.
        """
        self.expected[name] = {
            size: finish_load(history(actual), actual.sum(axis=-1))
            for size, actual in self.actual.items()
        }

    def require_batches(self) -> None:
        """Require that at least one batch can be made.

        Raises:
            TraceError: There are too few tokens.
        """
        if all(len(actual) == 0 for actual in self.actual.values()):
            tokens, least = self._rows.tokens, min(self.sizes)
            raise TraceError(
                f"{tokens} held-out tokens make no {self.batching} batch of {least}; record at "
                f"least {least} in held-out conversations, or use smaller batches"
            )

    def scores(self, name: str, size: int) -> LoadScores | None:
        """Figures over all layers; None where there is no batch of the size."""
        return score_loads(self.expected[name][size], self.actual[size])

    def layer_scores(self, name: str, size: int) -> dict[int, LoadScores | None]:
        """Figures of each predicted layer."""
        expected, actual = self.expected[name][size], self.actual[size]
        return {
            ahead: score_loads(expected[:, i], actual[:, i]) for i, ahead in enumerate(self.layers)
        }

    def _true_loads(self) -> Mapping[int, Loads]:
        loads: dict[int, list[Loads]] = {size: [] for size in self.sizes}
        chosen_L: list[list[torch.Tensor]] = [[] for _ in self.layers]
        for chunk in self._rows:
            for ids, ahead in zip(chosen_L, self.layers, strict=True):
                ids.append(chunk.topk_ids(ahead))
        for ids in chosen_L:
            share_TE = one_hot(torch.cat(ids), self._experts)
            for size in self.sizes:
                loads[size].append(self._judge.loads(share_TE, size))
        return {size: np.stack(found, axis=1) for size, found in loads.items()}
