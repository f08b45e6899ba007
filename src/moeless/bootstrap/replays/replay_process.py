"""Replays one policy in a process of its own.

It is given a job as JSON and leaves a recording as ``.npz``; on stdout it says how far it is, one
JSON object per line, and at the end what went wrong, if anything did.
"""

import json
import math
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from moeless.bootstrap.policies import (
    ORACLE,
    PolicyOptions,
    build_policy_set,
    is_serverful,
    max_replicas,
)
from moeless.core.model import ExpertShape
from moeless.costs.time_models import build_time_model
from moeless.errors import MoelessError
from moeless.policies.keep_alive import KEEP_ALIVES
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import Prediction, build_forecast
from moeless.simulator.optimum_samples import solve_samples
from moeless.simulator.oracle import Oracle
from moeless.simulator.recording import Recording
from moeless.simulator.replay import ReplayConfig, replay_policy
from moeless.workloads.routing_trace import RoutingTrace, read_trace

_REPORT_EVERY_S = 0.2


def replay_job(job: dict[str, Any], trace: RoutingTrace, *, on_step: Any) -> Recording:
    """Replay the policy of a job.

    Args:
        job: See ``replay_runner``.
        trace: The steps.
        on_step: Called with each step's index before it starts.

    Raises:
        MoelessError: The policy cannot be built, or cannot run.
    """
    name = job["policy"]
    expert = ExpertShape(**job["expert"])
    time_model = build_time_model(
        job["cost_model"], expert, job["devices"], speeds=tuple(job["speeds"])
    )
    if name == ORACLE:
        oracle = Oracle(
            time_model=time_model,
            num_devices=job["devices"],
            function_bytes=expert.num_bytes,
            misc_s=job["misc_s"],
        )
        return oracle.replay(trace, on_step=on_step)
    options = PolicyOptions(**job["options"])
    prediction = Prediction(**job["prediction"])
    clock = SimulatedClock()
    # Who reserves devices lets nothing go that is only idle.
    keep_s = math.inf if is_serverful(name) else float(job["keep_alive_s"])
    rule = "fixed" if is_serverful(name) else job["keep_alive_rule"]
    explain = job["explain"]
    recording = replay_policy(
        trace,
        build_policy_set(
            name,
            cost=time_model.cost,
            options=options,
            clock=clock,
            history=prediction.history,
        ),
        clock=clock,
        time_model=time_model,
        forecast=build_forecast(prediction, trace, seed=job["seed"]),
        keep_alive=KEEP_ALIVES.create(rule, seconds=keep_s),
        config=ReplayConfig(
            num_devices=job["devices"],
            device_bytes=job["device_bytes"],
            expert=expert,
            load_s=job["load_s"],
            lookahead=prediction.distance,
            decision_s=job["decision_s"],
            search_s=job["search_s"],
            misc_s=job["misc_s"],
            tick_s=_tick_s(rule, keep_s),
            max_replicas=max_replicas(
                name,
                options,
                num_experts=trace.meta.num_experts,
                num_devices=job["devices"],
            ),
            keep_replicas=job["keep_replicas"],
            samples=tuple((step, layer) for step, layer in job["samples"]),
            explain=None if explain is None else (explain[0], explain[1]),
        ),
        on_step=on_step,
    )
    recording.optimum_s_N = solve_samples(recording, trace.loads_NLE, time_model.cost)
    return recording


def _tick_s(rule: str, keep_s: float) -> float | None:
    """How often idle instances are looked for: often for the shortest keep-alive there can be."""
    if rule == "fixed":
        return None if math.isinf(keep_s) else min(max(keep_s / 10, 0.25), 30.0)
    return 1.0


def main(arguments: list[str]) -> int:
    """Entry point of the process: one argument, the job's file."""
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    messages = take_output()
    next_report_s = 0.0

    def say(message: dict[str, Any]) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    def report(step: int) -> None:
        nonlocal next_report_s
        now_s = perf_counter()
        if now_s >= next_report_s:
            next_report_s = now_s + _REPORT_EVERY_S
            say({"step": step})

    try:
        recording = replay_job(job, read_trace(Path(job["trace"])), on_step=report)
        recording.save(Path(job["result"]))
    except MoelessError as error:
        say({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    return 0


def take_output() -> TextIO:
    """Standard output for messages alone: what libraries print there goes to standard error.

    Solvers do, from C, and not through ``sys.stdout``.
    """
    sys.stdout.flush()
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return messages


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)  # whoever started us is gone, or wants us to be
