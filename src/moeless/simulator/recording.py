"""What happened in a replay, layer-step by layer-step, in arrays."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.core.plan import CountArray, ReplicaArray

FloatArray = NDArray[np.float64]


@dataclass(kw_only=True, eq=False)
class Recording:
    """One policy on one trace: S steps, L MoE layers, E logical experts, D devices.

    Args:
        device_tokens_SLD: Tokens that each device computed, int64 [S, L, D].
        warm_SL: Warm copies when the layer's gate spoke, int64 [S, L]: where the splitter divides
            by copies an instance counts as often as the plan has it, else once.
        layer_s_SL: Time of the layer, waiting for loads included, in seconds [S, L].
        busy_s_SL: Execution time of all devices together, in seconds [S, L].
        cold_SL: Replicas loaded onto a device during the step, int64 [S, L].
        blocking_SL: Those of them that a token waited for, int64 [S, L].
        start_s_S: When each step started, in seconds from the trace's start [S].
        resident_gb_s_S: Bytes on devices times time, from the start until each step's start, and
            until the end of the last one, in GB·s [S + 1]; each instance counts once.
        end_s: When the last step ended.
        replicas_SLED: Warm copies when the layer's gate spoke, uint8 [S, L, E, D]; None unless
            asked for.
        sample_N2: Step and layer of each sampled layer-step, int64 [N, 2].
        sample_NED: Their warm copies, uint8 [N, E, D].
        optimum_s_N: The least time that those allow, see ``solve_samples`` [N]; empty where it
            was not looked for.
        plan_s: How long each plan after the warm-up really took to make, in seconds.
        search_s: How long each search beside planning really took, in seconds.
        split_s: How long each split after the warm-up really took.
        failed_plans: Plans that could not be made after the first ones.
        explanation: See ``explain``; None unless asked for.
    """

    device_tokens_SLD: CountArray
    warm_SL: CountArray
    layer_s_SL: FloatArray
    busy_s_SL: FloatArray
    cold_SL: CountArray
    blocking_SL: CountArray
    start_s_S: FloatArray
    resident_gb_s_S: FloatArray
    end_s: float = 0.0
    replicas_SLED: ReplicaArray | None = None
    sample_N2: CountArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    sample_NED: ReplicaArray = field(default_factory=lambda: np.zeros((0, 0, 0), dtype=np.uint8))
    optimum_s_N: FloatArray = field(default_factory=lambda: np.zeros(0))
    plan_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    search_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    split_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    failed_plans: int = 0
    explanation: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        samples = enumerate(self.sample_N2.tolist())
        self._sample_of = {(step, layer): n for n, (step, layer) in samples}

    @classmethod
    def empty(
        cls,
        *,
        steps: int,
        layers: int,
        experts: int,
        devices: int,
        keep_replicas: bool,
        samples: Sequence[tuple[int, int]] = (),
    ) -> "Recording":
        """Arrays to be filled."""
        shape = (steps, layers)
        return cls(
            device_tokens_SLD=np.zeros((*shape, devices), dtype=np.int64),
            warm_SL=np.zeros(shape, dtype=np.int64),
            layer_s_SL=np.zeros(shape),
            busy_s_SL=np.zeros(shape),
            cold_SL=np.zeros(shape, dtype=np.int64),
            blocking_SL=np.zeros(shape, dtype=np.int64),
            start_s_S=np.zeros(steps),
            resident_gb_s_S=np.zeros(steps + 1),
            replicas_SLED=(
                np.zeros((*shape, experts, devices), dtype=np.uint8) if keep_replicas else None
            ),
            sample_N2=np.array(samples, dtype=np.int64).reshape(-1, 2),
            sample_NED=np.zeros((len(samples), experts, devices), dtype=np.uint8),
        )

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.warm_SL)

    def keep_sample(self, step: int, layer: int, warm_ED: ReplicaArray) -> None:
        """Keep the warm copies of a layer-step if it is one of the samples."""
        sample = self._sample_of.get((step, layer))
        if sample is not None:
            self.sample_NED[sample] = warm_ED

    def save(self, path: Path) -> None:
        """Write everything into an ``.npz`` file, uncompressed."""
        arrays = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.replicas_SLED is None:
            del arrays["replicas_SLED"]
        arrays["explanation"] = np.array(json.dumps(self.explanation))
        with path.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Recording":
        """Read what ``save`` wrote."""
        with np.load(path, allow_pickle=False) as archive:
            arrays: dict[str, Any] = dict(archive)
        arrays["end_s"] = float(arrays["end_s"])
        arrays["failed_plans"] = int(arrays["failed_plans"])
        arrays["explanation"] = json.loads(str(arrays["explanation"]))
        return cls(**arrays)


def num_warm_up_steps(num_steps: int) -> int:
    """The first 10% of a trace's steps, rounded down; left out of every figure."""
    return num_steps // 10
