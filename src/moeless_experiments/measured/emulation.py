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
        self._host = ExpertHost("cpu")
        self._host.add_model(self._store, spec)
        self._states = draw_states(spec.expert.hidden, spec.expert.dtype, seed)

    def run(self, layer: int, ids_TK: IdArray, share_ED: CountArray) -> Sample:
        """One layer-step, all devices one after another.

        Args:
            layer: MoE layer.
            ids_TK: Chosen experts.
            share_ED: Tokens of each replica.
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
            for expert in segments_n3[:, 0].tolist():
                self._host.load(FunctionId(self._spec.model_id, layer, expert))
            busy_ns = self._host.invoke(
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

    def run_best(
        self,
        layer: int,
        ids_TK: IdArray,
        share_ED: CountArray,
        repeats: int,
    ) -> Sample:
        """The same several times; each device's shortest time counts.

        Args:
            layer: MoE layer.
            ids_TK: Chosen experts.
            share_ED: Tokens of each replica.
            repeats: How often.
        """
        runs = [self.run(layer, ids_TK, share_ED) for _ in range(repeats)]
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
