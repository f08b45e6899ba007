"""Rules by which routers choose experts: logits in, expert ids out, one family of rules a file.

Weights are not computed here: a predictor needs to know who gets a token, not how much it counts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moeless.core.router import RouterKind, RouterRule
from moeless.errors import ModelError
from moeless.learned.scoring.sigmoid_group import choose_sigmoid_group
from moeless.learned.scoring.softmax_topk import choose_softmax_topk
from moeless.learned.scoring.sparsemixer import choose_sparsemixer
from moeless.learned.scoring.topk_sigmoid import choose_topk_sigmoid
from moeless.learned.scoring.topk_softmax import choose_topk_softmax

Choose = Callable[[Tensor, RouterRule, Tensor | None], Tensor]

_RULES: dict[RouterKind, Choose] = {
    "sigmoid_group": choose_sigmoid_group,
    "softmax_topk": choose_softmax_topk,
    "sparsemixer": choose_sparsemixer,
    "topk_sigmoid": choose_topk_sigmoid,
    "topk_softmax": choose_topk_softmax,
}

# In these the score grows with the logit, so that the choice is the K largest logits.
MONOTONE: frozenset[RouterKind] = frozenset(
    {"softmax_topk", "sparsemixer", "topk_sigmoid", "topk_softmax"}
)


def choose(logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None = None) -> Tensor:
    """Choose experts exactly as the router would.

    Args:
        logits_TE: Router logits [T, E], the router's bias included.
        rule: The router's rule.
        correction_E: The bias [E] added to the scores for the choice only, where the rule has one.

    Returns:
        Expert ids, int64 [T, K], in the router's order.

    Raises:
        ModelError: The rule is of a kind that is not known here.
    """
    return _rule(rule)(logits_TE, rule, correction_E)


def count_choices(
    logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None = None
) -> Tensor:
    """Count the tokens of each expert; cheaper than ``choose``, whose order it does not need.

    Args:
        logits_TE: As for ``choose``.
        rule: As for ``choose``.
        correction_E: As for ``choose``.

    Returns:
        Tokens per expert, int64 [E]. Where logits tie exactly, another of the tied experts than
        the router's own may be counted.

    Raises:
        ModelError: The rule is of a kind that is not known here.
    """
    if rule.kind in MONOTONE:
        chosen = torch.topk(logits_TE, rule.top_k, dim=-1, sorted=False).indices
    else:
        chosen = _rule(rule)(logits_TE, rule, correction_E)
    return torch.bincount(chosen.reshape(-1), minlength=logits_TE.shape[-1])


def _rule(rule: RouterRule) -> Choose:
    found = _RULES.get(rule.kind)
    if found is None:
        known = ", ".join(sorted(_RULES))
        raise ModelError(f"router rule {rule.kind!r} is not known; known are: {known}")
    return found
