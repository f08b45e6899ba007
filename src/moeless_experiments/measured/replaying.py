"""The simulator on a workload's steps: times, and every decision on who computes what."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeless.bootstrap.policies import PolicyOptions, build_policy_set, max_replicas
from moeless.core.copies import divides_by_copies
from moeless.core.layer_cost import LayerCost
from moeless.core.model import ExpertShape
from moeless.core.plan import CountArray, ReplicaArray
from moeless.core.ports import Splitter
from moeless.costs.linear import LinearTime
from moeless.policies.keep_alive import KEEP_ALIVES
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import NoisyForecast
from moeless.simulator.replay import ReplayConfig, replay_policy
from moeless.workloads.routing_trace import RoutingTrace

SIGMA: Final = 0.12
MEMORY_FACTOR: Final = 1.5
EPLB_INTERVAL_S: Final = 1.0
"""Every twenty steps: in ten minutes' time these traces would be over."""

_LOAD_BYTES_PER_S: Final = 4e9
"""What reading an expert from the page cache takes here."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
    """One policy on a trace of S steps.

    Args:
        layer_s_SL: Simulated seconds of each layer-step.
        share_SLED: Tokens of each replica, int64 [S, L, E, D].
        blocked_SL: Whether tokens waited for a load.
    """

    layer_s_SL: NDArray[np.float64]
    share_SLED: CountArray
    blocked_SL: NDArray[np.bool_]


class KeepingSplitter:
    """A splitter whose shares are kept, layer-step by layer-step.

    Args:
        splitter: Divides tokens.
        total_SL: Assignments of each layer-step: where some experts have to be loaded first a
            layer is split in several rounds.
    """

    def __init__(self, splitter: Splitter, total_SL: CountArray) -> None:
        self._splitter = splitter
        self.divides_by_copies = divides_by_copies(splitter)
        self._open = iter(total_SL.ravel().tolist())
        self._left = 0
        self.shares: list[CountArray] = []

    def split(
        self, count_E: CountArray, replicas_ED: NDArray[np.bool_] | ReplicaArray
    ) -> CountArray:
        """Divide tokens as the splitter does."""
        share_ED = self._splitter.split(count_E, replicas_ED)
        if self._left == 0:
            self._left = next(self._open)
            self.shares.append(np.zeros_like(share_ED))
        self.shares[-1] = self.shares[-1] + share_ED
        self._left -= int(share_ED.sum())
        return share_ED


def replay_shares(
    trace: RoutingTrace,
    policy: str,
    *,
    devices: int,
    cost: LayerCost,
    expert: ExpertShape,
    seed: int,
    on_step: Callable[[int], None] = lambda _: None,
) -> Replayed:
    """Replay steps under a policy, and keep who computes what.

    Args:
        trace: The steps, none of them empty.
        policy: By name.
        devices: D.
        cost: The time model.
        expert: Shape of every expert.
        seed: Of the forecasts' noise.
        on_step: Called with each step's index before it starts.

    Raises:
        MoelessError: The policy cannot be run.
    """
    clock = SimulatedClock()
    options = PolicyOptions(memory_factor=MEMORY_FACTOR, eplb_interval_s=EPLB_INTERVAL_S)
    policies = build_policy_set(policy, cost=cost, options=options, clock=clock)
    splitter = KeepingSplitter(policies.splitter, trace.loads_NLE.sum(axis=2).astype(np.int64))
    layers, experts = trace.meta.num_layers, trace.meta.num_experts
    recording = replay_policy(
        trace,
        replace(policies, splitter=splitter),
        clock=clock,
        time_model=LinearTime(cost=cost, label="measured here"),
        forecast=NoisyForecast(trace.loads_NLE, sigma=SIGMA, seed=seed),
        keep_alive=KEEP_ALIVES.create("fixed", seconds=300.0),
        config=ReplayConfig(
            num_devices=devices,
            device_bytes=layers * experts * expert.num_bytes,
            expert=expert,
            load_s=expert.num_bytes / _LOAD_BYTES_PER_S,
            lookahead=1,
            max_replicas=max_replicas(policy, options, num_experts=experts, num_devices=devices),
        ),
        on_step=on_step,
    )
    return Replayed(
        layer_s_SL=recording.layer_s_SL,
        share_SLED=np.array(splitter.shares).reshape(len(trace), layers, experts, devices),
        blocked_SL=recording.blocking_SL > 0,
    )
