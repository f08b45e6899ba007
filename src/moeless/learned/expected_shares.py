"""From predicted logits to expected shares of tokens: the choice, and how sure it is."""

import torch
from torch import Tensor

from moeless.core.router import RouterRule
from moeless.learned.scoring import MONOTONE, choose


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
            it were certain. Rules whose choice is not that of the K largest logits count
            choices, whatever the spread.

    Returns:
        float32 [T, E]; each row sums to K.
    """
    experts = logits_TE.shape[-1]
    if spread > 0.0 and rule.kind in MONOTONE and rule.top_k < experts:
        return _probabilities(logits_TE.float(), rule.top_k, spread)
    return one_hot(choose(logits_TE, rule, correction_E), experts)


def one_hot(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Shares of tokens whose experts are known: 1 for each, float32 [T, E]."""
    share_TE = torch.zeros((len(ids_TK), num_experts), device=ids_TK.device)
    share_TE.scatter_(1, ids_TK.long(), 1.0)
    return share_TE


def _probabilities(logits_TE: Tensor, top_k: int, spread: float) -> Tensor:
    best = torch.topk(logits_TE, top_k + 1, dim=-1).values
    middle_T = (best[:, top_k - 1 : top_k] + best[:, top_k:]) / 2.0
    chance_TE = torch.special.ndtr((logits_TE - middle_T) / spread)
    scale_T: Tensor = top_k / chance_TE.sum(dim=-1, keepdim=True)
    share_TE: Tensor = chance_TE * scale_T
    return share_TE
