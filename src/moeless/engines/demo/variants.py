"""Shapes in which the demo model can be carved.

Knows names and arithmetic only: no file, no tensor.
"""

from dataclasses import dataclass
from typing import Final

from moeless.errors import ConfigError

DENSE_INTERMEDIATE_SIZE: Final = 1536
"""Feed-forward neurons per layer of the dense model."""

WIDTH_MULTIPLE: Final = 8
"""Grouped matrix kernels want expert widths that are a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class DemoVariant:
    """How each layer's feed-forward block is divided.

    Args:
        experts: Routed experts per layer (E).
        top_k: Routed experts that each token uses (K).
        shared_fraction: Wanted share of the neurons that go into the shared expert, which every
            token uses. The real share is the nearest one that leaves equal experts whose width
            is a multiple of 8.
        seed: Seed of the clustering.

    Raises:
        ConfigError: If the neurons cannot be divided in this way.
    """

    experts: int = 16
    top_k: int = 8
    shared_fraction: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.experts < 2:
            raise ConfigError(f"experts is {self.experts}; a mixture needs at least 2")
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"top-k is {self.top_k}; choose 1 to {self.experts} (experts)")
        if not 0.0 < self.shared_fraction < 1.0:
            raise ConfigError(
                f"shared-fraction is {self.shared_fraction}; choose a value between 0 and 1"
            )
        if not 0 < self.shared_width < DENSE_INTERMEDIATE_SIZE:
            raise ConfigError(
                f"{self.experts} experts of at least {WIDTH_MULTIPLE} neurons and a shared "
                f"fraction of {self.shared_fraction} need more than the "
                f"{DENSE_INTERMEDIATE_SIZE} neurons of a layer; use fewer experts or another "
                "shared fraction"
            )

    @property
    def expert_width(self) -> int:
        """Neurons of each routed expert."""
        per_expert = DENSE_INTERMEDIATE_SIZE * (1.0 - self.shared_fraction) / self.experts
        return max(1, round(per_expert / WIDTH_MULTIPLE)) * WIDTH_MULTIPLE

    @property
    def shared_width(self) -> int:
        """Neurons of the shared expert."""
        return DENSE_INTERMEDIATE_SIZE - self.experts * self.expert_width

    @property
    def active_fraction(self) -> float:
        """Share of the neurons that one token uses."""
        return (self.shared_width + self.top_k * self.expert_width) / DENSE_INTERMEDIATE_SIZE

    @property
    def name(self) -> str:
        """Directory name in the cache: equal names mean equal weights."""
        name = f"smollm2-135m-e{self.experts}-k{self.top_k}-s{self.shared_width}"
        return name if self.seed == 0 else f"{name}-seed{self.seed}"


STANDARD_VARIANTS: Final[dict[int, DemoVariant]] = {
    8: DemoVariant(experts=8, top_k=6, shared_fraction=0.25),
    16: DemoVariant(experts=16, top_k=8, shared_fraction=0.6),
    32: DemoVariant(experts=32, top_k=12, shared_fraction=0.5),
}
"""The variant that is built for a number of experts when nothing else is said."""


def choose_variant(
    experts: int, *, top_k: int | None = None, shared_fraction: float | None = None, seed: int = 0
) -> DemoVariant:
    """Fill in what the caller left open from the standard variant.

    Args:
        experts: Routed experts per layer: 8, 16 or 32.
        top_k: Routed experts per token; None for the standard.
        shared_fraction: Share of neurons in the shared expert; None for the standard.
        seed: Seed of the clustering.

    Raises:
        ConfigError: If no standard variant has that many experts, or the result is impossible.
    """
    standard = STANDARD_VARIANTS.get(experts)
    if standard is None:
        known = ", ".join(str(e) for e in STANDARD_VARIANTS)
        raise ConfigError(f"experts is {experts}; the demo model comes with {known}")
    return DemoVariant(
        experts=experts,
        top_k=standard.top_k if top_k is None else top_k,
        shared_fraction=standard.shared_fraction if shared_fraction is None else shared_fraction,
        seed=seed,
    )
