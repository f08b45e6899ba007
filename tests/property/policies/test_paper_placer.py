from hypothesis import given
from hypothesis import strategies as st

from moeless.policies.planners.paper_placer import place_replicas


def place_one_by_one(loads, counts, alive, capacity):
    """Algorithm 2 as printed: one replica at a time, no shortcuts."""
    devices = range(len(capacity))
    placed = [[0] * len(capacity) for _ in loads]
    load_D, free = [0.0] * len(capacity), list(capacity)
    replicas = [(loads[e] / counts[e], e, i) for e in range(len(loads)) for i in range(counts[e])]
    missing = len(loads)
    for share, expert, index in sorted(replicas, key=lambda r: (-r[0], r[1])):
        open_D = [d for d in devices if free[d] and not placed[expert][d]]
        if not open_D or (index > 0 and sum(free) <= missing):
            continue
        candidates = [d for d in open_D if alive[expert][d]] or open_D
        device = min(candidates, key=lambda d: (load_D[d], capacity[d] - free[d], d))
        placed[expert][device] = 1
        load_D[device] += share
        free[device] -= 1
        missing -= index == 0
    return placed


@st.composite
def cases(draw):
    experts, devices = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    capacity = draw(st.lists(st.integers(0, experts), min_size=devices, max_size=devices))
    capacity[0] += max(0, experts - sum(capacity))
    loads = draw(st.lists(st.integers(0, 60).map(float), min_size=experts, max_size=experts))
    counts = draw(st.lists(st.integers(1, devices), min_size=experts, max_size=experts))
    row = st.lists(st.integers(0, 1), min_size=devices, max_size=devices)
    alive = draw(st.lists(row, min_size=experts, max_size=experts))
    return loads, counts, alive, capacity


@given(cases())
def test_placing_by_expert_equals_placing_replica_by_replica(case):
    loads, counts, alive, capacity = case
    placed = place_replicas(loads, counts, alive=alive, capacity=capacity)
    expected = place_one_by_one(loads, counts, alive, capacity)
    assert list(placed) == [cell for row in expected for cell in row]
