"""Model families: what differs between Mixture-of-Experts architectures, one file each.

A family knows its configuration, the names of its weights in published checkpoints and in what
transformers writes, and where its routers are. It must not know how weights are read or run.
"""

from moeless.engines.transformers.families.base import Family
from moeless.engines.transformers.families.registry import FAMILIES, family_for

__all__ = ["FAMILIES", "Family", "family_for"]
