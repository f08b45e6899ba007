"""Devices that are not there: each one's share really computed, one after another.

A layer then takes as long as its slowest device. What is left out is what devices do to each
other: links, and caches that they would not share.
"""

from collections.abc import Sequence

import numpy as np
import torch

from moeless.core.model import FunctionId
from moeless.core.plan import CountArray
from moeless.engines.transformers.loader import LoadedModel
from moeless.functions.compute.kernels import is_stacked
from moeless.functions.host.host import ExpertHost
from moeless.functions.store import ExpertStore
from moeless.functions.token_path.open_work import OpenWork
from moeless_experiments.measured.workers import Sample, draw_states
from moeless_experiments.measured.workload import IdArray


class DeviceEmulator:
    """Computes shares of a model's layers in this thread.

    Args:
        loaded: The model.
        seed: Of the hidden states.

    Raises:
        MoelessError: An expert's weights cannot be read.
    """

    def __init__(self, loaded: LoadedModel, *, seed: int) -> None:
        spec = loaded.spec
        self._spec = spec
        self._store = ExpertStore(loaded.directory, loaded.layout, spec)
        # Small experts of a device lie side by side and are computed in one go, so it matters
        # which ones a device has; large ones can be shared by all.
        self._stacked = is_stacked(spec.expert, "cpu")
        self._hosts: dict[tuple[str, int], ExpertHost] = {}
        self._held: dict[tuple[str, int, int], frozenset[int]] = {}
        self._states = draw_states(spec.expert.hidden, spec.expert.dtype, seed)

    def run(self, layer: int, ids_TK: IdArray, share_ED: CountArray, *, fleet: str = "") -> Sample:
        """One layer-step, all devices one after another.

        Args:
            layer: MoE layer.
            ids_TK: Chosen experts.
            share_ED: Tokens of each replica.
            fleet: Names the devices: another policy has other ones.
        """
        ids_S = ids_TK.reshape(-1)
        count_E = np.bincount(ids_S, minlength=self._spec.num_experts)
        token_S = torch.from_numpy(np.argsort(ids_S, kind="stable") // self._spec.top_k)
        x_TH = self._states[: len(ids_TK)]
        y_SH = torch.empty(len(ids_S), x_TH.shape[1], dtype=x_TH.dtype)
        busy_s_D = np.zeros(share_ED.shape[1])
        segments = OpenWork(count_E, share_ED.shape[1]).segments(share_ED)
        for device, segments_n3 in enumerate(segments):
            if not len(segments_n3):
                continue
            status_n = np.zeros(len(segments_n3), dtype=np.uint8)
            host = self._prepare(fleet, device, layer, segments_n3[:, 0].tolist())
            busy_ns = host.invoke(
                self._spec.model_id,
                layer,
                x_TH=x_TH,
                token_S=token_S,
                segments_n3=segments_n3,
                y_SH=y_SH,
                status_n=status_n,
            )
            assert not status_n.any()
            busy_s_D[device] = busy_ns / 1e9
        return Sample(float(busy_s_D.max()), busy_s_D, share_ED)

    def _prepare(self, fleet: str, device: int, layer: int, experts: list[int]) -> ExpertHost:
        """A host that has these experts of the layer, and where it matters no others."""
        key = (fleet, device) if self._stacked else ("", 0)
        if key not in self._hosts:
            self._hosts[key] = ExpertHost("cpu")
            self._hosts[key].add_model(self._store, self._spec)
        host, model = self._hosts[key], self._spec.model_id
        wanted, held = frozenset(experts), self._held.get((*key, layer), frozenset())
        if not self._stacked:
            wanted |= held
        for expert in held - wanted:
            host.evict(FunctionId(model, layer, expert))
        for expert in sorted(wanted - held):
            host.load(FunctionId(model, layer, expert))
        self._held[*key, layer] = wanted
        return host

    def run_best(
        self,
        layer: int,
        ids_TK: IdArray,
        share_ED: CountArray,
        repeats: int,
        *,
        fleet: str = "",
    ) -> Sample:
        """The same several times; each device's shortest time counts.

        Args:
            layer: MoE layer.
            ids_TK: Chosen experts.
            share_ED: Tokens of each replica.
            repeats: How often.
            fleet: Names the devices.
        """
        runs = [self.run(layer, ids_TK, share_ED, fleet=fleet) for _ in range(repeats)]
        busy_s_D = np.min([run.busy_s_D for run in runs], axis=0)
        return Sample(float(busy_s_D.max()), busy_s_D, share_ED)


def static_shares(steps: Sequence[IdArray], experts: int, devices: int) -> list[list[CountArray]]:
    """Shares of each step and layer where device d has every D-th expert from d on.

    Args:
        steps: Chosen experts of each step.
        experts: E.
        devices: D.
    """
    home_E = np.arange(experts) % devices
    shares = []
    for ids_LTK in steps:
        layers = []
        for ids_TK in ids_LTK:
            share_ED = np.zeros((experts, devices), dtype=np.int64)
            share_ED[np.arange(experts), home_E] = np.bincount(ids_TK.ravel(), minlength=experts)
            layers.append(share_ED)
        shares.append(layers)
    return shares
