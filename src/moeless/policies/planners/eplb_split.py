"""Divides tokens over slots, the way systems with EPLB do."""

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray
from moeless.errors import PlanError


class SlotSplitter:
    """Equal shares per slot: a device that holds an expert in two slots gets two shares.

    What EPLB's own balance rests on. Given 0 and 1 it divides as the splitter ``even`` does. Whole
    shares first; then the tokens left over go, expert by expert in index order, to the slots on
    the devices with the fewest tokens so far (ties: lowest index).
    """

    def split(self, count_E: CountArray, replicas_ED: NDArray[np.generic]) -> CountArray:
        """Divide tokens.

        Args:
            count_E: Tokens routed to each expert, int64 [E], not negative.
            replicas_ED: Usable slots of each device per expert [E, D], for example the
                ``copies_ED`` of an ``EplbPlan`` where they are warm, or bool.

        Returns:
            Tokens of each device, int64 [E, D]; rows sum to ``count_E``, zero off the slots.

        Raises:
            PlanError: A negative count, or tokens for an expert without a slot.
        """
        copies_ED = replicas_ED.astype(np.int64)
        slots_E = copies_ED.sum(axis=1)
        wrong = np.flatnonzero((count_E < 0) | ((count_E > 0) & (slots_E == 0)))
        if wrong.size:
            expert = int(wrong[0])
            raise PlanError(
                f"expert {expert}: {count_E[expert]} tokens for {slots_E[expert]} usable slots; "
                f"counts are not negative, and an expert with tokens needs a slot"
            )
        whole_E, left_E = np.divmod(count_E, np.maximum(slots_E, 1))
        share_ED: CountArray = whole_E[:, None] * copies_ED
        tokens: list[int] = share_ED.sum(axis=0).tolist()
        for expert in left_E.nonzero()[0].tolist():
            slots = np.repeat(np.arange(len(tokens)), copies_ED[expert]).tolist()
            # sorted is stable, so equally loaded devices stay in index order.
            for device in sorted(slots, key=tokens.__getitem__)[: left_E[expert]]:
                share_ED[expert, device] += 1
                tokens[device] += 1
        return share_ED
