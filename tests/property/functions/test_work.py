"""Whatever comes back from the devices, every assignment row is computed exactly once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from effort import drawn
from moeless.functions.links.segment_status import FAILED, NOT_WARM, OK
from moeless.functions.token_path.open_work import OpenWork
from moeless.policies.splitters.even import EvenSplitter


@drawn(300)
@given(
    data=st.data(),
    num_devices=st.integers(1, 4),
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
def test_rows_are_computed_once_in_the_end(data, num_devices, counts):
    count_E = np.array(counts, dtype=np.int64)
    before_E = count_E.copy()
    start_E = np.cumsum(count_E) - count_E
    work = OpenWork(count_E, num_devices)
    done_S = np.zeros(count_E.sum(), dtype=int)
    rounds = 0
    while work.is_open:
        rounds += 1
        assert rounds < 500, "no progress"
        remaining_E = [
            int((done_S[start : start + n] == 0).sum())
            for start, n in zip(start_E, counts, strict=True)
        ]
        assert work.open_E.tolist() == remaining_E
        usable_ED = (
            np.array(
                data.draw(
                    st.lists(
                        st.lists(st.booleans(), min_size=num_devices, max_size=num_devices),
                        min_size=len(counts),
                        max_size=len(counts),
                    )
                )
            )
            & ~work.failed_ED
        )
        if rounds > 20:  # the devices have come to their senses
            usable_ED[:] = True
            work.failed_ED[:] = False
        ready_E = np.where(usable_ED.any(axis=1), work.open_E, 0)
        share_ED = EvenSplitter().split(ready_E, usable_ED)
        segments = work.segments(share_ED)
        status = []
        for device, segments_n3 in enumerate(segments):
            assert segments_n3.dtype == np.int32
            states = []
            for expert, start, stop in segments_n3.tolist():
                assert usable_ED[expert, device]
                assert start_E[expert] <= start < stop <= start_E[expert] + counts[expert]
                assert (done_S[start:stop] == 0).all(), "computed already"
                state = (
                    OK if rounds > 20 else data.draw(st.sampled_from([OK, OK, NOT_WARM, FAILED]))
                )
                done_S[start:stop] += state == OK
                states.append(state)
            experts = segments_n3[:, 0].tolist()
            assert experts == sorted(set(experts)), "one segment per expert and device"
            status.append(np.array(states, dtype=np.uint8))
        handed_out = sum(int((s[:, 2] - s[:, 1]).sum()) for s in segments)
        work.close(segments, status, complete=handed_out == sum(remaining_E))
        for device, (segments_n3, states) in enumerate(zip(segments, status, strict=True)):
            for expert, state in zip(segments_n3[:, 0], states, strict=True):
                assert state != FAILED or work.failed_ED[expert, device]
    assert (done_S == 1).all()
    assert (before_E == count_E).all()
