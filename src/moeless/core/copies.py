"""Copies: how often a plan has one expert on one device.

Most planners never have an expert twice on a device. Those with fixed slots may (EPLB): the
device then takes as many shares of the expert's tokens as it has copies, if the splitter divides
by copies. A function is loaded once per device all the same: copies are a matter of plans, shares
and slots; what is warm, and where tokens can go, is yes or no.
"""

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import ReplicaArray
from moeless.core.ports import Splitter

_ONE = np.uint8(1)


def divides_by_copies(splitter: Splitter) -> bool:
    """Whether a splitter wants the copies of each usable replica, not only which are usable.

    Splitters say so with a true attribute of that name; without it, they do not.
    """
    return bool(getattr(splitter, "divides_by_copies", False))


def copies_held_ED(
    held_ED: NDArray[np.bool_] | ReplicaArray, planned_ED: ReplicaArray
) -> ReplicaArray:
    """Copies behind each replica, uint8 [E, D]: as many as planned, or one where none is.

    Args:
        held_ED: Replicas, for example the usable ones; bool, or uint8 of 0 and 1 [E, D].
        planned_ED: Copies in the plan in force, uint8 [E, D].
    """
    copies: ReplicaArray = np.multiply(held_ED, np.maximum(planned_ED, _ONE), dtype=np.uint8)
    return copies
