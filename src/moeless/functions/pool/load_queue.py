"""What is to be loaded onto one device, and in which order.

Pure bookkeeping, single-threaded. It must not know budgets, processes, sockets or torch.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from moeless.core.model import FunctionId
from moeless.functions.pool.pool_order import PoolOrder


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


class _Turn:
    """Wishes for functions of one layer that are needed at the same time, none by a token yet."""

    def __init__(self) -> None:
        self.wanted: dict[FunctionId, Wanted] = {}
        self._sorted: list[tuple[FunctionId, Wanted]] | None = None
        self._begin = 0

    def put(self, function: FunctionId, wanted: Wanted) -> None:
        self.wanted[function] = wanted
        self._sorted = None

    def most_urgent_first(self) -> Iterator[tuple[FunctionId, Wanted]]:
        if self._sorted is None:
            self._sorted = sorted(self.wanted.items(), key=_by_load)
            self._begin = 0
        queue = self._sorted
        for place in range(self._begin, len(queue)):
            function, wanted = queue[place]
            if self.wanted.get(function) is wanted:
                yield function, wanted
            else:  # taken out since it was sorted
                self._begin += place == self._begin


class LoadQueue:
    """Wishes that have not been acted on.

    A model's first loads are many, are issued a few at a time, and layers take turns meanwhile:
    so wishes are kept by layer, and only the layers are put in order again.

    Args:
        order: Says when functions are needed, and who waits for how long.
    """

    def __init__(self, order: PoolOrder) -> None:
        self._order = order
        self._wanted: dict[FunctionId, Wanted] = {}
        self._waited_for: dict[FunctionId, Wanted] = {}
        self._turns: dict[tuple[str, int, bool], _Turn] = {}  # by model, layer, spare
        self._sorted: list[list[_Turn]] | None = None
        self._moment: object = None

    def __bool__(self) -> bool:
        """Whether anything is wanted."""
        return bool(self._wanted)

    def get(self, function: FunctionId) -> Wanted | None:
        """The wish for a function, if there is one."""
        return self._wanted.get(function)

    def put(self, function: FunctionId, wanted: Wanted) -> None:
        """Note a wish, in place of an earlier one for the function."""
        known = self._wanted.get(function)
        if known == wanted:
            return
        if known is not None:
            self.remove(function)
        self._wanted[function] = wanted
        if wanted.blocking:
            self._waited_for[function] = wanted
            return
        key = function.model, function.layer, wanted.spare
        if key not in self._turns:
            self._turns[key] = _Turn()
            self._sorted = None
        self._turns[key].put(function, wanted)

    def remove(self, function: FunctionId) -> None:
        """Take out a wish, which there must be: it is withdrawn, or acted on."""
        wanted = self._wanted.pop(function)
        if wanted.blocking:
            del self._waited_for[function]
        else:
            del self._turns[function.model, function.layer, wanted.spare].wanted[function]

    def drop_model(self, model: str) -> None:
        """Take out all wishes for a model's functions."""
        for function in [f for f in self._wanted if f.model == model]:
            self.remove(function)

    def drop_larger(self, num_bytes: int) -> None:
        """Take out wishes for instances of more bytes than that."""
        for function in [f for f, w in self._wanted.items() if w.num_bytes > num_bytes]:
            self.remove(function)

    def clear(self) -> None:
        """Take out everything."""
        self._wanted.clear()
        self._waited_for.clear()
        self._turns.clear()
        self._sorted = None

    def most_urgent_first(self) -> Iterator[tuple[FunctionId, Wanted]]:
        """All wishes but those that are taken out meanwhile; none may be added."""
        for function, wanted in self._in_turn():
            if self._wanted.get(function) is wanted:
                yield function, wanted

    def _in_turn(self) -> Iterator[tuple[FunctionId, Wanted]]:
        yield from sorted(self._waited_for.items(), key=self._by_wait)
        for turns in self._sorted_turns():
            queues = [turn.most_urgent_first() for turn in turns]
            yield from queues[0] if len(queues) == 1 else heapq.merge(*queues, key=_by_load)

    def _sorted_turns(self) -> list[list[_Turn]]:
        """Those of layers that are needed at the same time together."""
        moment = self._order.moment()
        if self._sorted is None or moment != self._moment:
            self._turns = {key: turn for key, turn in self._turns.items() if turn.wanted}
            needed: dict[tuple[bool, int], list[_Turn]] = {}
            for (_, _, spare), turn in self._turns.items():
                needed_in = self._order.needed_in(next(iter(turn.wanted)))
                needed.setdefault((spare, needed_in), []).append(turn)
            self._sorted = [needed[key] for key in sorted(needed)]
            self._moment = moment
        return self._sorted

    def _by_wait(
        self, item: tuple[FunctionId, Wanted]
    ) -> tuple[int, bool, int, float, FunctionId]:
        function, wanted = item
        # Whose tokens wait comes before all else, the longest wait first.
        place, needed_in = self._order.waits_since(function), self._order.needed_in(function)
        return (place, wanted.spare, needed_in, *_by_load(item))


def _by_load(item: tuple[FunctionId, Wanted]) -> tuple[float, FunctionId]:
    function, wanted = item
    return -wanted.load_tokens, function
