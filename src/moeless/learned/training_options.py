"""How to train a predictor, and what it takes."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from moeless.errors import ConfigError
from moeless.learned.gradient import DescentOptions
from moeless.learned.load_predictor import Reads
from moeless.learned.token_rows import CHUNK_ROWS

Method = Literal["ridge", "finetune", "mlp"]

_FLOAT64_BYTES, _FLOAT32_BYTES = 8, 4
_SOLVING_COPIES = 3
"""Matrices of X'X's size that solving holds at once: penalised, factor, and LAPACK's own."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train.

    Args:
        distance: d, layers to look ahead.
        method: ``ridge`` re-fits copied gates in closed form; ``finetune`` descends from the
            copied gates on soft targets, as the MoEless paper does; ``mlp`` trains a perceptron
            per layer from scratch, as ProMoE does.
        threshold: h; layers whose copied gate reaches this load accuracy keep it, and
            fine-tuning ends there.
        all_layers: Train every layer, whatever its accuracy, for as long as it gets better.
        held_out: Share of the conversations that only the report sees.
        validation: Share of the other conversations that decides between models.
        seed: Of the division, the draw of tokens and all else.
        max_tokens: Tokens to fit to at the most, drawn at random.
        memory_bytes: Bound of what is held beside the recording; layers are fitted in groups
            that stay below it.
        penalties: Ridge penalties that compete, relative to the inputs' mean square.
        descent: How ``finetune`` and ``mlp`` descend.
        reads: Hidden states to predict from. ``layer_input`` is a baseline for ``ridge``.

    Raises:
        ConfigError: A value out of range.
    """

    distance: int = 1
    method: Method = "ridge"
    threshold: float = 0.8
    all_layers: bool = False
    held_out: float = 0.2
    validation: float = 0.15
    seed: int = 0
    max_tokens: int = 32_768
    memory_bytes: int = 2 * 2**30
    penalties: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)
    descent: DescentOptions = field(default_factory=DescentOptions)
    reads: Reads = "gate_input"

    def __post_init__(self) -> None:
        if self.distance < 1:
            raise ConfigError(f"distance {self.distance} is not positive; use for example 1")
        if self.method not in get_args(Method):
            raise ConfigError(
                f"method {self.method!r} is unknown; use {', '.join(get_args(Method))}"
            )
        if self.reads == "layer_input" and self.method == "finetune":
            raise ConfigError("a copied gate cannot be fine-tuned on layer inputs; use ridge")
        for name in ("held_out", "validation"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; use a share such as 0.2")
        if not 0.0 <= self.threshold <= 1.0:
            raise ConfigError(f"threshold is {self.threshold}; use 0 to 1, for example 0.8")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; fit to at least 1")
        if not self.penalties or min(self.penalties) <= 0.0:
            raise ConfigError(f"penalties {self.penalties} must be one or more above 0")


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What training will hold beside the recording.

    Args:
        layer_bytes: For each layer of a group.
        shared_bytes: Once, whatever the group.
        layers: Layers that are to be fitted.
        group: Layers that are fitted together.
    """

    layer_bytes: int
    shared_bytes: int
    layers: int
    group: int

    @property
    def total_bytes(self) -> int:
        """Of a whole group."""
        return self.shared_bytes + self.group * self.layer_bytes

    @property
    def passes(self) -> int:
        """How often the recording is read for fitting."""
        return -(-self.layers // max(self.group, 1))


def estimate_memory(
    options: TrainingOptions,
    *,
    layers: int,
    hidden: int,
    experts: int,
    tokens: int,
    at_once: int = 1,
) -> MemoryEstimate:
    """Memory that training needs, before it starts.

    Args:
        options: How.
        layers: Layers that may have to be fitted.
        hidden: H.
        experts: E.
        tokens: Tokens to fit to; validation and held-out ones are a part of as many again.
        at_once: Layers that may descend at the same time.

    Raises:
        ConfigError: Not even one layer fits into ``memory_bytes``.
    """
    judged = int(tokens * max(options.validation, options.held_out)) + 1
    chunk = 2 * CHUNK_ROWS * (hidden + 1) * _FLOAT32_BYTES
    shared = judged * (hidden + 4 * experts) * _FLOAT32_BYTES + chunk
    if options.method == "ridge":
        square = (hidden + 1) ** 2 * _FLOAT64_BYTES
        layer = square + (hidden + 1) * experts * _FLOAT64_BYTES
        shared += _SOLVING_COPIES * square
        group = max(0, min(layers, (options.memory_bytes - shared) // layer))
    else:
        layer = tokens * (hidden + 2 * experts) * _FLOAT32_BYTES
        if options.method == "mlp":  # weights, gradient, Adam's two moments, the best so far
            layer += 5 * 2 * hidden * (hidden + experts) * _FLOAT32_BYTES
        layer += judged * (hidden + 4 * experts) * _FLOAT32_BYTES
        group = max(0, min(layers, at_once, (options.memory_bytes - shared) // layer))
    found = MemoryEstimate(
        layer_bytes=layer, shared_bytes=shared, layers=layers, group=max(group, 1)
    )
    if found.total_bytes > options.memory_bytes:
        raise ConfigError(
            f"fitting one layer needs {found.total_bytes / 2**30:.2f} GiB, more than the "
            f"{options.memory_bytes / 2**30:.2f} GiB allowed; allow more, or fit to fewer tokens"
        )
    return found
