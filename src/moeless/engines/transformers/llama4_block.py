"""Llama 4's MoE block with experts somewhere else.

The block of transformers computes every expert for every token and adds up, so replacing its
experts alone would not do: this block routes first and sends a token to its chosen experts only.
"""

from typing import Any

import torch
from torch import nn
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextMLP

from moeless.engines.transformers.weightless import WeightlessExperts


class Llama4WeightlessMoe(nn.Module):
    """Router and shared expert of Llama 4, routed experts elsewhere.

    Args:
        config: The text model's configuration.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.hidden_dim = config.hidden_size
        self.num_experts = config.num_local_experts
        self.experts = WeightlessExperts(config)
        self.router = Llama4Router(config)
        self.shared_expert = Llama4TextMLP(config)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the block.

        Experts are handed over in ascending order, with raw hidden states and the sigmoid of
        their logits: the score scales an expert's input, not its output.

        Args:
            hidden_states: [batch, length, H] or [T, H].

        Returns:
            Output [T, H] and router logits [T, E].
        """
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(hidden_states)
        chosen = torch.topk(logits, self.top_k, dim=-1).indices.sort(dim=-1).values
        routed = self.experts(hidden_states, chosen, scores.gather(-1, chosen))
        return self.shared_expert(hidden_states) + routed, logits
