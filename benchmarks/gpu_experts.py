"""Experts on one real GPU: shares of virtual devices, loads from pinned memory, and overlap.

Three parts, for each of the MoEless paper's models at its true expert shape:

* ``layer_times.csv``: the shares that policies give each of eight virtual devices are computed one
  after another, each as two grouped matrix products; a layer takes as long as its slowest device
  (emulated). The time model that the policies decide by is fitted on this GPU first.
* ``loads.csv``: experts are copied from pinned host memory, alone and beside running products.
* ``overlap.csv``: what it costs to look at a gate's choice, to split, to plan the next layer and
  to load an expert for it, on a side stream beside the products, and one after another.

    python benchmarks/gpu_experts.py --out DIR             about four minutes at most
    python benchmarks/gpu_experts.py --out DIR --device cpu    tiny shapes, to see that it runs

Routing is synthetic: popularity falls with rank to the power of 1.2 or 1.01, as published for MoE
models. ``summary.json`` names the device and everything that the numbers depend on.
"""

import argparse
import csv
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from provenance import provenance
from torch.nn.functional import grouped_mm, silu

from moeless.bootstrap.policies import PolicyOptions, build_policy_set
from moeless.core.clock import SystemClock
from moeless.core.layer_cost import LayerCost
from moeless.core.model import ExpertShape
from moeless.core.plan import PlanRequest
from moeless.costs.fitting import fit_kernels
from moeless.costs.models import known_model
from moeless_experiments.measured.calibration import as_cost, draw_steps
from moeless_experiments.measured.emulation import static_shares
from moeless_experiments.measured.layer_shape import LayerShape
from moeless_experiments.measured.replaying import MEMORY_FACTOR, replay_shares
from moeless_experiments.measured.workload import Workload

DEVICES = 8
POLICIES = ("static", "eplb", "swift", "paper", "moeless")
MODELS = ("mixtral-8x7b", "phi-3.5-moe", "llama-4-scout")
STRENGTHS = (1.01, 1.2)
TOKENS = (8, 64, 512, 2048)
STEPS, RUN_STEPS = 24, 4
REPEATS, WARM_UPS = 5, 2


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it runs.

    Args:
        device: Of torch.
        name: Of the hardware.
        tiny: Whether shapes are cut down, for a machine without a GPU.
    """

    device: torch.device
    name: str
    tiny: bool

    def wait(self) -> None:
        """Until everything that was started is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def side_stream(self):
        """A stream beside the main one; None where there are no streams."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def time_s(self, call: Callable[[], object]) -> float:
        """Median seconds of a call, all its work on the device included."""
        for _ in range(0 if self.tiny else WARM_UPS):
            call()
        times = []
        for _ in range(1 if self.tiny else REPEATS):
            self.wait()
            began_s = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - began_s)
        return float(np.median(times))


class GroupedExperts:
    """Experts of one layer as two grouped matrix products.

    Args:
        shape: Of the layer.
        machine: Where.
    """

    def __init__(self, shape: LayerShape, machine: Machine) -> None:
        options = {"device": machine.device, "dtype": torch.bfloat16}
        self._in_EHI = torch.randn(shape.experts, shape.hidden, 2 * shape.intermediate, **options)
        self._in_EHI /= shape.hidden**0.5
        self._out_EIH = torch.randn(shape.experts, shape.intermediate, shape.hidden, **options)
        self._out_EIH /= shape.intermediate**0.5
        self._x_SH = torch.randn(8192, shape.hidden, **options)
        self.device = machine.device

    def stage(self, count_E: np.ndarray) -> Callable[[], torch.Tensor]:
        """What computes so many tokens of each expert; experts without tokens are not read."""
        rows = int(count_E.sum())
        offsets_E = torch.from_numpy(np.cumsum(count_E).astype(np.int32)).to(self.device)
        x_SH = self._x_SH[:rows]

        def compute() -> torch.Tensor:
            gate, up = grouped_mm(x_SH, self._in_EHI, offs=offsets_E).chunk(2, dim=-1)
            return grouped_mm(silu(gate) * up, self._out_EIH, offs=offsets_E)

        return compute


def find_machine(name: str) -> Machine:
    """The device asked for."""
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device; use --device cpu to see that it runs")
        device = torch.device(name)
        return Machine(device=device, name=torch.cuda.get_device_name(device), tiny=False)
    return Machine(device=torch.device("cpu"), name="CPU", tiny=True)


def shape_of(model: str, machine: Machine) -> LayerShape:
    """Shape of a model's layers; cut down where the machine is no GPU."""
    known = known_model(model)
    assert known is not None
    # Rows of grouped products must be multiples of 16 bytes.
    cut = (lambda size: 16 * (size // 1024)) if machine.tiny else (lambda size: size)
    return LayerShape(
        name=model,
        hidden=cut(known.expert.hidden),
        intermediate=cut(known.expert.intermediate),
        experts=known.num_experts,
        top_k=known.top_k,
    )


def draw_power_law(shape: LayerShape, tokens: int, strength: float, seed: int) -> Workload:
    """Steps whose experts are the more popular the higher their rank."""
    rng = np.random.default_rng(seed)
    log_E = -strength * np.log(np.arange(1, shape.experts + 1))
    log_LE = np.stack([rng.permutation(log_E) for _ in range(2)])
    ids = []
    for _ in range(STEPS):
        score = log_LE[:, None] + rng.gumbel(size=(2, tokens, shape.experts))
        ids.append(np.argsort(-score, axis=2)[:, :, : shape.top_k])
    return Workload(name=f"power law {strength}", shape=shape, ids=tuple(ids), source="synthetic")


def calibrate(shape: LayerShape, experts: GroupedExperts, machine: Machine) -> LayerCost:
    """Fit a device's time to tokens and touched experts, of made-up shares."""
    tokens, touched, seconds = [], [], []
    batches = (4, 64, 512) if machine.tiny else (1, 8, 32, 128, 512, 2048)
    steps = list(draw_steps(batches, shape.experts, shape.top_k, skew=1.0, drift=0.5, seed=1))
    for devices in (1, 2, DEVICES):
        for shares in static_shares(steps, shape.experts, devices):
            count_E = shares[0][:, 0]
            if count_E.any():
                tokens.append(float(count_E.sum()))
                touched.append(float(np.count_nonzero(count_E)))
                seconds.append(machine.time_s(experts.stage(count_E)))
    return as_cost(fit_kernels(np.array(tokens), np.array(touched), np.array(seconds)))


def time_layers(
    shape: LayerShape, experts: GroupedExperts, machine: Machine, cost: LayerCost, seed: int
) -> Iterable[dict[str, object]]:
    """Layer times of all policies, the slowest virtual device's; a row for each case."""
    for strength in STRENGTHS[1:] if machine.tiny else STRENGTHS:
        for tokens in TOKENS[:2] if machine.tiny else TOKENS:
            workload = draw_power_law(shape, tokens, strength, seed)
            trace = workload.as_trace()
            static_s = 0.0
            for policy in POLICIES:
                replayed = replay_shares(
                    trace,
                    policy,
                    devices=DEVICES,
                    cost=cost,
                    expert=ExpertShape(hidden=shape.hidden, intermediate=shape.intermediate),
                    seed=seed,
                )
                layers = []
                for share_LED in replayed.share_SLED[-RUN_STEPS:]:
                    for share_ED in share_LED:
                        used = [share_ED[:, d] for d in range(DEVICES) if share_ED[:, d].any()]
                        layers.append(max(machine.time_s(experts.stage(c)) for c in used))
                simulated_s = float(replayed.layer_s_SL[-RUN_STEPS:].mean())
                mean_s = float(np.mean(layers))
                static_s = mean_s if policy == "static" else static_s
                yield {
                    "model": shape.name,
                    "routing": workload.name,
                    "tokens": tokens,
                    "policy": policy,
                    "layer_ms": 1e3 * mean_s,
                    "to_static": mean_s / static_s,
                    "simulated_ms": 1e3 * simulated_s,
                }


class ExpertLoader:
    """Copies one expert from pinned host memory to a place on the device.

    Args:
        shape: Of the layer.
        machine: Where.
    """

    def __init__(self, shape: LayerShape, machine: Machine) -> None:
        sizes = 3 * shape.hidden * shape.intermediate
        pinned = machine.device.type == "cuda"
        self._host = torch.zeros(sizes, dtype=torch.bfloat16, pin_memory=pinned)
        self._place = torch.empty(sizes, dtype=torch.bfloat16, device=machine.device)
        self._stream = machine.side_stream()
        self.num_bytes = self._host.nbytes

    def load(self) -> None:
        """Start the copy on the side stream."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._place.copy_(self._host, non_blocking=True)


def time_loads(shape: LayerShape, experts: GroupedExperts, machine: Machine) -> dict[str, object]:
    """Loads alone, products alone, and both at once."""
    loader = ExpertLoader(shape, machine)
    rows = 64 if machine.tiny else 4096
    compute = experts.stage(np.full(shape.experts, rows // shape.experts))

    def both() -> None:
        loader.load()
        compute()

    load_s, compute_s = machine.time_s(loader.load), machine.time_s(compute)
    return {
        "model": shape.name,
        "expert_mb": loader.num_bytes / 1e6,
        "load_ms": 1e3 * load_s,
        "load_gb_per_s": loader.num_bytes / load_s / 1e9,
        "products_ms": 1e3 * compute_s,
        "both_ms": 1e3 * machine.time_s(both),
    }


def time_overlap(
    shape: LayerShape, experts: GroupedExperts, machine: Machine, cost: LayerCost, seed: int
) -> Iterable[dict[str, object]]:
    """A layer on the fullest virtual device, with what surrounds it; a row for each batch."""
    options = PolicyOptions(memory_factor=MEMORY_FACTOR)
    policies = build_policy_set("moeless", cost=cost, options=options, clock=SystemClock())
    loader = ExpertLoader(shape, machine)
    none_ED = np.zeros((shape.experts, DEVICES), dtype=np.uint8)
    room_D = np.full(DEVICES, shape.experts)

    def plan(load_E: np.ndarray, before_ED: np.ndarray) -> np.ndarray:
        request = PlanRequest(
            step=0,
            layer=0,
            load_E=load_E,
            previous_ED=before_ED,
            alive_ED=before_ED,
            capacity_D=room_D,
        )
        return policies.planner.plan(request).replicas_ED

    for tokens in TOKENS[:2] if machine.tiny else TOKENS:
        ids = draw_power_law(shape, tokens, STRENGTHS[-1], seed).ids[0][0]
        ids_TK = torch.from_numpy(ids).to(machine.device)
        count_E = np.bincount(ids.ravel(), minlength=shape.experts)
        replicas_ED = plan(count_E.astype(np.float64), none_ED)

        def look_and_split(ids_TK=ids_TK, replicas_ED=replicas_ED) -> np.ndarray:
            seen_E = torch.bincount(ids_TK.reshape(-1), minlength=shape.experts).cpu().numpy()
            return policies.splitter.split(seen_E, replicas_ED.astype(bool))

        share_ED = look_and_split()
        compute = experts.stage(share_ED[:, int(share_ED.sum(axis=0).argmax())])

        def plan_and_load(count_E=count_E, replicas_ED=replicas_ED) -> None:
            plan(count_E.astype(np.float64), replicas_ED)
            loader.load()

        def overlapped(split=look_and_split, compute=compute, after=plan_and_load) -> None:
            split()
            compute()  # runs while the host plans and the side stream loads
            after()

        def serial(split=look_and_split, compute=compute, after=plan_and_load) -> None:
            for part in (split, compute, after):
                part()
                machine.wait()

        yield {
            "model": shape.name,
            "tokens": tokens,
            "products_ms": 1e3 * machine.time_s(compute),
            "look_and_split_ms": 1e3 * machine.time_s(look_and_split),
            "plan_and_load_ms": 1e3 * machine.time_s(plan_and_load),
            "overlapped_ms": 1e3 * machine.time_s(overlapped),
            "serial_ms": 1e3 * machine.time_s(serial),
        }


def write_rows(path: Path, rows: Sequence[dict[str, object]], kind: str) -> None:
    """A CSV file whose first line says where its numbers come from."""
    with path.open("w", encoding="utf8", newline="") as file:
        file.write(provenance(kind) + "\n")
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for a trial")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=330, help="leave models out beyond that")
    args = parser.parse_args()
    machine = find_machine(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    began_s, layers, loads, overlaps, costs = time.perf_counter(), [], [], [], {}
    with torch.inference_mode():
        for model in args.models:
            # As long as the others took on average is what the next one will take.
            took_s = time.perf_counter() - began_s
            if costs and took_s * (1 + 1 / len(costs)) > args.limit_s:
                print(f"{model}: left out, it would take longer than {args.limit_s:.0f} s")
                continue
            shape = shape_of(model, machine)
            experts = GroupedExperts(shape, machine)
            cost = calibrate(shape, experts, machine)
            costs[model] = asdict(cost)
            layers += time_layers(shape, experts, machine, cost, args.seed)
            loads.append(time_loads(shape, experts, machine))
            overlaps += time_overlap(shape, experts, machine, cost, args.seed)
            print(f"{model}: {time.perf_counter() - began_s:.0f} s", flush=True)
            del experts
    where = f"on {machine.name}{', tiny shapes' if machine.tiny else ''}"
    write_rows(args.out / "layer_times.csv", layers, f"emulated {where}")
    write_rows(args.out / "loads.csv", loads, f"measured {where}")
    write_rows(args.out / "overlap.csv", overlaps, f"measured {where}")
    summary = {
        "device": machine.name,
        "tiny": machine.tiny,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seed": args.seed,
        "virtual_devices": DEVICES,
        "memory_factor": MEMORY_FACTOR,
        "cost_s": costs,
        "took_s": round(time.perf_counter() - began_s, 1),
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf8")


if __name__ == "__main__":
    main()
