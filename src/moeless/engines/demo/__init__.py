"""The demo model: a real small language model, carved into experts on this machine.

Read ``variants`` (shapes), ``source`` (the dense model), ``calibration`` (texts), ``carve`` (the
mathematics of one layer), ``recipe`` (what of it is shipped, in ``recipes``), ``streams`` and
``checkpoint`` (all layers, in order), ``report`` (what was measured) and ``build`` (cache and
order of work).
"""

from moeless.engines.demo.build import (
    Progress,
    build_demo_model,
    compare_with_shipped,
    ensure_demo_model,
)
from moeless.engines.demo.report import DemoReport, Measurement, read_report
from moeless.engines.demo.variants import STANDARD_VARIANTS, DemoVariant, choose_variant

__all__ = [
    "STANDARD_VARIANTS",
    "DemoReport",
    "DemoVariant",
    "Measurement",
    "Progress",
    "build_demo_model",
    "choose_variant",
    "compare_with_shipped",
    "ensure_demo_model",
    "read_report",
]
