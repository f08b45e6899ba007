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

from moeless.core.copies import copies_held_ED, divides_by_copies
from moeless.core.model import ModelSpec
from moeless.core.plan import CountArray
from moeless.core.ports import Splitter
from moeless.errors import FunctionError
from moeless.functions.links.client import PlatformClient
from moeless.functions.token_path.announcer import LoadAnnouncer, LookAhead
from moeless.functions.token_path.open_work import OpenWork
from moeless.functions.token_path.token_path_stats import TokenPathStats

_ANNOUNCE_FIRST_TOKENS = 256
"""Up to so many tokens looking ahead takes less time than it needs to be early (docs/log.md)."""

_NARROW_FROM = 256
"""Assignments from which sorting narrow ids, copy included, is faster (docs/log.md)."""


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


ChoiceObserver = Callable[[int, NDArray[np.int64], torch.Tensor], None]
"""Told (layer, chosen experts [T, K], gate input [T, H]) when a layer's gate has spoken; must keep
neither array."""

WorkNotes = Callable[[CountArray, NDArray[np.int64]], bool | None]
"""Told the tokens that devices got of a layer [E, D] and the nanoseconds that each took [D]; says
whether the speeds of devices were measured anew."""


class ExpertDispatcher:
    """Runs the routed experts of a model. Called by the engine, from one thread.

    Args:
        spec: The model.
        client: The platform.
        invoker: How instances are reached.
        splitter: Divides tokens over replicas.
        look_ahead: What is expected of later layers; None when loads are predicted from history.
        load_timeout_s: How long tokens wait for an expert without a warm replica.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        client: PlatformClient,
        invoker: Invoker,
        splitter: Splitter,
        look_ahead: LookAhead | None = None,
        load_timeout_s: float = 120.0,
    ) -> None:
        self._spec = spec
        self._client = client
        self._board = client.board
        self._invoker = invoker
        self._splitter = splitter
        self._divides_by_copies = divides_by_copies(splitter)
        self._note_work: WorkNotes | None = getattr(splitter, "note_work", None)
        self._load_timeout_s = load_timeout_s
        self._scores_input = spec.expert.score_on == "input"
        self._piece_rows = invoker.max_rows // (spec.top_k if self._scores_input else 1) or 1
        self._last_layer = spec.num_layers
        self._narrow_dtype = np.min_scalar_type(spec.num_experts - 1)
        self._step = 0
        self._observer: ChoiceObserver | None = None
        self._counting_S: NDArray[np.int64] = np.arange(0)
        self._offsets_T = torch.arange(0)
        self.stats = TokenPathStats(
            spec, num_devices=client.num_devices, function_bytes=client.function_bytes
        )
        self._announcer = LoadAnnouncer(client, look_ahead or LookAhead(), stats=self.stats)

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
        try:
            y_TH = self._run_layer(layer, x_TH, ids_TK, weights_TK)
        except BaseException:
            self._end_step()
            raise
        if layer == self._spec.num_layers - 1:
            self._end_step()
        return y_TH

    def _end_step(self) -> None:
        """Say that no layer runs: what runs is kept from other engines, and we may be idle now."""
        self._board.layer[0] = -1

    def _run_layer(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        if len(x_TH) == 0:
            return torch.zeros_like(x_TH)
        began_s = time.perf_counter()
        ids_S = ids_TK.reshape(-1).cpu().numpy()
        if self._observer is not None:
            self._observer(layer, ids_S.reshape(len(x_TH), -1), x_TH)
        count_E: CountArray = np.bincount(ids_S, minlength=self._spec.num_experts)
        self._board.layer[0] = layer
        usable_ED = self._look_at_plan(layer)
        self._announcer.take(layer, count_E, x_TH, step=self._step)
        if len(x_TH) <= self._piece_rows:
            y_TH = self._run(layer, x_TH, ids_S, weights_TK, count_E, usable_ED)
        else:
            y_TH = self._run_pieces(layer, x_TH, ids_S, weights_TK, usable_ED)
        self.stats.record_layer(
            layer,
            seconds=time.perf_counter() - began_s,
            warm_replicas=int(np.count_nonzero(self._board.warm_LED[layer])),
        )
        return y_TH

    def announce_first_layers(self, embedding_TH: torch.Tensor) -> None:
        """Say what is expected of the first layers, which no gate of the step can see ahead.

        Args:
            embedding_TH: What enters the model's first layer [T, H], before any layer runs.
        """
        self._announcer.announce_first(embedding_TH, step=self._step + 1)

    def device_speeds(self) -> tuple[float, ...]:
        """Relative speeds that the splitter heeds [D]; empty where it heeds none."""
        speed_D = getattr(self._splitter, "speed_D", None)
        return () if speed_D is None else tuple(speed_D().tolist())

    def _post_speeds(self) -> None:
        measured_D = getattr(self._splitter, "measured_D", None)
        if measured_D is not None:
            self._board.post_speeds(measured_D())

    def observe_choices(self, observer: ChoiceObserver | None) -> None:
        """Have somebody told of every layer's choices; None ends it."""
        self._observer = observer

    def _look_at_plan(self, layer: int) -> NDArray[np.bool_]:
        """Planned replicas that are warm now that the gate has spoken [E, D].

        Also notes whether the plan was in force and how many of its replicas were warm.
        """
        board = self._board
        usable_ED: NDArray[np.bool_] = np.logical_and(
            board.warm_LED[layer], board.planned_LED[layer]
        )
        self.stats.record_plan(
            early=not self._client.wants_loads or int(board.plan_step_L[layer]) >= self._step,
            planned=int(np.count_nonzero(board.planned_LED[layer])),
            warm=int(np.count_nonzero(usable_ED)),
        )
        return usable_ED

    def _run_pieces(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_S: NDArray[np.int64],
        weights_TK: torch.Tensor,
        usable_ED: NDArray[np.bool_],
    ) -> torch.Tensor:
        """Inputs that are longer than an invocation may be."""
        k, rows, pieces = self._spec.top_k, self._piece_rows, []
        for first in range(0, len(x_TH), rows):
            ids = ids_S[first * k : (first + rows) * k]
            count_E = np.bincount(ids, minlength=self._spec.num_experts)
            x, weights = x_TH[first : first + rows], weights_TK[first : first + rows]
            pieces.append(self._run(layer, x, ids, weights, count_E, usable_ED.copy()))
        return torch.cat(pieces)

    def _run(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_S: NDArray[np.int64],
        weights_TK: torch.Tensor,
        count_E: CountArray,
        usable_ED: NDArray[np.bool_],
    ) -> torch.Tensor:
        order_S = np.argsort(self._narrow(ids_S), kind="stable")
        token_S = torch.from_numpy(order_S // self._spec.top_k)
        if self._scores_input:
            weights_S = weights_TK.reshape(-1)[torch.from_numpy(order_S)]
            x_TH = x_TH[token_S] * weights_S[:, None].to(x_TH.dtype)
            token_S = torch.arange(len(order_S))

        work = OpenWork(count_E, self._client.num_devices)
        y_SH: torch.Tensor | None = None
        done_ED: CountArray | None = None
        while work.is_open:
            ticket, ready_E = self._demand_missing(layer, work, usable_ED)
            if len(x_TH) <= _ANNOUNCE_FIRST_TOKENS:
                self._announcer.announce()  # not before: what tokens wait for is loaded first
            share_ED = self._split(layer, ready_E, usable_ED)
            segments = work.segments(share_ED)
            self._invoker.begin(layer, x_TH=x_TH, token_S=token_S, segments=segments, y_SH=y_SH)
            self._announcer.announce()  # the devices are busy now: time to look ahead
            answer = self._invoker.finish()
            y_SH = answer.y_SH
            self._board.busy_ns_LD[layer] += answer.busy_ns
            if self._note_work is not None and self._note_work(share_ED, np.array(answer.busy_ns)):
                self._post_speeds()
            done_ED = share_ED if done_ED is None else done_ED + share_ED
            work.close(segments, answer.status, complete=ticket is None)
            if ticket is not None:
                began_s = time.perf_counter()
                self._client.await_demand(ticket, timeout_s=self._load_timeout_s)
                self.stats.record_load_wait(time.perf_counter() - began_s)
            if work.is_open:
                usable_ED = self._warm_ED(layer) & ~work.failed_ED
        assert y_SH is not None
        assert done_ED is not None
        self._record(layer, count_E, done_ED)
        return self._combine(order_S, y_SH, weights_TK)

    def _narrow(self, ids_S: NDArray[np.int64]) -> NDArray[np.integer]:
        """Expert ids as numbers so small that sorting them takes one pass or two."""
        if len(ids_S) < _NARROW_FROM:
            return ids_S
        return ids_S.astype(self._narrow_dtype)

    def _record(self, layer: int, count_E: CountArray, share_ED: CountArray) -> None:
        used_ED = share_ED.astype(np.bool_)
        self._board.post_used(layer, used_ED, at_ns=time.monotonic_ns(), step=self._step)
        self.stats.record_split(
            layer,
            count_E=count_E,
            device_tokens_D=share_ED.sum(axis=0),
            segments=int(np.count_nonzero(used_ED)),
            devices_up=int(np.count_nonzero(self._board.device_up_D)),
        )

    def _warm_ED(self, layer: int) -> NDArray[np.bool_]:
        warm_ED: NDArray[np.bool_] = self._board.warm_LED[layer].view(np.bool_)
        return warm_ED

    def _demand_missing(
        self, layer: int, work: OpenWork, usable_ED: NDArray[np.bool_]
    ) -> tuple[int | None, CountArray]:
        """Fall back on unplanned warm replicas, and demand experts that have none at all.

        Returns:
            The ticket of the demand, if there was one, and the tokens [E] that can go now.
        """
        open_E = work.open_E
        without_E = np.logical_or.reduce(usable_ED, axis=1)
        np.logical_not(without_E, out=without_E)
        if not open_E[without_E].any():
            return None, open_E
        without_E &= open_E > 0
        warm_ED = self._warm_ED(layer) & ~work.failed_ED
        usable_ED[without_E] = warm_ED[without_E]
        missing = np.flatnonzero(without_E & ~warm_ED.any(axis=1))
        if not len(missing):
            return None, open_E
        failed = missing[work.failed_ED[missing].any(axis=1)]
        if len(failed):
            raise FunctionError(f"layer {layer}, expert {failed[0]}: failed on every device")
        work.count_try(layer)
        ticket = self._client.demand(layer=layer, experts=missing.tolist())
        ready_E = open_E.copy()
        ready_E[missing] = 0
        return ticket, ready_E

    def _split(self, layer: int, ready_E: CountArray, usable_ED: NDArray[np.bool_]) -> CountArray:
        began_s = time.perf_counter()
        if usable_ED.shape[1] == 1:
            share_ED = ready_E[:, None] * usable_ED  # there is nothing to divide
        elif self._divides_by_copies:
            copies_ED = copies_held_ED(usable_ED, self._board.planned_LED[layer])
            share_ED = self._splitter.split(ready_E, copies_ED)
        else:
            share_ED = self._splitter.split(ready_E, usable_ED)
        self.stats.split_s.add(time.perf_counter() - began_s)
        return share_ED

    def _combine(
        self, order_S: NDArray[np.int64], y_SH: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of each token's K output rows; always in the order of K."""
        size = len(order_S)
        if size != len(self._counting_S):
            self._counting_S = np.arange(size)
            self._offsets_T = torch.arange(0, size, self._spec.top_k).to(y_SH.device)
        place_S = np.empty_like(order_S)
        place_S[order_S] = self._counting_S
        places = torch.from_numpy(place_S)
        if y_SH.device.type != "cpu":
            places = places.to(y_SH.device)
        weights = None if self._scores_input else weights_TK.reshape(-1).to(y_SH.dtype)
        # The sum over bags of K rows; the functional form would rebuild the offsets each time.
        y_TH: torch.Tensor = torch.embedding_bag(
            y_SH, places, self._offsets_T, False, 0, False, weights, False
        )[0]
        return y_TH
