"""What scaling to zero saves under bursts and pauses, and what requests wait for it. Simulated.

The Azure code trace of 2023 (it pauses for up to 217 s, then has hundreds of requests a minute)
says when requests arrive, in one-second batches. Side by side, at several keep-alives:

- ``moeless``: experts leave one by one when they were idle for the keep-alive, and are loaded in
  the order in which layers need them, while earlier layers compute;
- ``moeless, unpipelined``: the same, but a layer is loaded when a forecast or its own tokens ask;
- ``whole model``: all experts leave together, and all are loaded before the next request begins;
- ``static``: everything stays.

    MOELESS_DATA_DIR=... python benchmarks/bursty_cost.py --out DIR [--demo-trace DEMO16.npz]

A load takes an expert's bytes over the preset's link, one after the other on each device. With
``host`` weights wait in host memory, with ``store`` on one drive that all devices share. The
whole model's figures follow from those of ``static``, the same steps later. What a request waits
for is its batch's end against that of the same policy when nothing ever leaves.
"""

import argparse
import csv
import math
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from provenance import provenance

from moeless.bootstrap.policies import PolicyOptions, build_policy_set, is_serverful, max_replicas
from moeless.bootstrap.replays.replay import PreparedReplay, ReplayTask, prepare_replay
from moeless.bootstrap.replays.replay_runner import metrics_config
from moeless.costs.links import LinkTimes
from moeless.costs.presets import device_preset
from moeless.policies.keep_alive import KEEP_ALIVES
from moeless.simulator.event_loop import SimulatedClock
from moeless.simulator.forecasts import build_forecast
from moeless.simulator.metrics import measure_policy
from moeless.simulator.recording import Recording, num_warm_up_steps
from moeless.simulator.replay import ReplayConfig, replay_policy
from moeless.telemetry.percentiles import percentiles
from moeless.workloads.arrivals import read_arrivals
from moeless.workloads.routing_trace import RoutingTrace, read_trace, write_trace

KEEP_ALIVES_S = (1.0, 10.0, 60.0, 300.0)
ACCOUNTINGS = ("billed", "resident", "reserved", "paper")
MACHINE, DEVICES = "a6000", 8
Floats = NDArray[np.float64]


class Case(NamedTuple):
    """One replay."""

    workload: str
    policy: str
    keep_alive_s: float
    tier: str
    wakes: bool = True


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A trace of steps in files, and what one of its experts looks like."""

    routing: Path
    arrivals: Path | None
    expert: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Gigabyte-seconds by accounting, and when each step arrived, began and ended [S]."""

    gb_s: dict[str, float]
    arrival_s: Floats
    start_s: Floats
    end_s: Floats
    all_bytes: int
    load_all_s: float


def replay(case: Case, workload: Workload) -> Outcome:
    """Replay a case here."""
    prepared = prepare_replay(
        ReplayTask(
            routing=workload.routing,
            arrivals=workload.arrivals,
            policies=(case.policy,),
            devices=DEVICES,
            cost_model=MACHINE,
            expert_shape=workload.expert,
            keep_alive_s=case.keep_alive_s,
            options=PolicyOptions(memory_factor="auto"),  # as when serving
        )
    )
    prepared = replace(prepared, load_s=load_s(prepared, case.tier))
    recording = record(case, prepared)
    trace = prepared.trace
    figures = measure_policy(
        recording, trace.loads_NLE, config=metrics_config(prepared, case.policy)
    )
    assert trace.time_s_N is not None
    functions = trace.meta.num_layers * trace.meta.num_experts
    return Outcome(
        gb_s=figures["gb_s"],
        arrival_s=trace.time_s_N - trace.time_s_N[0],
        start_s=recording.start_s_S,
        end_s=recording.start_s_S + recording.layer_s_SL.sum(axis=1),
        all_bytes=functions * prepared.expert.num_bytes,
        load_all_s=math.ceil(functions / DEVICES) * prepared.load_s,
    )


def load_s(prepared: PreparedReplay, tier: str) -> float:
    """Seconds that one expert occupies a device's link."""
    links = LinkTimes.of(device_preset(MACHINE))
    if tier == "host":
        return links.load_s(prepared.expert.num_bytes, "host")
    return prepared.expert.num_bytes * DEVICES / links.store_bytes_s  # a share of one drive


def record(case: Case, prepared: PreparedReplay) -> Recording:
    """As ``moeless replay`` does it, but loads ahead can be left out."""
    trace, clock, options = prepared.trace, SimulatedClock(), prepared.task.options
    keep_s = math.inf if is_serverful(case.policy) else case.keep_alive_s
    policies = build_policy_set(
        case.policy,
        cost=prepared.time_model.cost,
        options=options,
        clock=clock,
        history=prepared.prediction.history,
    )
    return replay_policy(
        trace,
        policies,
        clock=clock,
        time_model=prepared.time_model,
        forecast=build_forecast(prepared.prediction, trace, seed=prepared.task.seed),
        keep_alive=KEEP_ALIVES.create("fixed", seconds=keep_s),
        config=ReplayConfig(
            num_devices=DEVICES,
            device_bytes=prepared.device_bytes,
            expert=prepared.expert,
            load_s=prepared.load_s,
            lookahead=prepared.prediction.distance,
            tick_s=None if math.isinf(keep_s) else min(max(keep_s / 10, 0.25), 30.0),
            max_replicas=max_replicas(
                case.policy,
                options,
                num_experts=trace.meta.num_experts,
                num_devices=DEVICES,
            ),
            wake_ahead=case.wakes,
        ),
    )


def whole_model(static: Outcome, keep_alive_s: float) -> Outcome:
    """All experts leave together and are loaded together; steps take as long as in ``static``."""
    run_s = static.end_s - static.start_s
    start_s, end_s = np.empty_like(run_s), np.empty_like(run_s)
    first = num_warm_up_steps(len(run_s))
    free_s, waited_s, gone_s = 0.0, 0.0, 0.0
    for step, arrival_s in enumerate(static.arrival_s.tolist()):
        begin_s = max(arrival_s, free_s)
        load = static.load_all_s if begin_s - free_s > keep_alive_s else 0.0
        if load and step > first:
            gone_s += begin_s - free_s - keep_alive_s
            gone_s += load / 2  # bytes arrive evenly: half of them on average while loading
            waited_s += load
        start_s[step] = begin_s
        free_s = end_s[step] = begin_s + load + run_s[step]
    span_s = end_s[-1] - start_s[first]
    gb = static.all_bytes / 1e9
    static_span_s = static.end_s[-1] - static.start_s[first]
    return replace(
        static,
        gb_s={
            "billed": static.gb_s["billed"],
            "resident": gb * (span_s - gone_s),
            "reserved": static.gb_s["reserved"] * span_s / static_span_s,
            "paper": static.gb_s["paper"] + gb * waited_s,
        },
        start_s=start_s,
        end_s=end_s,
    )


def added_s(outcome: Outcome, warm: Outcome, requests_S: NDArray[np.int64]) -> Floats:
    """What each request waits longer than if nothing ever left, warm-up left out."""
    first = num_warm_up_steps(len(outcome.end_s))
    late_S = np.maximum(outcome.end_s - warm.end_s, 0.0)
    return np.repeat(late_S[first:], requests_S[first:])


def rows_of(
    name: str, done: dict[Case, Outcome], requests_S: NDArray[np.int64], tiers: tuple[str, ...]
) -> Iterator[list[object]]:
    """Rows of a workload."""
    for tier in tiers:
        static = done[Case(name, "static", math.inf, tier)]
        kept = done[Case(name, "moeless", math.inf, tier)]
        lines = [("static", math.inf, static, static), ("moeless", math.inf, kept, kept)]
        for keep_s in KEEP_ALIVES_S:
            woken = done[Case(name, "moeless", keep_s, tier)]
            asked = done[Case(name, "moeless", keep_s, tier, wakes=False)]
            lines += [
                ("moeless", keep_s, woken, kept),
                ("moeless, unpipelined", keep_s, asked, kept),
                ("whole model", keep_s, whole_model(static, keep_s), static),
            ]
        for system, keep_s, outcome, warm in lines:
            wait_ms = added_s(outcome, warm, requests_S) * 1e3
            points = percentiles(wait_ms)
            yield [
                name,
                tier,
                system,
                keep_s,
                *(round(outcome.gb_s[each], 3) for each in ACCOUNTINGS),
                round(outcome.gb_s["resident"] / static.gb_s["resident"], 4),
                round(float(wait_ms.mean()), 3),
                *(round(points[point], 3) for point in ("p50", "p99")),
                round(float(wait_ms.max()), 3),
                round(float((wait_ms > 1.0).mean()), 4),
            ]


COLUMNS = (
    "workload",
    "weights_in",
    "system",
    "keep_alive_s",
    *(f"{each}_gb_s" for each in ACCOUNTINGS),
    "resident_vs_static",
    "added_wait_mean_ms",
    "added_wait_p50_ms",
    "added_wait_p99_ms",
    "added_wait_max_ms",
    "requests_waiting_over_1_ms",
)


def at_arrivals(trace: RoutingTrace, second_S: Floats) -> RoutingTrace:
    """Recorded steps with tokens, one for each second with arrivals; then from the first again."""
    busy = np.flatnonzero(trace.tokens_N)
    chosen = busy[np.arange(len(second_S)) % len(busy)]
    return replace(
        trace,
        loads_NLE=trace.loads_NLE[chosen],
        tokens_N=trace.tokens_N[chosen],
        time_s_N=second_S.copy(),
        decode_tokens_N=None,
        predicted_NLE=None,
        group_N=None,
        topk_ids_TLK=None,
        topk_offsets=None,
    )


def write_table(rows: list[list[object]], path: Path, about: str) -> None:
    """The same as Markdown, without all columns."""
    shown = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    with path.open("w", encoding="utf-8") as file:
        file.write(f"<!-- {about} -->\n\n")
        file.write("| " + " | ".join(COLUMNS[i].replace("_", " ") for i in shown) + " |\n")
        file.write("|---" * len(shown) + "|\n")
        for row in rows:
            file.write("| " + " | ".join(str(row[i]) for i in shown) + " |\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--demo-trace", type=Path, help="recorded routing of a demo model")
    parser.add_argument("--demo-expert", default="576x40", help="shape of its experts")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    data = Path(os.environ["MOELESS_DATA_DIR"])
    arrivals = data / "arrivals/AzureLLMInferenceTrace_code.csv"
    second_R = np.floor(read_arrivals(arrivals).time_s_R)
    second_S, requests_S = np.unique(second_R, return_counts=True)
    with tempfile.TemporaryDirectory() as folder:
        workloads = {
            "mixtral-8x7b": Workload(
                routing=data / "routing/mixtral-8x7b_mmlu_requests.npz",
                arrivals=arrivals,
                expert=None,
            )
        }
        if options.demo_trace is not None:
            path = Path(folder) / "demo.npz"
            write_trace(at_arrivals(read_trace(options.demo_trace), second_S), path)
            workloads["demo"] = Workload(routing=path, arrivals=None, expert=options.demo_expert)
        tiers = dict.fromkeys(workloads, ("host", "store"))
        cases = [
            case
            for name, known in tiers.items()
            for tier in known
            for case in (
                Case(name, "static", math.inf, tier),
                Case(name, "moeless", math.inf, tier),
                *(
                    Case(name, "moeless", keep_s, tier, wakes)
                    for keep_s in KEEP_ALIVES_S
                    for wakes in (True, False)
                ),
            )
        ]
        with ProcessPoolExecutor(options.jobs) as pool:
            found = pool.map(replay, cases, [workloads[case.workload] for case in cases])
            done = dict(zip(cases, found, strict=True))
    about = provenance("simulated").removeprefix("# ")
    rows = [row for name in workloads for row in rows_of(name, done, requests_S, tiers[name])]
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "bursty_cost.csv").open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {about}\n")
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    write_table(rows, options.out / "bursty_cost.md", about)
    print((options.out / "bursty_cost.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
