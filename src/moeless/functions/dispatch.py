"""The token path: from a layer's gate to its output.

The dispatcher counts the tokens of each expert, splits them over warm replicas, has them computed
and sums the outputs. It never waits for a plan, and never for a cold replica while a warm one
exists. It must not know how instances are reached (``invokers``) or where the platform runs.
Needs torch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.core.model import ModelSpec
from moeless.core.plan import CountArray
from moeless.core.ports import Splitter
from moeless.errors import FunctionError, UnavailableError
from moeless.functions.client import PlatformClient
from moeless.functions.host import FAILED, OK
from moeless.functions.token_path_stats import TokenPathStats


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back from the devices.

    Args:
        y_SH: Expert outputs, one row per assignment; valid until the next ``begin``.
        status: Per device, a host status per segment.
        busy_ns: Per device, nanoseconds it computed.
    """

    y_SH: torch.Tensor
    status: Sequence[NDArray[np.uint8]]
    busy_ns: Sequence[int]


class Invoker(Protocol):
    """Has segments computed on the devices that hold their experts."""

    max_rows: int

    def begin(
        self,
        layer: int,
        *,
        x_TH: torch.Tensor,
        token_S: torch.Tensor,
        segments: Sequence[NDArray[np.int32]],
        y_SH: torch.Tensor | None = None,
    ) -> None:
        """Hand out work and return at once.

        Args:
            layer: MoE layer.
            x_TH: Input rows, at most ``max_rows``.
            token_S: The input row of each assignment, assignments sorted by expert.
            segments: Per device, (expert, start, stop) in assignments, int32 [n, 3].
            y_SH: The rows an earlier answer of the same layer returned, to be completed.
        """
        ...

    def finish(self) -> Answer:
        """Wait for the work that ``begin`` handed out."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


Forecast = Callable[[int, torch.Tensor], CountArray | None]
"""From (layer, gate input [T, H]) to the expected tokens [E] of layer + d, None past the last."""


class ExpertDispatcher:
    """Runs the routed experts of a model. Called by the engine, from one thread.

    Args:
        spec: The model.
        client: The platform.
        invoker: How instances are reached.
        splitter: Divides tokens over replicas.
        forecast: A look-ahead predictor, or None when loads are predicted from history.
        lookahead: Its distance d.
        load_timeout_s: How long tokens wait for an expert without a warm replica.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        client: PlatformClient,
        invoker: Invoker,
        splitter: Splitter,
        forecast: Forecast | None = None,
        lookahead: int = 0,
        load_timeout_s: float = 120.0,
    ) -> None:
        self._spec = spec
        self._client = client
        self._board = client.board
        self._invoker = invoker
        self._splitter = splitter
        self._forecast = forecast
        self._lookahead = lookahead
        self._load_timeout_s = load_timeout_s
        self._scores_input = spec.expert.score_on == "input"
        self._last_layer = spec.num_layers
        self._step = 0
        self.stats = TokenPathStats(
            spec, num_devices=client.num_devices, function_bytes=client.function_bytes
        )

    def __call__(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Compute a layer's routed experts.

        Args:
            layer: MoE layer.
            x_TH: The experts' input, which is also the gate's.
            ids_TK: Chosen experts, int64.
            weights_TK: Routing weights.

        Returns:
            The weighted sum of the chosen experts' outputs [T, H], dtype of the input.

        Raises:
            UnavailableError: An expert could not be made warm on any device.
            FunctionError: An expert failed everywhere.
        """
        if layer <= self._last_layer:
            self._step += 1
            self._board.step[0] = self._step
        self._last_layer = layer
        if len(x_TH) == 0:
            return torch.zeros_like(x_TH)
        began_s = time.perf_counter()
        ids_S = ids_TK.reshape(-1).cpu().numpy()
        count_E: CountArray = np.bincount(ids_S, minlength=self._spec.num_experts)
        self._board.layer[0] = layer
        usable_ED = self._look_at_plan(layer)
        pieces = [
            self._run(
                layer,
                x_TH[first:last],
                ids_S[first * self._spec.top_k : last * self._spec.top_k],
                weights_TK[first:last],
                usable_ED,
                first,
                count_E,
                x_TH,
            )
            for first, last in self._pieces(len(x_TH))
        ]
        y_TH = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        self.stats.record_layer(
            layer,
            seconds=time.perf_counter() - began_s,
            warm_replicas=int(np.count_nonzero(self._board.warm_LED[layer])),
        )
        return y_TH

    def _pieces(self, rows: int) -> list[tuple[int, int]]:
        step = self._invoker.max_rows
        if self._scores_input:
            step = max(1, step // self._spec.top_k)
        return [(first, min(first + step, rows)) for first in range(0, rows, step)]

    def _look_at_plan(self, layer: int) -> NDArray[np.bool_]:
        """What is planned and warm now; also notes whether the plan was early and warm."""
        planned_ED = self._board.planned_LED[layer].view(np.bool_)
        usable_ED = self._board.warm_LED[layer].view(np.bool_) & planned_ED
        self.stats.record_plan(
            early=not self._client.wants_loads or self._board.plan_step_L[layer] >= self._step,
            planned=int(np.count_nonzero(planned_ED)),
            warm=int(np.count_nonzero(usable_ED)),
        )
        return usable_ED

    def _run(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_S: NDArray[np.int64],
        weights_TK: torch.Tensor,
        usable_ED: NDArray[np.bool_],
        first: int,
        layer_count_E: CountArray,
        layer_x_TH: torch.Tensor,
    ) -> torch.Tensor:
        order_S = np.argsort(ids_S, kind="stable")
        whole = len(ids_S) == layer_count_E.sum()
        count_E = layer_count_E if whole else np.bincount(ids_S, minlength=len(layer_count_E))
        token_S = torch.from_numpy(order_S // self._spec.top_k)
        if self._scores_input:
            weights_S = weights_TK.reshape(-1)[torch.from_numpy(order_S)]
            x_TH = x_TH[token_S] * weights_S[:, None].to(x_TH.dtype)
            token_S = torch.arange(len(order_S))

        work = _Work(count_E)
        y_SH: torch.Tensor | None = None
        announced = first > 0
        while work.open_E.any():
            ticket = self._demand_missing(layer, work, usable_ED)
            share_ED = self._split(layer, work, usable_ED)
            segments = work.segments(share_ED)
            self._invoker.begin(layer, x_TH=x_TH, token_S=token_S, segments=segments, y_SH=y_SH)
            if not announced:
                # The devices are busy now: time to say what was and to look ahead.
                self._announce(layer, layer_count_E, layer_x_TH)
                announced = True
            answer = self._invoker.finish()
            y_SH = answer.y_SH
            self._settle(layer, work, segments, answer)
            if ticket is not None:
                began_s = time.perf_counter()
                self._client.await_demand(ticket, timeout_s=self._load_timeout_s)
                self.stats.record_load_wait(time.perf_counter() - began_s)
            usable_ED = self._board.warm_LED[layer].view(np.bool_) & ~work.failed_ED
        assert y_SH is not None
        return self._combine(order_S, y_SH, weights_TK)

    def _demand_missing(
        self, layer: int, work: "_Work", usable_ED: NDArray[np.bool_]
    ) -> int | None:
        """Fall back on unplanned warm replicas, and demand experts that have none at all."""
        without_E = (work.open_E > 0) & ~usable_ED.any(axis=1)
        if not without_E.any():
            return None
        warm_ED = self._board.warm_LED[layer].view(np.bool_) & ~work.failed_ED
        usable_ED[without_E] = warm_ED[without_E]
        missing = np.flatnonzero(without_E & ~warm_ED.any(axis=1))
        if not len(missing):
            return None
        failed = missing[work.failed_ED[missing].any(axis=1)]
        if len(failed):
            raise FunctionError(f"layer {layer}, expert {failed[0]}: failed on every device")
        work.count_try(layer)
        return self._client.demand(layer=layer, experts=missing.tolist())

    def _split(self, layer: int, work: "_Work", usable_ED: NDArray[np.bool_]) -> CountArray:
        began_s = time.perf_counter()
        ready_E = np.where(usable_ED.any(axis=1), work.open_E, 0)
        share_ED = self._splitter.split(ready_E, usable_ED)
        self.stats.record_split(
            layer, count_E=ready_E, share_ED=share_ED, seconds=time.perf_counter() - began_s
        )
        return share_ED

    def _announce(self, layer: int, count_E: CountArray, x_TH: torch.Tensor) -> None:
        if not self._client.wants_loads:
            return
        board = self._board
        ahead = layer + self._lookahead
        if self._forecast is not None:
            began_s = time.perf_counter()
            expected_E = self._forecast(layer, x_TH)
            if expected_E is not None:
                board.forecast_LE[ahead] = expected_E
                board.forecast_step_L[ahead] = self._step
            self.stats.record_forecast(time.perf_counter() - began_s)
            if board.forecast_step_L[layer] == self._step:
                self.stats.record_accuracy(layer, board.forecast_LE[layer], count_E)
        board.actual_LE[layer] = count_E
        board.actual_step_L[layer] = self._step
        self._client.announce_loads()

    def _settle(
        self,
        layer: int,
        work: "_Work",
        segments: Sequence[NDArray[np.int32]],
        answer: Answer,
    ) -> None:
        """Close what was computed; what was not stays open for another round."""
        now_ns = time.monotonic_ns()
        board = self._board
        for device, (segments_n3, status_n) in enumerate(
            zip(segments, answer.status, strict=True)
        ):
            if not len(segments_n3):
                continue
            done_n = status_n == OK
            experts = segments_n3[done_n, 0]
            tokens = segments_n3[done_n, 2] - segments_n3[done_n, 1]
            board.used_ns_LED[layer, experts, device] = now_ns
            if len(tokens):
                # All experts have the same size, so only the sum over experts matters for
                # billing; sharing the device's time by tokens makes the detail plausible.
                board.busy_ns_LED[layer, experts, device] += (
                    answer.busy_ns[device] * tokens / tokens.sum()
                ).astype(np.int64)
            if not done_n.all():
                failed = segments_n3[status_n == FAILED, 0]
                work.failed_ED[failed, device] = True
        work.close(segments, answer.status)

    def _combine(
        self, order_S: NDArray[np.int64], y_SH: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's K output rows; always in the order of K."""
        place_S = np.empty_like(order_S)
        place_S[order_S] = np.arange(len(order_S))
        place_TK = torch.from_numpy(place_S).view(-1, self._spec.top_k).to(y_SH.device)
        weights = None if self._scores_input else weights_TK.to(y_SH.dtype)
        return torch.nn.functional.embedding_bag(
            place_TK, y_SH, per_sample_weights=weights, mode="sum"
        )


class _Work:
    """The assignments of one layer that still have to be computed.

    Assignments of one expert are contiguous once sorted; each open range of them is computed by
    one replica or, after a split, by several.
    """

    def __init__(self, count_E: CountArray) -> None:
        start_E = np.cumsum(count_E) - count_E
        self.open_E: CountArray = count_E.copy()
        self.failed_ED: NDArray[np.bool_] = np.zeros((len(count_E), 1), dtype=np.bool_)
        self._start_E = start_E
        self._ranges: dict[int, list[tuple[int, int]]] | None = None
        self._tries = 0

    def count_try(self, layer: int) -> None:
        """Bound the rounds: experts that vanish again and again are fought over."""
        self._tries += 1
        if self._tries > 50:
            raise UnavailableError(f"layer {layer}: experts do not stay warm long enough to run")

    def segments(self, share_ED: CountArray) -> list[NDArray[np.int32]]:
        """Turn shares into row ranges, per device."""
        if share_ED.shape[1] != self.failed_ED.shape[1]:
            self.failed_ED = np.zeros(share_ED.shape, dtype=np.bool_)
        if self._ranges is None:
            stop_ED = self._start_E[:, None] + np.cumsum(share_ED, axis=1)
            result = []
            for device in range(share_ED.shape[1]):
                experts = np.flatnonzero(share_ED[:, device])
                segments_n3 = np.empty((len(experts), 3), dtype=np.int32)
                segments_n3[:, 0] = experts
                segments_n3[:, 2] = stop_ED[experts, device]
                segments_n3[:, 1] = segments_n3[:, 2] - share_ED[experts, device]
                result.append(segments_n3)
            return result
        return self._segments_of_rest(share_ED)

    def _segments_of_rest(self, share_ED: CountArray) -> list[NDArray[np.int32]]:
        """The same after a round that left gaps: an expert's rest may be in several ranges.

        A request has room for one segment per expert and device, so each replica takes part of
        the expert's first open range in this round.
        """
        assert self._ranges is not None
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(share_ED.shape[1])]
        for expert, ranges in self._ranges.items():
            if not ranges:
                continue
            start, stop = ranges[0]
            for device in np.flatnonzero(share_ED[expert]).tolist():
                last = min(stop, start + int(share_ED[expert, device]))
                if last > start:
                    rows[device].append((expert, start, last))
                start = last
        return [np.array(r, dtype=np.int32).reshape(-1, 3) for r in rows]

    def close(
        self, segments: Sequence[NDArray[np.int32]], status: Sequence[NDArray[np.uint8]]
    ) -> None:
        """Take what was computed out of what is open."""
        if self._ranges is None and all((s == OK).all() for s in status):
            done_E = np.zeros_like(self.open_E)
            for segments_n3 in segments:
                done_E[segments_n3[:, 0]] += segments_n3[:, 2] - segments_n3[:, 1]
            if (done_E == self.open_E).all():
                self.open_E[:] = 0
                return
        if self._ranges is None:
            self._ranges = {
                int(e): [(int(self._start_E[e]), int(self._start_E[e] + self.open_E[e]))]
                for e in np.flatnonzero(self.open_E)
            }
        for segments_n3, status_n in zip(segments, status, strict=True):
            for (expert, start, stop), state in zip(
                segments_n3.tolist(), status_n.tolist(), strict=True
            ):
                if state == OK:
                    self._ranges[expert] = _without(self._ranges[expert], start, stop)
                    self.open_E[expert] -= stop - start


def _without(ranges: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Cut [start, stop) out of sorted disjoint ranges."""
    rest = []
    for low, high in ranges:
        if low < min(high, start):
            rest.append((low, min(high, start)))
        if max(low, stop) < high:
            rest.append((max(low, stop), high))
    return rest
