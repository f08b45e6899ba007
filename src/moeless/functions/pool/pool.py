"""The pool of one device: which instances it holds, loads and gives up.

Pure bookkeeping: it decides what to load and what to evict, somebody else (a worker) does it and
reports back. The budget is kept to the byte: bytes count from the moment a load is issued until
its eviction has been confirmed. Only a budget that was made smaller is exceeded until what has
to leave has left. It must not know processes, sockets or torch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from moeless.core.model import FunctionId
from moeless.errors import BudgetError
from moeless.functions.pool.lifecycle import Instance, State, Step
from moeless.functions.pool.load_limits import ONE_BY_ONE, LoadLimits
from moeless.functions.pool.load_queue import LoadQueue, Wanted
from moeless.functions.pool.pool_order import PoolOrder


@dataclass(frozen=True, kw_only=True)
class Load:
    """An order to load a function."""

    function: FunctionId


@dataclass(frozen=True, kw_only=True)
class Evict:
    """An order to evict a function."""

    function: FunctionId
    reason: str


class DevicePool:
    """Instances of one device under a byte budget.

    Args:
        device: Device index.
        budget_bytes: Bytes that instances may hold at any time.
        order: Ranks functions for loading and eviction.
        limits: Of loads under way at once.
    """

    def __init__(
        self,
        *,
        device: int,
        budget_bytes: int,
        order: PoolOrder,
        limits: LoadLimits = ONE_BY_ONE,
    ) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self._order = order
        self._limits = limits
        self._instances: dict[FunctionId, Instance] = {}
        self._queue = LoadQueue(order)
        self._held_bytes = 0
        self._bytes_of: Counter[str] = Counter()
        self._draining_bytes = 0
        self._num_loading = 0
        self._loading_bytes = 0
        self._num_draining = 0

    @property
    def num_draining(self) -> int:
        """Instances whose eviction has not been confirmed."""
        return self._num_draining

    @property
    def held_bytes(self) -> int:
        """Bytes of all instances that are loading, warm, busy or draining."""
        return self._held_bytes

    def bytes_of(self, model: str) -> int:
        """Bytes of a model's instances that are loading, warm or busy."""
        return self._bytes_of[model]

    @property
    def free_bytes(self) -> int:
        """Bytes that loads may take once evictions under way have ended; negative if none."""
        return self.budget_bytes - self._held_bytes + self._draining_bytes

    def resize(self, budget_bytes: int) -> None:
        """Keep to another budget from now on.

        Nothing is loaded while more is held; what has to leave is for the owner to evict. Wishes
        that the budget cannot hold are withdrawn, those that tokens wait for included.
        """
        self.budget_bytes = budget_bytes
        self._queue.drop_larger(budget_bytes)

    def fitting(self) -> tuple[set[FunctionId], int]:
        """The wishes that free bytes suffice for, the most urgent first, and the bytes left."""
        left = self.free_bytes
        fits: set[FunctionId] = set()
        for function, wanted in self._queue.most_urgent_first():
            if wanted.num_bytes > left:
                return fits, 0
            left -= wanted.num_bytes
            fits.add(function)
        return fits, max(0, left)

    def instances(self) -> Iterable[Instance]:
        """All instances that are not cold."""
        return self._instances.values()

    def instance(self, function: FunctionId) -> Instance:
        """The function's instance, which must not be cold."""
        return self._instances[function]

    def state(self, function: FunctionId) -> State:
        """The function's state on this device."""
        instance = self._instances.get(function)
        return instance.state if instance else State.COLD

    def want(
        self,
        function: FunctionId,
        *,
        num_bytes: int,
        load_tokens: float = 0.0,
        blocking: bool = False,
        spare: bool = False,
    ) -> None:
        """Ask that a function become warm.

        Args:
            function: Which function.
            num_bytes: Bytes it will hold.
            load_tokens: Tokens expected; among functions needed at the same time the most loaded
                goes first.
            blocking: A token waits: loaded before everything else.
            spare: Another copy is warm or will be: loaded after all that has none.

        Raises:
            BudgetError: The function alone is larger than the budget.
        """
        instance = self._instances.get(function)
        if instance is not None and instance.state is not State.DRAINING:
            instance.blocking |= blocking
            return
        if num_bytes > self.budget_bytes:
            raise BudgetError(
                f"device {self.device}: {function} needs {num_bytes} bytes, "
                f"the budget is {self.budget_bytes}"
            )
        known = self._queue.get(function)
        blocking = blocking or (known is not None and known.blocking)
        wanted = Wanted(
            num_bytes=num_bytes, load_tokens=load_tokens, blocking=blocking, spare=spare
        )
        self._queue.put(function, wanted)

    def wants(self, function: FunctionId, *, first: bool = False) -> bool:
        """Whether the function is to be loaded and its load has not begun.

        Args:
            function: Which function.
            first: Only as the first copy, not as a spare one.
        """
        wanted = self._queue.get(function)
        return wanted is not None and not (first and wanted.spare)

    def unwant(self, function: FunctionId, *, blocking: bool = False) -> None:
        """Withdraw a wish that has not been acted on.

        Args:
            function: Which function.
            blocking: Withdraws a wish that tokens wait for, and only such a one; otherwise only
                one that no token waits for.
        """
        known = self._queue.get(function)
        if known is not None and known.blocking == blocking:
            self._queue.remove(function)

    def unwant_model(self, model: str) -> None:
        """Withdraw all wishes for a model's functions."""
        self._queue.drop_model(model)

    def advance(self, *, now_s: float) -> list[Load | Evict]:
        """Decide what to do next; the caller carries the orders out and reports back.

        Returns:
            Orders, to be carried out in this order.
        """
        orders: list[Load | Evict] = []
        if not self._queue or not self._admits(1):
            return orders
        waiting: set[str] = set()  # models whose most urgent load has no room
        for function, wanted in self._queue.most_urgent_first():
            if not self._admits(wanted.num_bytes):
                break
            if function.model in waiting:
                continue
            if function in self._instances:  # still draining
                if wanted.blocking:
                    break
                continue
            short = self._held_bytes + wanted.num_bytes - self.budget_bytes
            if short > 0:
                if self._num_loading >= self._limits.loads:
                    break  # only free room has more loads under way than that
                evictions = self._make_room(function, short, wanted, now_s=now_s)
                if evictions is not None or wanted.blocking:
                    orders += evictions or []
                    break  # wait for room before anything less urgent
                waiting.add(function.model)  # for better times; others may have room
                continue
            instance = Instance(
                function=function,
                device=self.device,
                num_bytes=wanted.num_bytes,
                blocking=wanted.blocking,
            )
            instance.take(Step.LOAD, now_s=now_s)
            self._num_loading += 1
            self._loading_bytes += wanted.num_bytes
            self._instances[function] = instance
            self._held_bytes += wanted.num_bytes
            self._bytes_of[function.model] += wanted.num_bytes
            self._queue.remove(function)
            orders.append(Load(function=function))
        return orders

    def evict(self, function: FunctionId, *, reason: str, now_s: float) -> list[Load | Evict]:
        """Give up a warm instance; anything else stays as it is."""
        instance = self._instances.get(function)
        if instance is None or instance.state is not State.WARM:
            return []
        instance.take(Step.DRAIN, now_s=now_s)
        self._num_draining += 1
        self._bytes_of[function.model] -= instance.num_bytes
        self._draining_bytes += instance.num_bytes
        return [Evict(function=function, reason=reason)]

    def loaded(self, function: FunctionId, *, now_s: float) -> Instance:
        """A load has ended well."""
        instance = self._instances[function]
        instance.take(Step.LOADED, now_s=now_s)
        self._num_loading -= 1
        self._loading_bytes -= instance.num_bytes
        return instance

    def failed(self, function: FunctionId, *, now_s: float) -> Instance:
        """A load has failed; its bytes are free again."""
        return self._drop(function, Step.FAILED, now_s=now_s)

    def evicted(self, function: FunctionId, *, now_s: float) -> Instance:
        """An eviction has been carried out; its bytes are free again."""
        return self._drop(function, Step.EVICTED, now_s=now_s)

    def used(self, function: FunctionId, *, finished_s: float) -> None:
        """An invocation began and finished on a warm instance; from then on it is idle."""
        instance = self._instances.get(function)
        if instance is not None and instance.state is State.WARM:
            instance.take(Step.BEGIN, now_s=finished_s)
            instance.take(Step.FINISH, now_s=finished_s)

    def lost(self, *, now_s: float) -> list[Instance]:
        """The device is gone, and all its instances with it."""
        gone = [self._drop(function, Step.LOST, now_s=now_s) for function in [*self._instances]]
        self._queue.clear()
        return gone

    def expired(
        self, keep_s: Callable[[FunctionId, float], float], *, now_s: float
    ) -> list[Instance]:
        """Warm instances that have been idle for longer than they are kept.

        Args:
            keep_s: Seconds to keep a function that has been idle for the given seconds.
            now_s: The time.
        """
        return [
            instance
            for instance in self._instances.values()
            if instance.state is State.WARM
            and (idle_s := now_s - instance.idle_since_s) >= keep_s(instance.function, idle_s)
        ]

    def _admits(self, num_bytes: int) -> bool:
        return self._limits.admits(
            num_bytes, under_way=self._num_loading, under_way_bytes=self._loading_bytes
        )

    def _make_room(
        self, function: FunctionId, short_bytes: int, wanted: Wanted, *, now_s: float
    ) -> list[Load | Evict] | None:
        """Evictions that make room together with those under way; None if there are not enough."""
        short_bytes -= self._draining_bytes
        victims: list[Instance] = []
        if short_bytes > 0:
            candidates = sorted(
                (i for i in self._instances.values() if i.state is State.WARM),
                key=lambda i: (self._order.worth(i), i.function),
            )
            leaving: Counter[str] = Counter()
            while short_bytes > 0:
                victim = self._choose_victim(candidates, function, wanted, leaving)
                if victim is None:
                    return None  # evicting some would not be enough: keep them
                candidates.remove(victim)
                victims.append(victim)
                leaving[victim.function.model] += victim.num_bytes
                short_bytes -= victim.num_bytes
        orders: list[Load | Evict] = []
        for victim in victims:
            orders += self.evict(victim.function, reason="room", now_s=now_s)
        return orders

    def _choose_victim(
        self,
        candidates: list[Instance],
        function: FunctionId,
        wanted: Wanted,
        leaving: Mapping[str, int],
    ) -> Instance | None:
        """Of those whose turn it is first the one that is worth least."""
        alone = all(not held or model == function.model for model, held in self._bytes_of.items())
        first, found = None, None
        for candidate in candidates:
            turn = self._order.turn_of(
                candidate, for_load=function, blocking=wanted.blocking, leaving=leaving
            )
            if turn is not None and (first is None or turn < first):
                first, found = turn, candidate
                if alone:  # then turns follow worth
                    break
        return found

    def _drop(self, function: FunctionId, step: Step, *, now_s: float) -> Instance:
        instance = self._instances[function]
        if instance.state is State.LOADING:
            self._num_loading -= 1
            self._loading_bytes -= instance.num_bytes
        if instance.state is State.DRAINING:
            self._num_draining -= 1
            self._draining_bytes -= instance.num_bytes
        else:
            self._bytes_of[function.model] -= instance.num_bytes
        instance.take(step, now_s=now_s)
        del self._instances[function]
        self._held_bytes -= instance.num_bytes
        return instance
