"""What is to be loaded onto one device, and in which order.

Pure bookkeeping, single-threaded. It must not know budgets, processes, sockets or torch.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from moeless.core.model import FunctionId
from moeless.functions.pool_order import PoolOrder


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One wish.

    Args:
        num_bytes: Bytes that the instance will hold.
        load_tokens: Tokens expected; among functions needed at the same time the most loaded goes
            first.
        blocking: A token waits: loaded before everything else.
        spare: Another copy is warm or will be: loaded after all that has none.
    """

    num_bytes: int
    load_tokens: float
    blocking: bool
    spare: bool


class LoadQueue:
    """Wishes that have not been acted on.

    Args:
        order: Says when functions are needed, and who waits for how long.
    """

    def __init__(self, order: PoolOrder) -> None:
        self._order = order
        self._wanted: dict[FunctionId, Wanted] = {}
        self._sorted: list[tuple[FunctionId, Wanted]] | None = None
        self._begin = 0
        self._moment: object = None

    def __bool__(self) -> bool:
        """Whether anything is wanted."""
        return bool(self._wanted)

    def get(self, function: FunctionId) -> Wanted | None:
        """The wish for a function, if there is one."""
        return self._wanted.get(function)

    def put(self, function: FunctionId, wanted: Wanted) -> None:
        """Note a wish, in place of an earlier one for the function."""
        self._wanted[function] = wanted
        self._sorted = None

    def remove(self, function: FunctionId) -> None:
        """Take out a wish, which there must be: it is withdrawn, or acted on."""
        del self._wanted[function]

    def drop_model(self, model: str) -> None:
        """Take out all wishes for a model's functions."""
        for function in [f for f in self._wanted if f.model == model]:
            del self._wanted[function]

    def drop_larger(self, num_bytes: int) -> None:
        """Take out wishes for instances of more bytes than that."""
        self._wanted = {f: w for f, w in self._wanted.items() if w.num_bytes <= num_bytes}
        self._sorted = None

    def clear(self) -> None:
        """Take out everything."""
        self._wanted.clear()

    def most_urgent_first(self) -> Iterator[tuple[FunctionId, Wanted]]:
        """All wishes but those that are taken out meanwhile.

        The order is kept from call to call: a model's first loads are many, and issued two at a
        time.
        """
        queue = self._sort()
        for place in range(self._begin, len(queue)):
            function, wanted = queue[place]
            if self._wanted.get(function) is wanted:
                yield function, wanted
            else:  # taken out since it was sorted
                self._begin += place == self._begin

    def _sort(self) -> list[tuple[FunctionId, Wanted]]:
        moment = self._order.moment()
        if self._sorted is None or moment != self._moment:
            self._sorted = sorted(self._wanted.items(), key=self._urgency)
            self._moment = moment
            self._begin = 0
        return self._sorted

    def _urgency(
        self, item: tuple[FunctionId, Wanted]
    ) -> tuple[int, bool, int, float, FunctionId]:
        function, wanted = item
        # Whose tokens wait comes before all else, the longest wait first.
        place = self._order.waits_since(function) if wanted.blocking else sys.maxsize
        needed_in = self._order.needed_in(function)
        return (place, wanted.spare, needed_in, -wanted.load_tokens, function)
