"""Experts that nobody uses leave, and come back with the next request as they were."""

import pytest

from moeless.config import PolicyConfig


@pytest.mark.parametrize("wake_ahead", [True, False])
def test_idle_experts_leave_and_the_next_request_gets_the_same_tokens(
    wake_ahead, serve, reference, tokens_of, wait_until
):
    directory, expected = reference
    policy = PolicyConfig(wake_ahead=wake_ahead)
    served = serve(directory, policy=policy, keep_alive_s=0.3)
    for _ in range(2):
        assert tokens_of(served.model) == expected
        assert sum(served.client.report()["resident_bytes_D"]) > 0
        wait_until(lambda: not any(served.client.report()["resident_bytes_D"]))
        assert not served.client.board.warm_LED.any()
    assert tokens_of(served.model) == expected
    report = served.client.report()
    assert sum(report["cold_starts_L"]) >= 3 * len(report["cold_starts_L"])
    assert report["worker_restarts"] == [0, 0]
    served.close()
