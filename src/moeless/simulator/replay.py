"""Replays one policy: the control path of serving, wired to simulated time and devices."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from moeless.control.controller import Controller, ControllerConfig
from moeless.control.search import Searcher
from moeless.core.events import Event, InstanceEvicted, InstanceLoaded, PlanFailed
from moeless.core.model import ExpertShape, ModelSpec
from moeless.core.policy_set import PolicySet
from moeless.core.ports import KeepAlive
from moeless.errors import FunctionError, PlanError
from moeless.functions.links.board import Board
from moeless.functions.planning.load_intake import LoadIntake
from moeless.functions.platform.host_port import HostPort
from moeless.functions.platform.platform import Platform
from moeless.simulator.decisions import DeferredIntake, DeferredPlacement, DeferredSearcher
from moeless.simulator.event_loop import EventLoop, SimulatedClock
from moeless.simulator.explain import Explainer
from moeless.simulator.forecasts import LoadForecast
from moeless.simulator.host import SimulatedHost
from moeless.simulator.layer_timer import LayerTimer, TimeModel
from moeless.simulator.recorded_control import RecordedControl
from moeless.simulator.recorded_host import RecordedHost
from moeless.simulator.recorded_path import RecordedPath
from moeless.simulator.recorded_searcher import RecordedSearcher
from moeless.simulator.recorded_times import RecordedTimes
from moeless.simulator.recording import Recording, num_warm_up_steps
from moeless.simulator.stopwatch import TimedPlanner, TimedSplitter
from moeless.simulator.token_path import TokenPath
from moeless.workloads.routing_trace import RoutingTrace


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """The machine that a policy is replayed on.

    Args:
        num_devices: D.
        device_bytes: Memory of each device.
        expert: Shape of every expert.
        load_s: Seconds that a device's link needs for one expert.
        lookahead: d of the forecasts, 0 for none.
        decision_s: Simulated seconds of one planning decision.
        search_s: Simulated seconds of one search beside planning.
        misc_s: Simulated seconds of everything but the experts, per layer.
        tick_s: Seconds between looks at idle instances; None where they are kept for ever.
        max_replicas: Replicas of a layer beyond which retired ones leave at once.
        wake_ahead: Whether a step that finds its model cold has the layers behind loaded at once.
        keep_replicas: Whether every layer-step's replicas are recorded one by one.
        samples: Step and layer of each layer-step whose replicas are recorded in any case.
        explain: Step and layer to explain, or None.
        times: When what happened in a run of real workers, in place of the durations above;
            nothing can be explained then, and waiting for experts takes no time.
    """

    num_devices: int
    device_bytes: int
    expert: ExpertShape
    load_s: float
    lookahead: int = 0
    decision_s: float = 100e-6
    search_s: float = 5e-3
    misc_s: float = 0.0
    tick_s: float | None = None
    max_replicas: int | None = None
    wake_ahead: bool = True
    keep_replicas: bool = False
    samples: tuple[tuple[int, int], ...] = ()
    explain: tuple[int, int] | None = None
    times: RecordedTimes | None = None


class _RecordingSink:
    """Counts cold starts by step and layer, and remembers plans that failed."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.step: int | None = None
        self.explainer: Explainer | None = None
        self.failure: str | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, PlanFailed):
            self._recording.failed_plans += 1
            self.failure = event.reason
        elif isinstance(event, InstanceLoaded) and self.step is not None:
            self._recording.cold_SL[self.step, event.layer] += 1
            self._recording.blocking_SL[self.step, event.layer] += event.blocking
        if self.explainer is not None and isinstance(event, InstanceLoaded | InstanceEvicted):
            self.explainer.note(event)


def replay_policy(
    trace: RoutingTrace,
    policies: PolicySet,
    *,
    clock: SimulatedClock,
    time_model: TimeModel,
    forecast: LoadForecast | None,
    keep_alive: KeepAlive,
    config: ReplayConfig,
    on_step: Callable[[int], None] = lambda _: None,
) -> Recording:
    """Replay a trace of steps under a policy.

    What the policy plans before the first step is loaded before the trace begins.

    Args:
        trace: Steps.
        policies: The policy.
        clock: Simulated time; the policy's parts may hold it, too.
        time_model: How long layers take.
        forecast: Look-ahead, or None.
        keep_alive: How long idle instances stay.
        config: The machine.
        on_step: Called with each step's index before it starts.

    Raises:
        PlanError: The policy cannot plan at all.
        BudgetError: The devices cannot hold one layer's experts.
        FunctionError: Tokens waited for something that never came.
        TraceError: What happened in the recorded run does not happen here.
    """
    return _Replay(
        trace,
        policies,
        clock=clock,
        time_model=time_model,
        forecast=forecast,
        keep_alive=keep_alive,
        config=config,
        on_step=on_step,
    ).run()


class _Replay:
    def __init__(
        self,
        trace: RoutingTrace,
        policies: PolicySet,
        *,
        clock: SimulatedClock,
        time_model: TimeModel,
        forecast: LoadForecast | None,
        keep_alive: KeepAlive,
        config: ReplayConfig,
        on_step: Callable[[int], None],
    ) -> None:
        self._trace = trace
        self._config = config
        times = config.times
        self._tell_step = on_step
        self._warm_up = num_warm_up_steps(len(trace))
        self._planner = TimedPlanner(policies.planner)
        self._splitter = TimedSplitter(policies.splitter)
        self._timings = (
            self._planner.seconds,
            self._planner.search_seconds,
            self._splitter.seconds,
        )
        self._timings_before = [0, 0, 0]
        policies = replace(policies, planner=self._planner, splitter=self._splitter)
        spec = _spec_of(trace, config)
        self._recording = Recording.empty(
            steps=len(trace),
            layers=spec.num_layers,
            experts=spec.num_experts,
            devices=config.num_devices,
            keep_replicas=config.keep_replicas,
            samples=config.samples,
        )
        self._sink = _RecordingSink(self._recording)
        self._clock = clock
        # In a recorded run the platform lives by the run's time, and computing by the model's.
        self._loop = EventLoop(clock if times is None else SimulatedClock())
        if times is not None:
            clock.time_s = times.moments[0].began_s
        self._platform = Platform(
            [config.device_bytes] * config.num_devices,
            clock=clock,
            keep_alive=keep_alive,
            sink=self._sink,
        )
        board = Board.in_process(
            num_layers=spec.num_layers,
            num_experts=spec.num_experts,
            num_devices=config.num_devices,
        )
        self._model = self._platform.add_model(
            spec,
            function_bytes=spec.expert.num_bytes,
            board=board,
            max_replicas=config.max_replicas,
        )
        self._model.join(0, board)
        self._model.wakes = config.wake_ahead
        self._board = board
        placement = DeferredPlacement(self._model, loop=self._loop, decision_s=config.decision_s)
        searcher: Searcher = DeferredSearcher(loop=self._loop, search_s=config.search_s)
        if times is not None:
            searcher = recorded_searcher = RecordedSearcher(times.searches())
        self._controller = Controller(
            ControllerConfig(
                model=spec.model_id,
                num_layers=spec.num_layers,
                num_experts=spec.num_experts,
                lookahead=config.lookahead,
            ),
            policies=policies,
            placement=placement if times is None else self._model,
            clock=clock,
            sink=self._sink,
            searcher=searcher,
        )
        self._meter = self._model.meter
        if config.explain is not None:
            self._sink.explainer = Explainer(
                step=config.explain[0],
                layer=config.explain[1],
                placement=placement,
                planner=self._planner,
                time_model=time_model,
                load_s=config.load_s,
                function_bytes=spec.expert.num_bytes,
            )
        heeded = policies.adaptive and policies.uses_forecasts and policies.replan_every_s is None
        intake = LoadIntake(board, self._controller)
        self._intake = (
            DeferredIntake(intake, placement, loop=self._loop) if policies.adaptive else None
        )
        self._forecast = forecast if heeded else None
        self._timer = LayerTimer(time_model)
        self._token_path: TokenPath | None = None
        self._recorded: RecordedControl | None = None
        if times is not None:
            self._intake = None
            self._recorded = RecordedControl(
                times=times,
                trace=trace,
                forecast=self._forecast,
                controller=self._controller,
                platform=self._platform,
                model=self._model,
                board=board,
                searcher=recorded_searcher,
                hosts=[RecordedHost(device=d) for d in range(config.num_devices)],
                clock=clock,
            )

    def run(self) -> Recording:
        """Load what is planned at first, then run the steps."""
        for device in range(self._config.num_devices):
            self._platform.device_up(device, self._host(device))
        self._controller.start()
        if self._recording.failed_plans:
            raise PlanError(self._sink.failure or "no first plan")
        self._loop.run()

        self._token_path = token_path = self._begin_token_path()
        token_path.resume()
        self._tick(token_path)
        self._loop.run()
        if not token_path.finished:
            raise FunctionError("the replay stalled: tokens wait for loads that never end")
        if self._recorded is not None:
            self._recorded.finish()
        recording = self._recording
        recording.resident_gb_s_S[-1] = self._resident_gb_s()
        recording.plan_s, recording.search_s, recording.split_s = (
            # Some plan no more after the warm-up: then what they did in it is all there is.
            np.array(seconds[before:] if len(seconds) > before else seconds)
            for seconds, before in zip(self._timings, self._timings_before, strict=True)
        )
        if self._sink.explainer is not None:
            recording.explanation = self._sink.explainer.explanation
        return recording

    def _host(self, device: int) -> HostPort:
        if self._recorded is not None:
            return self._recorded.hosts[device]
        return SimulatedHost(
            device,
            loop=self._loop,
            platform=self._platform,
            load_s=self._config.load_s,
            on_change=self._on_change,
        )

    def _on_change(self) -> None:
        if self._token_path is not None:
            self._token_path.notice_change()

    def _on_step(self, step: int) -> None:
        self._sink.step = step
        self._recording.resident_gb_s_S[step] = self._resident_gb_s()
        if step == self._warm_up:
            self._timings_before = [len(seconds) for seconds in self._timings]
        self._tell_step(step)

    def _resident_gb_s(self) -> float:
        return float(self._meter.gb_s_L(now_s=self._clock.time_s).sum())

    def _begin_token_path(self) -> TokenPath:
        begin: Callable[..., TokenPath] = TokenPath
        if self._recorded is not None:
            begin = partial(RecordedPath, control=self._recorded)
        return begin(
            trace=self._trace,
            start_s=self._loop.clock.time_s,
            loop=self._loop,
            platform=self._platform,
            model=self._model,
            board=self._board,
            splitter=self._splitter,
            timer=self._timer,
            forecast=self._forecast,
            lookahead=self._config.lookahead,
            intake=self._intake,
            misc_s=self._config.misc_s,
            recording=self._recording,
            explainer=self._sink.explainer,
            on_step=self._on_step,
        )

    def _tick(self, token_path: TokenPath) -> None:
        """Retire what has been idle for too long, now and then."""
        if self._config.tick_s is None or (token_path.is_waiting and not self._loop.has_more()):
            return
        self._platform.tick()
        next_s = self._loop.clock.time_s + self._config.tick_s
        self._loop.at(next_s, partial(self._tick, token_path))


def _spec_of(trace: RoutingTrace, config: ReplayConfig) -> ModelSpec:
    meta = trace.meta
    return ModelSpec(
        model_id=meta.model,
        family="routing trace",
        layer_ids=meta.layer_ids,
        num_experts=meta.num_experts,
        top_k=meta.top_k,
        expert=config.expert,
    )
