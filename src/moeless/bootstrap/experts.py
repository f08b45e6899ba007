"""Wires the experts of a loaded model: platform, invoker, dispatcher."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.bootstrap.control import (
    build_controller,
    build_policies,
    build_sink,
    check_policy_config,
    serving_cost,
)
from moeless.bootstrap.look_ahead import (
    ServingLookAhead,
    build_look_ahead,
    check_predictor,
)
from moeless.bootstrap.policies import PolicyOptions
from moeless.bootstrap.supervisor_process import SupervisorProcess
from moeless.config import ExpertsConfig
from moeless.core.clock import SystemClock
from moeless.core.model import ModelSpec
from moeless.core.policy_set import PolicySet
from moeless.core.ports import Clock
from moeless.engines.transformers.gate_access import observed_layer_inputs
from moeless.engines.transformers.loader import LoadedModel, attach_runtime
from moeless.errors import BudgetError, ConfigError
from moeless.functions.billing import GB
from moeless.functions.board import Board
from moeless.functions.channel import ChannelShape
from moeless.functions.client import PlatformClient
from moeless.functions.dispatch import ExpertDispatcher, Invoker
from moeless.functions.host import ExpertHost, function_bytes
from moeless.functions.invokers.inline import InlineInvoker
from moeless.functions.invokers.process import ProcessInvoker
from moeless.functions.local import LocalClient
from moeless.functions.model_placement import ModelPlacement
from moeless.functions.store import ExpertStore
from moeless.functions.supervisor.attachment import MAX_DEVICES
from moeless.functions.supervisor.client import SupervisorClient
from moeless.functions.supervisor.config import WorkerConfig
from moeless.policies.keep_alive import KEEP_ALIVES
from moeless.telemetry.jsonl import JsonlSink
from moeless.telemetry.snapshot import GbSeconds, RuntimeSnapshot, Timing


@dataclass(kw_only=True)
class ExpertsRuntime:
    """The running experts of one model.

    Args:
        spec: The model.
        config: How they run.
        client: The platform.
        dispatcher: The token path.
        invoker: How instances are reached.
        look_ahead: How their loads are expected.
        supervisor: The process we started, with the ``process`` invoker.
        attached: Hooks in the model, beside the experts' own.
    """

    spec: ModelSpec
    config: ExpertsConfig
    client: PlatformClient
    dispatcher: ExpertDispatcher
    invoker: Invoker
    look_ahead: ServingLookAhead
    supervisor: SupervisorProcess | None
    attached: ExitStack = field(default_factory=ExitStack)

    def snapshot(self) -> RuntimeSnapshot:
        """What the experts look like now. May be called from any thread.

        Raises:
            FunctionError: The platform does not answer.
        """
        stats, board = self.dispatcher.stats, self.client.board
        report = self.client.report()
        gb_s_L = report["gb_s_L"] | {"paper": (stats.paper_byte_s_L / GB).tolist()}
        return RuntimeSnapshot(
            model=self.spec.model_id,
            devices=tuple(device.label for device in self.config.devices),
            steps=int(board.step[0]),
            tokens_LE=stats.layers.tokens_LE,
            replicas_LED=board.warm_LED.copy(),
            planned_LED=board.planned_LED.copy(),
            device_tokens_LD=stats.layers.device_tokens_LD,
            straggler_mean_L=stats.layers.straggler_mean_L,
            straggler_last_L=stats.layers.straggler_last_L,
            warm_starts=stats.layers.warm_starts,
            cold_starts=sum(report["cold_starts_L"]),
            cold_starts_L=np.array(report["cold_starts_L"]),
            warm_starts_L=stats.layers.warm_starts_L,
            blocking_loads=report["blocking_loads"],
            evictions=report["evictions"],
            plans=report["plans"],
            plans_early_share=stats.early_plans / max(stats.layer_steps, 1),
            replicas_warm_share=stats.warm_replicas / max(stats.planned_replicas, 1),
            plan_s=Timing(**report["plan_s"]),
            split_s=Timing.of(stats.split_s),
            layer_forward_s=Timing.of(stats.layer_s),
            forecast_s=Timing.of(stats.forecast_s),
            prediction_accuracy_L=stats.accuracy_L,
            predictor=self.look_ahead.state(),
            instances_D={k: tuple(v) for k, v in report["instances_D"].items()},
            resident_bytes_D=tuple(report["resident_bytes_D"]),
            budget_bytes_D=tuple(report["budget_bytes_D"]),
            gb_s=GbSeconds(**{name: sum(values) for name, values in gb_s_L.items()}),
            gb_s_L={name: tuple(values) for name, values in gb_s_L.items()},
            worker_restarts_D=tuple(report["worker_restarts"]),
            failed_loads_D=tuple(report["failed_loads_D"]),
            straggler_static_mean_L=stats.layers.straggler_static_mean_L,
            layer_steps_L=stats.layers.layer_steps_L,
            expected_LE=_expected_LE(board),
            actual_LE=board.actual_LE.copy(),
        )

    def is_alive(self) -> bool:
        """Whether the platform can still be reached."""
        return self.supervisor is None or self.supervisor.process.poll() is None

    def close(self) -> None:
        """Stop everything that was started."""
        self.attached.close()
        self.look_ahead.close()
        self.client.close()
        self.invoker.close()
        if self.supervisor is not None:
            self.supervisor.close()


def _expected_LE(board: Board) -> NDArray[np.float64]:
    """Forecasts of the steps whose loads have come; those of a step under way have no load yet."""
    met_L = (board.forecast_step_L == board.actual_step_L) & (board.actual_step_L > 0)
    return np.where(met_L[:, None], board.forecast_LE, np.nan)


def start_experts(
    loaded: LoadedModel,
    config: ExpertsConfig,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> ExpertsRuntime:
    """Start the experts of a model and attach them to it.

    Args:
        loaded: A model without experts.
        config: How they run.
        tell: Told in a line when something changes that an operator may want to know.

    Returns:
        The runtime; close it at the end.

    Raises:
        CheckpointError: An expert's weights are missing or damaged.
        BudgetError: The devices cannot hold one layer's experts at once.
        ConfigError: A policy or a device that does not exist.
        FunctionError: Workers do not start.
    """
    check_experts_config(config)
    with ExpertStore(loaded.directory, loaded.layout, loaded.spec) as store:
        store.validate()
    look_ahead = build_look_ahead(loaded, config, tell=tell)
    start = _start_processes if config.invoker == "process" else _start_inline
    try:
        runtime = start(loaded, config, look_ahead)
    except BaseException:
        look_ahead.close()
        raise
    attach_runtime(loaded, runtime.dispatcher)
    if look_ahead.on_path.forecast_first is not None:
        announce = runtime.dispatcher.announce_first_layers
        runtime.attached.enter_context(
            observed_layer_inputs(loaded.model, [0], lambda _, x_TH: announce(x_TH))
        )
    return runtime


def check_experts_config(config: ExpertsConfig) -> None:
    """Refuse what cannot work before anything is loaded or started.

    Raises:
        ConfigError: A policy or a device that does not exist, a predictor that cannot serve, too
            many devices, or a file for events that cannot be written.
        CheckpointError: A damaged predictor.
    """
    check_policy_config(config.policy)
    check_predictor(config.policy)
    if config.events is not None:
        JsonlSink(config.events).close()
    if len(config.devices) > MAX_DEVICES:
        raise ConfigError(
            f"--devices names {len(config.devices)} devices; use at most {MAX_DEVICES}"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in config.devices:
        if device.kind == "cuda" and device.ordinal >= count:
            raise ConfigError(
                f"device {device.label} is not there: torch sees {count} CUDA devices; "
                f"use --devices cpu:N or another GPU"
            )


def device_budgets(spec: ModelSpec, config: ExpertsConfig) -> list[int]:
    """Bytes that experts may take on each device [D].

    Without an explicit budget each device gets its share of ``memory_factor`` copies of all
    experts.

    Raises:
        BudgetError: The devices cannot hold one layer's experts at once.
    """
    num_devices = len(config.devices)
    sizes = [function_bytes(spec.expert, d.torch_name) for d in config.devices]
    if config.device_memory_bytes is None:
        factor = PolicyOptions(memory_factor=config.policy.memory_factor).fixed_memory_factor
        copies = min(factor, num_devices) * spec.num_experts
        slots = -(-int(np.ceil(copies)) // num_devices)
        return [slots * spec.num_layers * size for size in sizes]
    slots = sum(config.device_memory_bytes // size for size in sizes)
    if slots < spec.num_experts:
        least = -(-spec.num_experts // num_devices) * max(sizes)
        raise BudgetError(
            f"--device-memory {config.device_memory_bytes:,} bytes is too small: {num_devices} "
            f"devices hold {slots} experts of {max(sizes):,} bytes, but each layer of "
            f"{spec.model_id} has {spec.num_experts}; give at least {least:,} bytes"
        )
    return [config.device_memory_bytes] * num_devices


def _policies(spec: ModelSpec, config: ExpertsConfig, clock: Clock) -> PolicySet:
    devices = [device.torch_name for device in config.devices]
    cost = serving_cost(spec.expert, devices, config.policy.cost_model)
    return build_policies(config.policy, cost=cost, clock=clock)


def _dispatcher(
    loaded: LoadedModel,
    config: ExpertsConfig,
    look_ahead: ServingLookAhead,
    client: PlatformClient,
    invoker: Invoker,
) -> ExpertDispatcher:
    return ExpertDispatcher(
        loaded.spec,
        client=client,
        invoker=invoker,
        splitter=_policies(loaded.spec, config, SystemClock()).splitter,
        look_ahead=look_ahead.on_path,
    )


def _start_inline(
    loaded: LoadedModel, config: ExpertsConfig, look_ahead: ServingLookAhead
) -> ExpertsRuntime:
    spec = loaded.spec
    budgets = device_budgets(spec, config)
    hosts = [ExpertHost(device.torch_name) for device in config.devices]
    sizes = [
        host.add_model(ExpertStore(loaded.directory, loaded.layout, spec), spec) for host in hosts
    ]
    clock = SystemClock()
    sink = build_sink(config.events, clock)

    def make_controller(model: ModelPlacement) -> Any:
        return build_controller(
            config.policy,
            model,
            torch_devices=[device.torch_name for device in config.devices],
            lookahead=look_ahead.distance,
            clock=clock,
            sink=sink,
            record=config.events is not None,
        )

    client = LocalClient(
        spec,
        hosts,
        budgets_bytes=budgets,
        function_bytes=max(sizes),
        clock=clock,
        keep_alive=KEEP_ALIVES.create(config.keep_alive_rule, seconds=config.keep_alive_s),
        sink=sink,
        make_controller=make_controller,
    )
    invoker = InlineInvoker(spec.model_id, hosts, max_rows=config.max_rows)
    return ExpertsRuntime(
        spec=spec,
        config=config,
        client=client,
        dispatcher=_dispatcher(loaded, config, look_ahead, client, invoker),
        invoker=invoker,
        look_ahead=look_ahead,
        supervisor=None,
    )


def _start_processes(
    loaded: LoadedModel, config: ExpertsConfig, look_ahead: ServingLookAhead
) -> ExpertsRuntime:
    spec = loaded.spec
    budgets = device_budgets(spec, config)
    spin_us = _spin_us(config)
    workers = _worker_configs(config, budgets, spin_us)
    supervisor = SupervisorProcess(
        workers,
        policy=config.policy,
        keep_alive_s=config.keep_alive_s,
        keep_alive_rule=config.keep_alive_rule,
        linger_s=config.linger_s,
        silence_s=config.worker_silence_s,
        events=config.events,
    )
    # Where scores apply to the input each token has K rows of its own.
    max_rows = max(config.max_rows, spec.top_k)
    shape = ChannelShape(
        max_rows=max_rows,
        max_assignments=max_rows * spec.top_k,
        hidden=spec.expert.hidden,
        dtype=spec.expert.dtype,
        num_experts=spec.num_experts,
    )
    try:
        client = SupervisorClient(
            supervisor.socket_path,
            spec=spec,
            layout=loaded.layout,
            directory=loaded.directory,
            shape=shape,
            lookahead=look_ahead.distance,
        )
        invoker = ProcessInvoker(
            client,
            shape,
            spin_s=spin_us * 1e-6,
            deadline_s=config.invocation_timeout_s,
            cores=[worker.cores for worker in workers],
        )
        dispatcher = _dispatcher(loaded, config, look_ahead, client, invoker)
    except BaseException:
        supervisor.close()
        raise
    return ExpertsRuntime(
        spec=spec,
        config=config,
        client=client,
        dispatcher=dispatcher,
        invoker=invoker,
        look_ahead=look_ahead,
        supervisor=supervisor,
    )


def _worker_configs(
    config: ExpertsConfig, budgets: list[int], spin_us: int
) -> tuple[WorkerConfig, ...]:
    """Give each worker its cores: a slice of what this process may use, none twice if possible."""
    cores = sorted(os.sched_getaffinity(0))
    count = len(config.devices)
    threads = config.worker_threads or max(1, len(cores) // count)
    workers = []
    for i, (device, budget) in enumerate(zip(config.devices, budgets, strict=True)):
        own = tuple(dict.fromkeys(cores[(i * threads + t) % len(cores)] for t in range(threads)))
        workers.append(
            WorkerConfig(
                torch_device=device.torch_name,
                budget_bytes=budget,
                threads=threads,
                cores=own if device.kind == "cpu" else (),
                spin_us=spin_us,
            )
        )
    return tuple(workers)


def _spin_us(config: ExpertsConfig) -> int:
    """Spinning pays only where it takes no core from somebody who computes."""
    if config.spin_us is not None:
        return config.spin_us
    return 50 if len(os.sched_getaffinity(0)) > len(config.devices) + 2 else 0
