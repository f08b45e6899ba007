"""The oracle: all devices get as many tokens as they are fast, whatever the gate said.

It is lossy (tokens go to experts that were not chosen) and cannot be served; it only shows what
perfect balance would be worth. It needs no platform: every expert has one replica, always warm.
"""

from collections.abc import Callable

import numpy as np

from moeless.core.plan import CountArray
from moeless.costs.presets import GB
from moeless.simulator.layer_timer import TimeModel
from moeless.simulator.recording import Recording
from moeless.workloads.routing_trace import RoutingTrace


class Oracle:
    """Replays perfect balance.

    Args:
        time_model: How long a layer takes.
        num_devices: D.
        function_bytes: Bytes of one expert.
        misc_s: Simulated seconds of everything but the experts, per layer.

    Source: the MoEless paper, section 6.1, baseline "Oracle". A device's tokens are divided evenly
    over as many experts as static expert parallelism would give it.
    """

    def __init__(
        self,
        *,
        time_model: TimeModel,
        num_devices: int,
        function_bytes: int,
        misc_s: float = 0.0,
    ) -> None:
        self._time_model = time_model
        self._num_devices = num_devices
        self._function_bytes = function_bytes
        self._misc_s = misc_s

    def replay(
        self, trace: RoutingTrace, *, on_step: Callable[[int], None] = lambda _: None
    ) -> Recording:
        """Run a trace of steps.

        Args:
            trace: The steps.
            on_step: Called with each step's index before it starts.
        """
        meta = trace.meta
        assert trace.time_s_N is not None
        recording = Recording.empty(
            steps=len(trace),
            layers=meta.num_layers,
            experts=meta.num_experts,
            devices=self._num_devices,
            keep_replicas=False,
        )
        recording.warm_SL[:] = meta.num_experts
        arrival_s = (trace.time_s_N - trace.time_s_N[0]).tolist()
        # Every token goes to K experts in each layer, so all layers take the same time.
        tokens_S = (trace.tokens_N.astype(np.int64) * meta.top_k).tolist()
        now_s = 0.0
        for step, tokens in enumerate(tokens_S):
            on_step(step)
            now_s = max(arrival_s[step], now_s)
            recording.start_s_S[step] = now_s
            if not tokens:
                continue
            share_WD = self.share_WD(tokens, num_experts=meta.num_experts)
            layer_s = self._time_model.layer_s(share_WD)
            recording.device_tokens_SLD[step] = share_WD.sum(axis=0)
            recording.layer_s_SL[step] = layer_s
            recording.busy_s_SL[step] = self._time_model.device_s(share_WD).sum()
            now_s += meta.num_layers * (layer_s + self._misc_s)
        recording.end_s = now_s
        held_gb = meta.num_layers * meta.num_experts * self._function_bytes / GB
        recording.resident_gb_s_S[:-1] = recording.start_s_S * held_gb
        recording.resident_gb_s_S[-1] = now_s * held_gb
        return recording

    def share_WD(self, tokens: int, *, num_experts: int) -> CountArray:
        """Divide tokens over the devices, and on each over W experts; int64 [W, D]."""
        devices = self._num_devices
        width = max(1, -(-num_experts // devices))
        tokens_D = np.full(devices, tokens // devices, dtype=np.int64)
        cost = self._time_model.cost
        if cost.speeds:
            speed_D = cost.speed_D(devices)
            tokens_D = np.floor(tokens * speed_D / speed_D.sum() * (1 - 1e-12)).astype(np.int64)
        tokens_D[: tokens - int(tokens_D.sum())] += 1
        whole_D, rest_D = np.divmod(tokens_D, width)
        rank_W1 = np.arange(width, dtype=np.int64)[:, None]
        share: CountArray = whole_D[None, :] + (rank_W1 < rest_D[None, :])
        return share
