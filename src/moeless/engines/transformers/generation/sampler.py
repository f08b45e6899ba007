"""Choose each row's next token from its logits.

This module must not know caches, text or scheduling.
"""

import math
from dataclasses import dataclass

import torch

from moeless.core.generation import SamplingParams
from moeless.errors import EngineError

_NUCLEUS_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Choice:
    """One row's next token.

    Args:
        token_id: The token.
        logprob: Its log-probability before temperature and filters; None if not asked for.
        top: Alternatives as (id, log-probability), likeliest first.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class RowSampler:
    """One request's way of choosing, with random numbers of its own.

    The draw depends on the seed, the request's own earlier draws and the row's logits, never on
    which other rows share the batch.

    Args:
        params: The request's parameters, already validated.

    Cost on the token path: nothing beyond ``find_best`` for greedy rows; a sampled row passes
    over the vocabulary a few times, with a partial sort under ``top_k`` or ``top_p``.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.greedy = params.temperature == 0 or params.top_k == 1
        self._generator: torch.Generator | None = None
        if not self.greedy:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed & (2**63 - 1))

    def choose(self, logits: torch.Tensor, row: int, best: tuple[float, int]) -> Choice:
        """Choose the next token of one row.

        Args:
            logits: float [row, vocabulary], straight from the model.
            row: Which one.
            best: The row's largest logit and its id, from ``find_best``.

        Returns:
            The choice, with log-probabilities if the request wants them.

        Raises:
            EngineError: The row's logits are not finite.
        """
        maximum, best_id = best
        if not math.isfinite(maximum):  # NaN anywhere in the row makes its maximum NaN
            raise EngineError("the model returned logits that are not finite for this request")
        token_id = best_id if self.greedy else self._draw(logits[row])
        if self.params.logprobs is None:
            return Choice(token_id)
        return _with_logprobs(logits[row], token_id, self.params.logprobs)

    def _draw(self, logits: torch.Tensor) -> int:
        params = self.params
        # The maximum goes first: dividing by a tiny temperature must not overflow.
        scaled = (logits.double() - logits.max()) / params.temperature
        if params.top_k > 0 or params.top_p < 1:
            weights, token_ids = self._likeliest(scaled)
        else:
            weights, token_ids = scaled.softmax(dim=-1), None
        sums = weights.cumsum(dim=-1)
        if params.top_p < 1:
            # A token stays if the likelier ones do not make up the nucleus yet.
            kept = max(1, int((sums - weights < params.top_p).sum()))
            sums = sums[:kept]
        share = torch.rand(1, generator=self._generator, dtype=torch.float64).to(sums.device)
        index = int(torch.searchsorted(sums, share * sums[-1], right=True))
        index = min(index, sums.shape[0] - 1)
        return index if token_ids is None else int(token_ids[index])

    def _likeliest(self, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids in falling order: the top k, or enough to hold the nucleus."""
        vocabulary = scaled.shape[0]
        if self.params.top_k > 0:
            values, ids = scaled.topk(min(self.params.top_k, vocabulary))
            return values.softmax(dim=-1), ids
        total = scaled.logsumexp(dim=-1)
        values, ids = scaled.topk(min(_NUCLEUS_CANDIDATES, vocabulary))
        weights = (values - total).exp()
        if weights.sum() < self.params.top_p:  # a flat distribution: sorting all is dear but rare
            values, ids = scaled.sort(descending=True)
            weights = (values - total).exp()
        return weights, ids


def find_best(logits: torch.Tensor) -> list[tuple[float, int]]:
    """Each row's largest logit and its id: all that greedy rows need.

    Args:
        logits: float [row, vocabulary].

    Cost on the token path: one pass over the logits of all rows together.
    """
    values, ids = logits.max(dim=-1)
    return list(zip(values.tolist(), ids.tolist(), strict=True))


def _with_logprobs(logits: torch.Tensor, token_id: int, alternatives: int) -> Choice:
    logprobs = logits.float().log_softmax(dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        values, ids = logprobs.topk(min(alternatives, logprobs.shape[0]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Choice(token_id, float(logprobs[token_id]), top)
