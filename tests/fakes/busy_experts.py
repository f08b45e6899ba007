"""Snapshots of experts that are always at work, of any size."""

import time

import numpy as np

from moeless.telemetry.snapshot import GbSeconds, PredictorState, RuntimeSnapshot, Timing


class BusyExperts:
    """A model whose counters grow with time.

    Args:
        layers: L.
        experts: E.
        devices: D.
    """

    def __init__(self, layers: int, experts: int, devices: int) -> None:
        self._shape = (layers, experts, devices)
        self._random = np.random.default_rng(1)
        self._popularity_LE = self._random.pareto(1.2, (layers, experts)) + 0.02
        self._tokens_LE = np.zeros((layers, experts), dtype=np.int64)
        self._replicas_LED = (self._random.random(self._shape) < 1.3 / devices).astype(np.uint8)
        self._replicas_LED[:, np.arange(experts), np.arange(experts) % devices] = 1
        self._began_s = self._last_s = time.monotonic()

    def snapshot(self) -> RuntimeSnapshot:
        """The state now."""
        layers, _, devices = self._shape
        now_s = time.monotonic()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        age_s = now_s - self._began_s
        grown = self._popularity_LE * elapsed_s * 40
        self._tokens_LE += self._random.poisson(grown)
        expected_LE = self._random.poisson(np.minimum(self._popularity_LE, 30)).astype(float)
        actual_LE = np.maximum(0, expected_LE + self._random.integers(-1, 2, expected_LE.shape))
        expected_LE[0] = np.nan
        steps_L = np.full(layers, round(age_s * 20), dtype=np.int64)
        warm = self._replicas_LED.sum(axis=(0, 1))
        timing = Timing(count=100, total_s=0.1, p50_s=0.001, p99_s=0.002)
        gb_s_L = {
            name: (size * age_s / layers,) * layers
            for name, size in (("billed", 0.1), ("resident", 1.1), ("reserved", 2), ("paper", 0.4))
        }
        accuracy_L = np.linspace(0.95, 0.8, layers)
        accuracy_L[0] = np.nan
        return RuntimeSnapshot(
            model="busy/model",
            devices=tuple(f"cpu:{device}" for device in range(devices)),
            steps=int(steps_L[0]),
            tokens_LE=self._tokens_LE.copy(),
            replicas_LED=self._replicas_LED,
            planned_LED=self._replicas_LED,
            device_tokens_LD=np.full((layers, devices), int(self._tokens_LE.sum() / devices)),
            straggler_mean_L=np.full(layers, 1.04),
            straggler_last_L=np.full(layers, 1.04),
            warm_starts=int(steps_L.sum()) * 5,
            cold_starts=round(age_s * 3),
            cold_starts_L=np.zeros(layers, dtype=np.int64),
            warm_starts_L=np.zeros(layers, dtype=np.int64),
            blocking_loads=round(age_s / 3),
            evictions=round(age_s * 2),
            plans=100,
            plans_early_share=0.99,
            replicas_warm_share=0.99,
            plan_s=timing,
            split_s=timing,
            layer_forward_s=timing,
            prediction_accuracy_L=accuracy_L,
            predictor=PredictorState(kind="gate", distance=1),
            instances_D={
                "warm": tuple(warm.tolist()),
                "loading": (1,) * devices,
                "draining": (0,) * devices,
            },
            resident_bytes_D=tuple((warm * 1_000_000).tolist()),
            budget_bytes_D=tuple((warm * 1_600_000).tolist()),
            gb_s=GbSeconds(**{name: sum(values) for name, values in gb_s_L.items()}),
            gb_s_L=gb_s_L,
            loaded_bytes_D=(round(age_s * 3_600_000),) * devices,
            loading_s_D=(age_s * 0.003,) * devices,
            cold_start_s_D=(timing,) * devices,
            worker_restarts_D=(0,) * (devices - 1) + (2,),
            straggler_static_mean_L=np.full(layers, 1.37),
            layer_steps_L=steps_L,
            expected_LE=expected_LE,
            actual_LE=actual_LE,
        )
