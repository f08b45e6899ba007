"""What a true gate's logits ask of a copy: soft targets and their loss, by the model's rule."""

import torch
from torch import Tensor

from moeless.core.router import RouterRule
from moeless.learned.scoring import choose

_SIGMOIDS = ("sigmoid_group", "topk_sigmoid")


class RoutingLoss:
    """Cross entropy between a predictor's logits and a true gate, as the rule scores them.

    For softmax over all experts (``softmax_topk``, ``sparsemixer``) targets are the true gate's
    probabilities; for softmax over the chosen (``topk_softmax``) their weights, zero elsewhere;
    for sigmoids (``sigmoid_group``, ``topk_sigmoid``) the scores. Where softmaxes are taken,
    logits are measured in their own standard deviation: the choice does not depend on it, and
    the logits of some gates are so small that all their probabilities look equal.

    Args:
        true_logits_TE: The true gate's logits [T, E].
        rule: The model's rule.
    """

    def __init__(self, true_logits_TE: Tensor, rule: RouterRule) -> None:
        self._rule = rule
        self._sigmoid = rule.kind in _SIGMOIDS
        self._scale = 1.0
        if not self._sigmoid and true_logits_TE.numel():
            self._scale = max(float(true_logits_TE.float().std(correction=0)), 1e-30)

    def targets(self, logits_TE: Tensor) -> Tensor:
        """Targets from true logits, float32 [T, E]."""
        logits_TE = logits_TE.float() / self._scale
        if self._sigmoid:
            return logits_TE.sigmoid()
        if self._rule.kind == "topk_softmax":
            chosen = torch.zeros_like(logits_TE, dtype=torch.bool)
            chosen.scatter_(1, choose(logits_TE, self._rule), value=True)
            logits_TE = logits_TE.masked_fill(~chosen, float("-inf"))
        return logits_TE.softmax(dim=-1)

    def __call__(self, logits_TE: Tensor, target_TE: Tensor) -> Tensor:
        """Mean loss of predicted logits [T, E]."""
        if self._sigmoid:
            return torch.nn.functional.binary_cross_entropy_with_logits(logits_TE, target_TE)
        return torch.nn.functional.cross_entropy(logits_TE / self._scale, target_TE)
