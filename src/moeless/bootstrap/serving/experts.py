"""Wires the experts of a loaded model: platform, invoker, dispatcher."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.bootstrap.serving.control import (
    build_controller,
    build_sink,
    build_splitter,
    check_policy_config,
    serving_cost,
)
from moeless.bootstrap.serving.device_budgets import device_budgets
from moeless.bootstrap.serving.look_ahead import (
    ServingLookAhead,
    build_look_ahead,
    check_predictor,
)
from moeless.bootstrap.serving.supervisor_process import SupervisorProcess
from moeless.bootstrap.serving.worker_fleet import check_devices, worker_configs
from moeless.config import ExpertsConfig
from moeless.core.clock import SystemClock
from moeless.core.model import ModelSpec
from moeless.engines.transformers.gate_access import observed_layer_inputs
from moeless.engines.transformers.loader import LoadedModel, attach_runtime
from moeless.errors import FunctionError
from moeless.functions.accounts.billing import GB
from moeless.functions.host.host import ExpertHost
from moeless.functions.invokers.inline import InlineInvoker
from moeless.functions.invokers.patience import Patience
from moeless.functions.invokers.process import ProcessInvoker
from moeless.functions.links.board import Board
from moeless.functions.links.channel import ChannelShape
from moeless.functions.links.client import PlatformClient
from moeless.functions.local import LocalClient
from moeless.functions.platform.model_placement import ModelPlacement
from moeless.functions.store import ExpertStore
from moeless.functions.supervisor.client import SupervisorClient
from moeless.functions.supervisor.config import SupervisorConfig
from moeless.functions.supervisor.pool_directory import PoolDirectory, find_directory
from moeless.functions.supervisor.wishes import write_wishes
from moeless.functions.token_path.dispatch import ExpertDispatcher, Invoker
from moeless.policies.keep_alive import KEEP_ALIVES
from moeless.telemetry.jsonl import JsonlSink
from moeless.telemetry.snapshot import GbSeconds, RuntimeSnapshot, Timing


@dataclass(kw_only=True)
class ExpertsRuntime:
    """The running experts of one model.

    Args:
        spec: The model.
        config: How they run.
        devices: Labels of the devices that were there when it was attached [D].
        client: The platform.
        dispatcher: The token path.
        invoker: How instances are reached.
        look_ahead: How their loads are expected.
        supervisor: The process we started, with the ``process`` invoker.
        attached: Hooks in the model, beside the experts' own.
    """

    spec: ModelSpec
    config: ExpertsConfig
    devices: tuple[str, ...]
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
        states = report.get("device_states", ["up"] * len(self.devices))
        labels = report.get("device_labels", self.devices)
        speeds = self.dispatcher.device_speeds()
        # Slots for devices that may join one day are nothing to look at.
        there = [device for device, state in enumerate(states) if state != "down"]
        gb_s_L = report["gb_s_L"] | {"paper": (stats.paper_byte_s_L / GB).tolist()}
        return RuntimeSnapshot(
            model=self.spec.model_id,
            devices=_of(labels, there),
            device_states_D=_of(states, there),
            steps=int(board.step[0]),
            tokens_LE=stats.layers.tokens_LE,
            replicas_LED=board.warm_LED[:, :, there],
            planned_LED=board.planned_LED[:, :, there],
            device_tokens_LD=stats.layers.device_tokens_LD[:, there],
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
            instances_D={k: _of(v, there) for k, v in report["instances_D"].items()},
            resident_bytes_D=_of(report["resident_bytes_D"], there),
            budget_bytes_D=_of(report["budget_bytes_D"], there),
            gb_s=GbSeconds(**{name: sum(values) for name, values in gb_s_L.items()}),
            gb_s_L={name: tuple(values) for name, values in gb_s_L.items()},
            worker_restarts_D=_of(report["worker_restarts"], there),
            failed_loads_D=_of(report["failed_loads_D"], there),
            events_lost=report["events_lost"],
            loaded_bytes_D=_of(report["loaded_bytes_D"], there),
            loading_s_D=_of(report["loading_s_D"], there),
            cold_start_s_D=tuple(Timing(**each) for each in _of(report["cold_start_s_D"], there)),
            device_speed_D=_of(speeds, there) if speeds else (),
            planned_speed_D=_of(report["planned_speed_D"], there),
            straggler_static_mean_L=stats.layers.straggler_static_mean_L,
            layer_steps_L=stats.layers.layer_steps_L,
            expected_LE=_expected_LE(board),
            actual_LE=board.actual_LE.copy(),
        )

    def is_alive(self) -> bool:
        """Whether the platform can still be reached."""
        try:
            self.client.check_alive()
        except FunctionError:
            return False
        return True

    def close(self) -> None:
        """Stop everything that was started."""
        self.attached.close()
        self.look_ahead.close()
        self.client.close()
        self.invoker.close()
        if self.supervisor is not None:
            self.supervisor.close()


def _of(values_D: Sequence[Any], devices: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values_D[device] for device in devices)


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
        ConfigError: A policy, device or pool that does not exist, a predictor that cannot serve,
            too many devices, or a file for events that cannot be written.
        CheckpointError: A damaged predictor.
    """
    if config.events is not None:
        JsonlSink(config.events).close()
    if config.pool is not None:
        find_directory(config.pool)
    else:
        check_devices(config)
    check_predictor(config.policy)
    check_policy_config(config.policy)  # last: the first time it compiles loops for some seconds


def _dispatcher(
    loaded: LoadedModel,
    config: ExpertsConfig,
    look_ahead: ServingLookAhead,
    client: PlatformClient,
    invoker: Invoker,
    torch_devices: Sequence[str],
) -> ExpertDispatcher:
    cost = serving_cost(loaded.spec.expert, torch_devices, config.policy.cost_model)
    splitter = build_splitter(config, cost)
    return ExpertDispatcher(
        loaded.spec,
        client=client,
        invoker=invoker,
        splitter=splitter,
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
    for host in hosts:
        host.expect_rows(spec.model_id, config.max_rows)
    clock = SystemClock()
    sink = build_sink(config.events, clock)
    torch_devices = [device.torch_name for device in config.devices]

    def make_controller(model: ModelPlacement) -> Any:
        return build_controller(
            config.policy,
            model,
            torch_devices=torch_devices,
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
        devices=tuple(device.label for device in config.devices),
        client=client,
        dispatcher=_dispatcher(loaded, config, look_ahead, client, invoker, torch_devices),
        invoker=invoker,
        look_ahead=look_ahead,
        supervisor=None,
    )


def _start_processes(
    loaded: LoadedModel, config: ExpertsConfig, look_ahead: ServingLookAhead
) -> ExpertsRuntime:
    if config.pool is not None:
        return _attach(loaded, config, look_ahead, find_directory(config.pool), None)
    budgets = device_budgets(loaded.spec, config)
    supervisor = SupervisorProcess(
        SupervisorConfig(
            workers=worker_configs(config, budgets),
            max_devices=config.max_devices or len(config.devices),
            keep_alive_s=config.keep_alive_s,
            keep_alive_rule=config.keep_alive_rule,
            linger_s=config.linger_s,
            silence_s=config.worker_silence_s,
            spare_workers=config.spare_workers,
        ),
        policy=config.policy,
        events=config.events,
    )
    try:
        return _attach(loaded, config, look_ahead, supervisor.directory, supervisor)
    except BaseException:
        supervisor.close()
        raise


def _attach(
    loaded: LoadedModel,
    config: ExpertsConfig,
    look_ahead: ServingLookAhead,
    directory: PoolDirectory,
    supervisor: SupervisorProcess | None,
) -> ExpertsRuntime:
    spec = loaded.spec
    # Where scores apply to the input each token has K rows of its own.
    max_rows = max(config.max_rows, spec.top_k)
    shape = ChannelShape(
        max_rows=max_rows,
        max_assignments=max_rows * spec.top_k,
        hidden=spec.expert.hidden,
        dtype=spec.expert.dtype,
        num_experts=spec.num_experts,
    )
    client = SupervisorClient(
        str(directory.engine_socket),
        spec=spec,
        layout=loaded.layout,
        directory=loaded.directory,
        shape=shape,
        lookahead=look_ahead.distance,
        wishes={
            "policy": asdict(config.policy),
            **write_wishes(
                share=config.share,
                keep_alive_rule=config.keep_alive_rule,
                keep_alive_s=config.keep_alive_s,
            ),
        },
    )
    workers = [worker for worker in client.workers if worker is not None]
    try:
        invoker = ProcessInvoker(
            client,
            shape,
            spin_s=max((worker.spin_us for worker in workers), default=0) * 1e-6,
            patience=Patience(
                spec.expert.num_parameters,
                num_devices=client.num_devices,
                most_s=config.invocation_timeout_s,
            ),
            cores=[worker.cores if worker is not None else () for worker in client.workers],
        )
        torch_devices = [worker.torch_device for worker in workers]
        dispatcher = _dispatcher(loaded, config, look_ahead, client, invoker, torch_devices)
    except BaseException:
        client.close()
        raise
    return ExpertsRuntime(
        spec=spec,
        config=config,
        devices=tuple(
            f"cpu:{device}" if name == "cpu" else name for device, name in enumerate(torch_devices)
        ),
        client=client,
        dispatcher=dispatcher,
        invoker=invoker,
        look_ahead=look_ahead,
        supervisor=supervisor,
    )
