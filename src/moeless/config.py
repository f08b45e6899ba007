"""What an operator can set, as frozen dataclasses. Nothing here is read from the environment."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeless.core.cluster import Device
from moeless.core.memory_share import NO_SHARE, MemoryShare
from moeless.errors import ConfigError

InvokerName = Literal["process", "inline"]


MemoryFactor = float | Literal["auto"]
"""Warm replicas that a policy may hold, in multiples of E; ``auto`` leaves it to the policy."""


def parse_memory_factor(text: str) -> MemoryFactor:
    """Read ``--memory-factor``: a number of at least 1, or ``auto``.

    Raises:
        ConfigError: It is neither.
    """
    if text.strip().lower() == "auto":
        return "auto"
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor >= 1.0):
        raise ConfigError(
            f"--memory-factor {text!r} is not a number of at least 1 (one replica per expert), "
            f"nor auto"
        )
    return factor


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """How loads become replicas.

    Args:
        policy: A planner by name, for example ``moeless``, ``paper`` or ``static``.
        predictor: ``gate`` looks ahead with copies of the model's gates, a directory that
            ``moeless predictor train`` wrote with those, ``auto`` with copies that are re-fitted
            to live traffic; ``previous`` and ``ewma`` expect what was; ``off`` is ``previous``.
        distance: d, layers that are looked ahead; None takes what a trained predictor was
            trained for, and 1 for others.
        memory_factor: Replicas that a layer may have, in multiples of its experts. ``auto`` lets
            ``moeless`` take as few as keep the time within 2% of the best, and others 2.0.
        cv_threshold: Coefficient of variation below which replicas count as balanced.
        splitter: How tokens are divided over replicas, by name; None takes the policy's own.
        search_beside: Whether searches for better replica sets run beside planning. In the
            control loop itself they delay plans by milliseconds, but what they find no longer
            depends on when a thread ran.
        wake_ahead: Whether a step that finds its model cold has the layers behind loaded at once,
            in their order; otherwise each is loaded when a forecast or its own tokens ask for it.
        eplb_interval_s: Seconds between plans of ``eplb``, which looks back as far.
        cost_model: What experts cost in time, for policies that optimise it: a JSON file of
            measurements or a model by name; None takes rough figures of the kind of device.

    Raises:
        ConfigError: A number is out of range.
    """

    policy: str = "moeless"
    predictor: str = "gate"
    distance: int | None = None
    memory_factor: MemoryFactor = "auto"
    cv_threshold: float = 0.2
    splitter: str | None = None
    search_beside: bool = True
    wake_ahead: bool = True
    eplb_interval_s: float = 600.0
    cost_model: str | None = None

    def __post_init__(self) -> None:
        if self.distance is not None and self.distance < 1:
            raise ConfigError(f"distance is {self.distance}; use 1 or more layers")
        factor = self.memory_factor
        if factor != "auto" and not (math.isfinite(factor) and factor >= 1):
            raise ConfigError(
                f"memory factor is {factor}; use 1.0 (one copy of each expert) or more, or auto"
            )
        if not (math.isfinite(self.cv_threshold) and self.cv_threshold >= 0):
            raise ConfigError(f"CV threshold is {self.cv_threshold}; use 0 or more")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Where experts run and how.

    Args:
        devices: The device pool; empty where ``pool`` says which.
        pool: Directory of a pool that somebody serves: the engine attaches to it, and devices,
            budgets and workers are that pool's. None for workers of the engine's own.
        max_devices: Devices that there may be after others have joined while serving, with
            ``process``; None for those of ``devices`` only.
        invoker: ``process`` runs one worker process per device, ``inline`` computes in the
            engine's process.
        invoker_reason: Why it was chosen, where nobody asked for it by name.
        policy: How loads become replicas.
        device_memory_bytes: Budget of each device for experts; None takes what the memory factor
            asks for.
        share: Memory of the devices that the model is guaranteed, in a pool that it shares.
        keep_alive_s: How long an idle instance stays warm unless the rule knows better; infinite
            for as long as nobody needs its room.
        keep_alive_rule: A keep-alive rule by name.
        worker_threads: Compute threads of each worker; None divides the cores.
        spin_us: How long processes look for each other's messages before they sleep, in
            microseconds; None decides by the number of cores.
        max_rows: Tokens per invocation; longer inputs come in pieces.
        invocation_timeout_s: The most that a worker may take for one invocation before it is
            replaced; as a rule less, by what it was sent and how fast it has been so far.
        live_speeds: Whether a device that computes much slower than the others gets fewer tokens
            and, if that lasts, fewer experts; only policies that split by time heed it, and not
            while events are recorded.
        worker_silence_s: How long a worker may show no sign of life before it is replaced; a tenth
            of that, at least a second, while tokens wait for it, and six times as much where it
            only waits for a core.
        spare_workers: Workers that stand by, libraries loaded, to take the place of lost ones.
        linger_s: How long workers outlive an engine that vanished without a word.
        events: File to append events to: plans, loads, evictions, lost workers; one JSON object
            a line.

    Raises:
        ConfigError: A number is out of range.
    """

    devices: tuple[Device, ...] = ()
    pool: Path | None = None
    max_devices: int | None = None
    invoker: InvokerName = "process"
    invoker_reason: str = ""
    policy: PolicyConfig = PolicyConfig()
    device_memory_bytes: int | None = None
    share: MemoryShare = NO_SHARE
    keep_alive_s: float = 300.0
    keep_alive_rule: str = "fixed"
    worker_threads: int | None = None
    spin_us: int | None = None
    max_rows: int = 4096
    invocation_timeout_s: float = 600.0
    live_speeds: bool = True
    worker_silence_s: float = 10.0
    spare_workers: int = 0
    linger_s: float = 10.0
    events: Path | None = None

    def __post_init__(self) -> None:
        if not self.devices and self.pool is None:
            raise ConfigError("no devices are given; use --devices, or --pool to attach to a pool")
        if self.max_devices is not None and self.max_devices < len(self.devices):
            raise ConfigError(
                f"max devices is {self.max_devices}; use {len(self.devices)} (those of --devices) "
                f"or more"
            )
        if not self.keep_alive_s >= 0:
            raise ConfigError(
                f"keep-alive is {self.keep_alive_s} s; use 0 or more, or inf for as long as there "
                f"is room"
            )
        if not self.invocation_timeout_s > 0:
            raise ConfigError(
                f"invocation timeout is {self.invocation_timeout_s} s; use more than 0"
            )
        if not self.worker_silence_s >= 1:
            raise ConfigError(f"worker timeout is {self.worker_silence_s} s; use 1 or more")
        if not 0 <= self.spare_workers <= 64:
            raise ConfigError(f"spare workers is {self.spare_workers}; use 0 to 64")
        if self.worker_threads is not None and self.worker_threads < 1:
            raise ConfigError(f"worker threads is {self.worker_threads}; use 1 or more")
        if self.spin_us is not None and not 0 <= self.spin_us <= 1_000_000:
            raise ConfigError(f"spin is {self.spin_us} µs; use 0 to 1000000")
        if self.max_rows < 1:
            raise ConfigError(f"max rows is {self.max_rows}; use 1 or more")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The serving engine.

    Args:
        model: A directory, a hub id, or ``demo``.
        model_id: The id under which it is served; None takes the directory's name.
        dtype: ``auto`` for the checkpoint's own, or ``float32`` where the processor is slow in
            that and memory allows it; or ``float32``, ``bfloat16``, ``float16``.
        max_batch_size: Sequences that run at the same time.
        max_waiting: Requests that may wait beyond those.
        max_model_len: Tokens of prompt and completion; None takes the model's own limit.
        prefill_chunk_tokens: Prompt tokens that may delay one decode step.
        batch_invariant: A sequence's numbers are the same to the bit whatever runs beside it.
        threads: Compute threads of the engine; None takes half of the cores when CPU workers
            run beside it, else all.
        chat_template: File with the Jinja template that conversations are written with; None
            takes the checkpoint's own.

    Raises:
        ConfigError: Fewer than one thread, or an empty id.
    """

    model: str
    model_id: str | None = None
    dtype: str = "auto"
    max_batch_size: int = 32
    max_waiting: int = 256
    max_model_len: int | None = None
    prefill_chunk_tokens: int = 512
    batch_invariant: bool = False
    threads: int | None = None
    chat_template: Path | None = None

    def __post_init__(self) -> None:
        if self.model_id is not None and not self.model_id.strip():
            raise ConfigError(
                "--model-id is empty: give the id that clients send, or leave it out for the "
                "directory's name"
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads is {self.threads}; use 1 or more")
