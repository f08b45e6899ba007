"""Splitters: true token counts divided over warm replicas, on the token path."""

from moeless.core.ports import Splitter
from moeless.policies.registry import Registry

SPLITTERS: Registry[Splitter] = Registry(
    "splitter",
    {
        "even": "moeless.policies.splitters.even:EvenSplitter",
        "slots": "moeless.policies.splitters.slots:SlotSplitter",
        "min_time": "moeless.policies.splitters.min_time:MinTimeSplitter",
    },
)
