"""The demo models that predictors are held against, by short names."""

from typing import Final

from moeless.engines.demo.variants import STANDARD_VARIANTS, DemoVariant
from moeless_experiments.context import Context

DEMO_MODELS: Final[dict[str, DemoVariant]] = {
    "demo8k6": STANDARD_VARIANTS[8],
    "demo8k2": DemoVariant(experts=8, top_k=2, shared_fraction=0.5),
    "demo16": STANDARD_VARIANTS[16],
    "demo32": STANDARD_VARIANTS[32],
}
"""8 experts top-6, 8 top-2, 16 top-8, 32 top-12; all of 30 layers and hidden size 576."""

QUICK_MODELS: Final = ("demo16",)


def chosen_models(context: Context) -> tuple[str, ...]:
    """Names of the models of a run."""
    return QUICK_MODELS if context.quick else tuple(DEMO_MODELS)
