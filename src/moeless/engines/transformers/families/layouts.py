"""The ways in which several families store their experts."""

from moeless.core.checkpoint import ExpertLayout, TensorSource


def per_expert(prefix: str, gate: str, up: str, down: str) -> ExpertLayout:
    """One matrix per expert and projection: ``PREFIX.{expert}.GATE.weight`` and so on."""
    stem = f"{prefix}.{{expert}}."
    return ExpertLayout(
        gate_up=TensorSource(keys=(f"{stem}{gate}.weight", f"{stem}{up}.weight")),
        down=TensorSource(keys=(f"{stem}{down}.weight",)),
    )


def fused(gate_up: str, down: str) -> ExpertLayout:
    """All experts of a layer in two tensors, [E, 2I, H] and [E, H, I]."""
    return ExpertLayout(
        gate_up=TensorSource(keys=(gate_up,), fused=True),
        down=TensorSource(keys=(down,), fused=True),
    )
