"""Mixtral, Qwen3-MoE, OLMoE: softmax over all experts, then the K largest."""

import torch
from torch import Tensor

from moeless.core.router import RouterRule


def choose_softmax_topk(
    logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None = None
) -> Tensor:
    """Expert ids [T, K], most probable first.

    The softmax is taken although it keeps the order: in float32 it may round two logits to one
    probability, and the choice among equals must be the router's.
    """
    del correction_E
    probabilities = torch.softmax(logits_TE.float(), dim=-1)
    return torch.topk(probabilities, rule.top_k, dim=-1).indices
