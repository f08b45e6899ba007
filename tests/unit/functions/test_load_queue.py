"""Wishes come in the order in which they are needed, whatever was put in and taken out before."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from moeless.core.model import FunctionId
from moeless.functions.pool.load_queue import LoadQueue, Wanted

LAYERS = 3

functions = st.builds(
    FunctionId, st.sampled_from(["a", "b"]), st.integers(0, LAYERS - 1), st.integers(0, 3)
)
wishes = st.builds(
    Wanted,
    num_bytes=st.integers(1, 3),
    load_tokens=st.sampled_from([0.0, 1.0, 2.5]),
    blocking=st.booleans(),
    spare=st.booleans(),
)
changes = st.one_of(
    st.tuples(st.just("put"), functions, wishes),
    st.tuples(st.just("remove"), functions),
    st.tuples(st.just("drop_model"), st.sampled_from(["a", "b"])),
    st.tuples(st.just("drop_larger"), st.integers(1, 3)),
    st.tuples(st.just("clear")),
    st.tuples(st.just("run"), st.sampled_from(["a", "b"]), st.integers(-1, LAYERS - 1)),
    st.tuples(st.just("wait"), functions, st.integers(0, 3)),
    st.tuples(st.just("take"), st.integers(1, 4)),
)


class Order:
    """Layers take turns."""

    def __init__(self):
        self.running, self.places = {"a": -1, "b": -1}, {}

    def moment(self):
        return list(self.running.values())

    def needed_in(self, function):
        return (function.layer - self.running[function.model]) % LAYERS or LAYERS

    def waits_since(self, function):
        return self.places.get(function, 9)


@given(st.lists(changes, max_size=40))
def test_the_order_is_that_of_sorting_all_wishes_anew(script):
    order, known = Order(), {}
    queue = LoadQueue(order)

    def urgency(function):
        wanted = known[function]
        return (
            order.waits_since(function) if wanted.blocking else sys.maxsize,
            wanted.spare,
            order.needed_in(function),
            -wanted.load_tokens,
            function,
        )

    for kind, *what in script:
        match kind:
            case "put":
                queue.put(*what)
                known[what[0]] = what[1]
            case "remove":
                if known.pop(what[0], None) is not None:
                    queue.remove(what[0])
            case "drop_model":
                queue.drop_model(what[0])
                known = {f: w for f, w in known.items() if f.model != what[0]}
            case "drop_larger":
                queue.drop_larger(what[0])
                known = {f: w for f, w in known.items() if w.num_bytes <= what[0]}
            case "clear":
                queue.clear()
                known = {}
            case "run":
                order.running[what[0]] = what[1]
            case "wait":
                order.places[what[0]] = what[1]
            case "take":  # each is taken out as it comes
                expected = sorted(known, key=urgency)[: what[0]]
                for function, (found, wanted) in zip(
                    expected, queue.most_urgent_first(), strict=False
                ):
                    assert (found, wanted) == (function, known.pop(function))
                    queue.remove(function)
        assert list(queue.most_urgent_first()) == [
            (function, known[function]) for function in sorted(known, key=urgency)
        ]
        assert bool(queue) == bool(known)
        assert all(queue.get(function) == wanted for function, wanted in known.items())


def test_wishes_can_be_taken_out_while_they_are_looked_at():
    order = Order()
    queue = LoadQueue(order)
    wanted = Wanted(num_bytes=1, load_tokens=1.0, blocking=False, spare=False)
    for layer in range(LAYERS):
        for expert in range(3):
            queue.put(FunctionId("a", layer, expert), wanted)
            queue.put(FunctionId("b", layer, expert), wanted)
    seen = []
    for function, _ in queue.most_urgent_first():
        seen.append(function)
        for expert in (0, 2):
            passed = FunctionId("b", function.layer, expert)
            if queue.get(passed) is not None:
                queue.remove(passed)
    assert [(f.layer, f.model, f.expert) for f in seen] == [
        (layer, *place)
        for layer in range(LAYERS)
        for place in [("a", 0), ("a", 1), ("a", 2), ("b", 1)]
    ]
