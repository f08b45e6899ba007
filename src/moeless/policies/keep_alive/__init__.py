"""Keep-alive rules: how long an idle instance stays warm."""

from moeless.core.ports import KeepAlive
from moeless.policies.registry import Registry

KEEP_ALIVES: Registry[KeepAlive] = Registry(
    "keep_alive",
    {
        "fixed": "moeless.policies.keep_alive.fixed:FixedKeepAlive",
        "histogram": "moeless.policies.keep_alive.histogram:HistogramKeepAlive",
    },
)
