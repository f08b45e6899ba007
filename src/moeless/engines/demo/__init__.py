"""The demo model: a real small language model, carved into experts on this machine.

Read ``variants`` (shapes), ``source`` (the dense model), ``calibration`` (texts), ``carve`` (the
mathematics of one layer), ``streams`` and ``checkpoint`` (all layers, in order), ``report`` (what
was measured) and ``build`` (cache and order of work).
"""

from moeless.engines.demo.build import Progress, build_demo_model, ensure_demo_model
from moeless.engines.demo.report import DemoReport, read_report
from moeless.engines.demo.variants import STANDARD_VARIANTS, DemoVariant, choose_variant

__all__ = [
    "STANDARD_VARIANTS",
    "DemoReport",
    "DemoVariant",
    "Progress",
    "build_demo_model",
    "choose_variant",
    "ensure_demo_model",
    "read_report",
]
