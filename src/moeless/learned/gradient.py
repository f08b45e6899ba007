"""Gradient descent on one layer's model, until it is good enough or gets no better."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeless.learned.gate_predictor import Gate
from moeless.learned.mlp import Mlp
from moeless.learned.narrow_gate import is_bfloat16_fast
from moeless.learned.soft_targets import RoutingLoss

Loss = Callable[[Tensor, Tensor], Tensor]
"""From predicted logits and targets [T, E] of a minibatch."""


@dataclass(frozen=True, kw_only=True)
class DescentOptions:
    """How to descend.

    Args:
        epochs: Passes over the tokens at the most.
        patience: Passes without improvement after which it ends.
        minibatch: Tokens of a step.
        rate: Adam's first learning rate, relative to the root mean square of the tensor it is
            applied to (of the largest one, for biases); it falls along a cosine to nothing.
        seed: Of the order of tokens.
    """

    epochs: int = 20
    patience: int = 3
    minibatch: int = 256
    rate: float = 0.1
    seed: int = 0


def descend(
    model: Any,
    inputs_TH: Tensor,
    target_TE: Tensor,
    *,
    loss: Loss,
    judge: Callable[[Any], float],
    options: DescentOptions,
    enough: float = 1.0,
    narrow: bool = False,
) -> tuple[Any, int]:
    """Fit all tensors of a model but the correction bias.

    Args:
        model: A ``Gate`` or an ``Mlp``; not changed.
        inputs_TH: Inputs [T, H].
        target_TE: Targets [T, E].
        loss: What to minimise.
        judge: Accuracy of a model on other tokens; the best model so judged is kept.
        options: How.
        enough: Accuracy at which it ends.
        narrow: Whether products may be taken in bfloat16 where that is fast, which leaves the
            model's tensors, their sums and their steps in float32.

    Returns:
        The best model and the passes made; the model as it was if none was better.
    """
    names = [name for name in model.tensors if name != "correction"]
    fitted = model._replace(
        **{name: model.tensors[name].detach().float().clone() for name in names}
    )
    parameters = [fitted.tensors[name].requires_grad_() for name in names]
    optimizer = torch.optim.Adam(
        [{"params": [part], "lr": options.rate * _size(part, parameters)} for part in parameters],
        fused=narrow,
    )
    device = inputs_TH.device.type
    mixed = torch.autocast(
        device, torch.bfloat16, enabled=narrow and is_bfloat16_fast(device), cache_enabled=False
    )
    steps = options.epochs * -(-len(inputs_TH) // options.minibatch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    generator = torch.Generator().manual_seed(options.seed)
    best, best_accuracy, stale, epoch = model, judge(model), 0, 0
    while epoch < options.epochs and stale < options.patience and best_accuracy < enough:
        order = torch.randperm(len(inputs_TH), generator=generator)
        for rows in torch.split(order, options.minibatch):
            optimizer.zero_grad()
            with mixed:
                logits_TE = fitted.logits(inputs_TH[rows])
            torch.autograd.backward(loss(logits_TE.float(), target_TE[rows]))
            optimizer.step()
            schedule.step()
        epoch += 1
        found = fitted._replace(**{name: fitted.tensors[name].detach().clone() for name in names})
        accuracy = judge(found)
        stale += 1
        if accuracy > best_accuracy:
            best, best_accuracy, stale = found, accuracy, 0
    return best, epoch


def finetune_gate(
    gate: Gate,
    inputs_TH: Tensor,
    true_logits_TE: Tensor,
    *,
    judge: Callable[[Gate], float],
    options: DescentOptions,
    enough: float,
) -> tuple[Gate, int]:
    """Fine-tune a copied gate on soft targets from the true gate.

    Args:
        gate: The copy to begin with.
        inputs_TH: Hidden states that it is asked with [T, H].
        true_logits_TE: Logits of the model's own gate, same tokens [T, E].
        judge: As for ``descend``.
        options: How.
        enough: Accuracy at which it ends.

    Returns:
        The best gate and the passes made.

    Source: MoEless paper, section 4.1 (gate network fine-tuning with layer awareness).
    """
    loss = RoutingLoss(true_logits_TE, gate.rule)
    start = gate
    if gate.bias is None:
        start = gate._replace(bias=torch.zeros(gate.weight.shape[0]))
    found, epochs = descend(
        start,
        inputs_TH,
        loss.targets(true_logits_TE),
        loss=loss,
        judge=judge,
        options=options,
        enough=enough,
    )
    return (gate if found is start else found), epochs


def train_mlp(
    mlp: Mlp,
    inputs_TH: Tensor,
    chosen_TE: Tensor,
    *,
    judge: Callable[[Mlp], float],
    options: DescentOptions,
) -> tuple[Mlp, int]:
    """Train a perceptron to say which experts are chosen.

    Args:
        mlp: Untrained.
        inputs_TH: Hidden states [T, H].
        chosen_TE: 1 for chosen experts, else 0 [T, E].
        judge: As for ``descend``.
        options: How.

    Returns:
        The best model and the passes made.
    """
    return descend(
        mlp,
        inputs_TH,
        chosen_TE,
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        judge=judge,
        options=options,
        narrow=True,  # its products are what takes long, unlike those of a gate
    )


def _size(part: Tensor, parameters: list[Tensor]) -> float:
    """What steps of a tensor are measured by; biases begin at zero and have no size."""
    weighed = [other for other in parameters if other.ndim > 1]
    measured = [part] if part.ndim > 1 else weighed
    return max(max(float(other.detach().pow(2).mean().sqrt()) for other in measured), 1e-12)
