"""Policies on real worker processes, one thread and one core each."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.bootstrap.serving.control import build_policies, serving_cost
from moeless.bootstrap.serving.experts import ExpertsRuntime, start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.clock import SystemClock
from moeless.core.cluster import parse_devices
from moeless.core.copies import divides_by_copies
from moeless.core.plan import CountArray, LoadArray, ReplicaArray
from moeless.core.ports import Splitter
from moeless.engines.transformers.loader import LoadedModel
from moeless.errors import FunctionError
from moeless.functions.token_path.announcer import ExpectedLoad, LookAhead
from moeless.functions.token_path.dispatch import Answer, ExpertDispatcher, Invoker
from moeless_experiments.measured.workload import IdArray

DEVICES: Final = 2
BETWEEN_S: Final = 1e-3
"""Between two layers of experts the engine computes so long, as for attention: without it plans
would have to be made while workers compute, on a machine without a core to spare."""

_START_S: Final = 120.0


class Sample(NamedTuple):
    """One layer-step.

    Args:
        seconds: From the gate's choice to the layer's output.
        busy_s_D: Seconds that each device computed.
        share_ED: Tokens of each replica.
    """

    seconds: float
    busy_s_D: NDArray[np.float64]
    share_ED: CountArray


class Watch:
    """A splitter and an invoker whose shares and busy times are kept.

    Args:
        splitter: Divides tokens.
        invoker: Reaches instances.
    """

    def __init__(self, splitter: Splitter, invoker: Invoker) -> None:
        self._splitter, self._invoker = splitter, invoker
        self.divides_by_copies = divides_by_copies(splitter)
        self.max_rows = invoker.max_rows
        self.share_ED: CountArray = np.zeros((0, 0), dtype=np.int64)
        self.busy_s_D: NDArray[np.float64] = np.zeros(0)

    def split(
        self, count_E: CountArray, replicas_ED: NDArray[np.bool_] | ReplicaArray
    ) -> CountArray:
        """Divide tokens as the splitter does."""
        self.share_ED = self._splitter.split(count_E, replicas_ED)
        return self.share_ED

    def begin(self, layer: int, **work: Any) -> None:
        """Hand out work as the invoker does."""
        self._invoker.begin(layer, **work)

    def finish(self) -> Answer:
        """Wait as the invoker does."""
        answer = self._invoker.finish()
        self.busy_s_D = np.array(answer.busy_ns, dtype=np.float64) / 1e9
        return answer

    def close(self) -> None:
        """Left to whoever made the invoker."""


@contextmanager
def start_workers(loaded: LoadedModel, policy: PolicyConfig) -> Iterator[ExpertsRuntime]:
    """Workers with all that is planned at first.

    Args:
        loaded: The model.
        policy: How loads become replicas.

    Raises:
        FunctionError: Workers do not start, or experts do not become warm.
    """
    config = ExpertsConfig(
        devices=parse_devices(f"cpu:{DEVICES}"), policy=policy, worker_threads=1
    )
    runtime = start_experts(loaded, config)
    try:
        board, until_s = runtime.client.board, time.monotonic() + _START_S
        while not board.planned_LED.any() or ((board.planned_LED > 0) & ~board.warm_LED).any():
            if time.monotonic() > until_s:
                raise FunctionError(
                    f"experts of {loaded.spec.model_id} did not become warm in {_START_S:.0f} s; "
                    "close what else runs on this machine"
                )
            time.sleep(0.01)
        yield runtime
    finally:
        runtime.close()


class LayerRunner:
    """Has steps computed by workers, layer by layer, as an engine does.

    Args:
        runtime: The workers.
        seed: Of the hidden states.
    """

    def __init__(self, runtime: ExpertsRuntime, *, seed: int) -> None:
        spec, policy = runtime.spec, runtime.config.policy
        cost = serving_cost(spec.expert, ["cpu"] * DEVICES, policy.cost_model)
        splitter = build_policies(policy, cost=cost, clock=SystemClock()).splitter
        self._watch = Watch(splitter, runtime.invoker)
        self._expected_SLE: Sequence[LoadArray] = ()
        self._step = 0
        self._layers, self._top_k = spec.num_layers, spec.top_k
        self._states = draw_states(spec.expert.hidden, spec.expert.dtype, seed)
        self._dispatcher = ExpertDispatcher(
            spec,
            client=runtime.client,
            invoker=self._watch,
            splitter=self._watch,
            look_ahead=LookAhead(distance=1, forecast=self._look_ahead),
        )

    def heed(self, expected_SLE: Sequence[LoadArray]) -> None:
        """From now on go by these expectations of steps' loads, one layer ahead.

        Args:
            expected_SLE: Of every step [L, E].
        """
        self._expected_SLE = expected_SLE

    def run(self, step: int, ids_LTK: IdArray) -> list[Sample]:
        """Run one step; a sample for each layer.

        Args:
            step: Its number, for the forecast.
            ids_LTK: Chosen experts.
        """
        self._step = step
        tokens = ids_LTK.shape[1]
        ids = torch.from_numpy(ids_LTK)
        weights_TK = torch.full((tokens, self._top_k), 1 / self._top_k)
        samples = []
        for layer in range(self._layers):
            self._work_between()
            began_s = time.perf_counter()
            self._dispatcher(layer, self._states[:tokens], ids[layer], weights_TK)
            seconds = time.perf_counter() - began_s
            samples.append(Sample(seconds, self._watch.busy_s_D, self._watch.share_ED))
        return samples

    def _look_ahead(self, layer: int, _x_TH: torch.Tensor) -> ExpectedLoad | None:
        if not self._expected_SLE or layer + 1 >= self._layers:
            return None
        return ExpectedLoad(self._expected_SLE[self._step][layer + 1])

    def _work_between(self) -> None:
        """What the rest of a layer would keep the engine's core busy with."""
        until_s = time.perf_counter() + BETWEEN_S
        while time.perf_counter() < until_s:
            self._states[:16] @ self._states[:16].T


def draw_states(hidden: int, dtype: str, seed: int, tokens: int = 512) -> torch.Tensor:
    """Random hidden states [T, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, hidden, generator=generator).to(getattr(torch, dtype))


@contextmanager
def one_thread() -> Iterator[None]:
    """This process computes with one thread: the workers have the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)
