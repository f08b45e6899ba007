"""What an engine asks for its model when it attaches, beside workers that serve it."""

from dataclasses import asdict, dataclass

from moeless.core.memory_share import MemoryShare
from moeless.core.ports import KeepAlive
from moeless.functions.links.messages import Message
from moeless.policies.keep_alive import KEEP_ALIVES


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """How a model is to be kept.

    Args:
        share: Memory that it is guaranteed.
        keep_alive: How long its idle instances stay; None for the supervisor's rule.
    """

    share: MemoryShare
    keep_alive: KeepAlive | None


def write_wishes(
    *, share: MemoryShare, keep_alive_rule: str | None = None, keep_alive_s: float = 0.0
) -> Message:
    """Fields of an attach request.

    Args:
        share: Memory that the model is guaranteed.
        keep_alive_rule: By name; None for the supervisor's rule and time.
        keep_alive_s: Seconds for it.
    """
    fields: Message = {"share": asdict(share)}
    if keep_alive_rule is not None:
        fields["keep_alive"] = {"rule": keep_alive_rule, "seconds": keep_alive_s}
    return fields


def read_wishes(request: Message) -> Wishes:
    """Read what ``write_wishes`` wrote; what is left out has its default.

    Raises:
        ConfigError: A value is out of range, or no such rule.
    """
    given = request.get("share") or {}
    share = MemoryShare(
        fraction=float(given.get("fraction", 0.0)), num_bytes=int(given.get("num_bytes", 0))
    )
    rule = request.get("keep_alive")
    keep_alive = None
    if rule is not None:
        keep_alive = KEEP_ALIVES.create(str(rule["rule"]), seconds=float(rule["seconds"]))
    return Wishes(share=share, keep_alive=keep_alive)
