"""From predicted logits to expected shares of tokens: the choice, and how sure it is."""

import torch
from torch import Tensor

from moeless.core.router import RouterRule
from moeless.learned.scoring import MONOTONE, choose, count_choices
from moeless.learned.scoring.sigmoid_group import chances_sigmoid_group

_SQRT_HALF = 0.5**0.5


def expected_shares(
    logits_TE: Tensor,
    rule: RouterRule,
    correction_E: Tensor | None = None,
    *,
    spread: float = 0.0,
) -> Tensor:
    """Expected share of each token that every expert gets.

    With a spread, an expert is chosen with the probability that its logit, off by a normal error,
    ends above the middle between the K-th and the next logit. Counting probabilities instead of
    choices keeps near ties from all falling to one side.

    Args:
        logits_TE: Predicted router logits [T, E].
        rule: The router's rule.
        correction_E: Its correction bias [E], or None.
        spread: Standard deviation by which logits are taken to be off; 0 counts the choice as if
            it were certain.

    Returns:
        float32 [T, E]; each row sums to K.
    """
    if spread > 0.0 and rule.top_k < logits_TE.shape[-1]:
        chance_TE, scale_T = _chances(logits_TE, rule, correction_E, spread)
        return chance_TE * scale_T
    return one_hot(choose(logits_TE, rule, correction_E), logits_TE.shape[-1])


def expected_load(
    logits_TE: Tensor,
    rule: RouterRule,
    correction_E: Tensor | None = None,
    *,
    spread: float = 0.0,
) -> Tensor:
    """The sum of ``expected_shares`` over tokens, on a shorter way.

    Args:
        logits_TE: As for ``expected_shares``.
        rule: As for ``expected_shares``.
        correction_E: As for ``expected_shares``.
        spread: As for ``expected_shares``.

    Returns:
        Tokens per expert [E], summing to T x K; float32, or int64 where choices are counted.
    """
    if spread > 0.0 and rule.top_k < logits_TE.shape[-1]:
        chance_TE, scale_T = _chances(logits_TE, rule, correction_E, spread)
        return (scale_T.T @ chance_TE)[0]
    return count_choices(logits_TE, rule, correction_E)


def one_hot(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Shares of tokens whose experts are known: 1 for each, float32 [T, E]."""
    share_TE = torch.zeros((len(ids_TK), num_experts), device=ids_TK.device)
    share_TE.scatter_(1, ids_TK.long(), 1.0)
    return share_TE


def _chances(
    logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None, spread: float
) -> tuple[Tensor, Tensor]:
    """Unscaled probabilities [T, E], and what scales each row to K [T, 1]."""
    if rule.kind in MONOTONE:
        logits_TE = logits_TE.float()
        best = torch.topk(logits_TE, rule.top_k + 1, dim=-1).values
        middle_T = (best[:, rule.top_k - 1 : rule.top_k] + best[:, rule.top_k :]) / 2.0
        # 1 + erf is twice the normal distribution function, and a third of its cost here.
        chance_TE = ((logits_TE - middle_T) * (_SQRT_HALF / spread)).erf_().add_(1.0)
    else:
        chance_TE = chances_sigmoid_group(logits_TE, rule, correction_E, spread)
    return chance_TE, rule.top_k / chance_TE.sum(dim=-1, keepdim=True)
