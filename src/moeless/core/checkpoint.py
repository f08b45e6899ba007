"""How a checkpoint stores the weights of routed experts, as data.

A model family describes its keys with these types; the store reads them without knowing the
family. Everything here can be written as JSON and sent to a worker process.
"""

from dataclasses import dataclass
from typing import Literal

Codec = Literal["plain", "mxfp4", "fp8_block"]


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """Where one matrix (or bias) of an expert comes from.

    Args:
        keys: Key templates with ``{layer}`` (absolute layer index) and ``{expert}``. Two keys are
            joined along the output dimension (gate, then up).
        fused: The tensor holds all experts of the layer, the expert is its first dimension.
        transposed: A matrix is stored [in, out] instead of [out, in].
        interleaved: Gate and up rows alternate (gate0, up0, ...) along the output dimension.
        codec: How values are encoded. ``mxfp4`` reads ``<key>_blocks`` and ``<key>_scales``;
            ``fp8_block`` reads ``<key>`` and ``<key>_scale_inv``.
        block: Rows and columns that share one scale, for ``fp8_block``.
    """

    keys: tuple[str, ...]
    fused: bool = False
    transposed: bool = False
    interleaved: bool = False
    codec: Codec = "plain"
    block: tuple[int, int] = (128, 128)


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The sources of one expert's parameters.

    The store returns them in one canonical form whatever the source: ``gate`` and ``up`` [I, H],
    ``down`` [H, I], biases [I], [I], [H].

    Args:
        gate_up: Gate and up projection.
        down: Down projection.
        gate_up_bias: Biases of gate and up, if the family has them.
        down_bias: Bias of the down projection, if the family has it.
    """

    gate_up: TensorSource
    down: TensorSource
    gate_up_bias: TensorSource | None = None
    down_bias: TensorSource | None = None

    def sources(self) -> tuple[TensorSource, ...]:
        """All sources that exist."""
        every = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return tuple(source for source in every if source is not None)
