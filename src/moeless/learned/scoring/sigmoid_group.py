"""DeepSeek-V3: sigmoid scores with a correction bias, chosen within the best groups."""

import torch
from torch import Tensor

from moeless.core.router import RouterRule

_LEAST = 1e-6
"""Scores and errors below it are taken for it: beyond it a logit says nothing more."""


def choose_sigmoid_group(
    logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None = None
) -> Tensor:
    """Expert ids [T, K], in no particular order.

    Experts are divided into equal groups; the groups with the largest sum of their two best
    scores stay, and the K best experts of those are chosen.
    """
    scores_TE = _scores(logits_TE, correction_E)
    if rule.top_groups < rule.num_groups:
        best, _ = _best_two(scores_TE, rule)
        scores_TE = _within_groups(scores_TE, best.sum(dim=-1), rule)
    return torch.topk(scores_TE, rule.top_k, dim=-1, sorted=False).indices


def chances_sigmoid_group(
    logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None, spread: float
) -> Tensor:
    """How probable it is that each expert is chosen where logits are off by normal errors.

    An expert is chosen if its group stays and its logit ends above the one that would give it the
    middle between the K-th and the next score of the groups that stay. Whether a group stays is
    to first order a matter of the errors of its two best scores.

    Args:
        logits_TE: Predicted router logits [T, E].
        rule: The rule.
        correction_E: Its correction bias [E], or None.
        spread: Standard deviation of a logit's error, above 0.

    Returns:
        float32 [T, E], not scaled: rows sum to about K.
    """
    logits_TE = logits_TE.float()
    scores_TE = allowed_TE = _scores(logits_TE, correction_E)
    stays_TE: Tensor | None = None
    if rule.top_groups < rule.num_groups:
        best, places = _best_two(scores_TE, rule)
        strength_TG = best.sum(dim=-1)
        sigmoid = logits_TE.view(*places.shape[:2], -1).gather(-1, places).sigmoid()
        off_TG = (spread * sigmoid * (1.0 - sigmoid)).pow(2).sum(dim=-1).sqrt()
        limit = _middle(strength_TG, rule.top_groups)
        stays_TG = torch.special.ndtr((strength_TG - limit) / off_TG.clamp(min=_LEAST))
        stays_TG = stays_TG * (rule.top_groups / stays_TG.sum(dim=-1, keepdim=True))
        stays_TE = stays_TG.repeat_interleave(scores_TE.shape[1] // rule.num_groups, dim=1)
        allowed_TE = _within_groups(scores_TE, strength_TG, rule)
    limit = _middle(allowed_TE, rule.top_k)
    if correction_E is not None:
        limit = limit - correction_E
    needed = torch.logit(limit.clamp(_LEAST, 1.0 - _LEAST))
    chosen_TE: Tensor = torch.special.ndtr((logits_TE - needed) / spread)
    return chosen_TE if stays_TE is None else chosen_TE * stays_TE.clamp_(max=1.0)


def _scores(logits_TE: Tensor, correction_E: Tensor | None) -> Tensor:
    scores_TE = logits_TE.float().sigmoid()
    return scores_TE if correction_E is None else scores_TE + correction_E


def _best_two(scores_TE: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
    """The two best scores of each group, and their places in it [T, G, 2]."""
    size = scores_TE.shape[1] // rule.num_groups
    grouped = scores_TE.view(scores_TE.shape[0], rule.num_groups, size)
    found = grouped.topk(min(2, size), dim=-1)
    return found.values, found.indices


def _within_groups(scores_TE: Tensor, strength_TG: Tensor, rule: RouterRule) -> Tensor:
    """Scores, minus infinity in groups that do not stay."""
    best = strength_TG.topk(rule.top_groups, dim=-1, sorted=False).indices
    excluded = torch.ones_like(strength_TG, dtype=torch.bool).scatter_(1, best, value=False)
    grouped = scores_TE.view(*strength_TG.shape, -1)
    return grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).view_as(scores_TE)


def _middle(values: Tensor, count: int) -> Tensor:
    """Between the last of the largest so many values and the next one [T, 1]."""
    best = torch.topk(values, count + 1, dim=-1).values
    return (best[:, count - 1 : count] + best[:, count:]) / 2.0
