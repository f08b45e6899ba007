"""How well the linear time model predicts measured kernels that it was not fitted to.

Run ``python benchmarks/validate_kernels.py FILE.parquet`` with aiconfigurator's MoE measurements
of vLLM on an H200. For each shape the model is fitted to the loads of one power-law exponent and
predicts those of the other, bfloat16, one to 16 expert-parallel ranks, 128 tokens and more. Each
measurement is a mean over five draws that were not recorded, so the model is given the means
over many draws of the same distribution, and even a perfect model would be off by the *chance*
columns. Errors are |predicted / measured - 1|.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from moeless.core.layer_cost import LayerCost
from moeless.costs.busiest_rank import draw_busiest_rank
from moeless.costs.fitting import KernelFit, fit_kernels
from moeless.costs.models import known_model
from moeless.costs.time_models import build_time_model

MODELS = ("mixtral-8x7b", "llama-4-scout")
EXPONENTS = (1.01, 1.2)
MEASURED_DRAWS = 5
COLUMNS = (
    "moe_dtype",
    "num_tokens",
    "hidden_size",
    "inter_size",
    "topk",
    "num_experts",
    "moe_tp_size",
    "moe_ep_size",
    "distribution",
    "latency",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cases:
    """Measured seconds [N], and what each case's busiest rank had to do in many draws [N, R]."""

    exponent_N: np.ndarray
    ranks_N: np.ndarray
    seconds_N: np.ndarray
    tokens_NR: np.ndarray
    touched_NR: np.ndarray

    def of(self, keep_N):
        """The chosen cases."""
        return Cases(**{name: value[keep_N] for name, value in vars(self).items()})


def read_cases(path: Path, model: str, *, draws: int, seed: int, least_tokens: int = 128) -> Cases:
    shape = known_model(model)
    wanted = {
        "moe_dtype": "bfloat16",
        "hidden_size": shape.expert.hidden,
        "inter_size": shape.expert.intermediate,
        "num_experts": shape.num_experts,
        "topk": shape.top_k,
        "moe_tp_size": 1,
    }
    rows = [
        row
        for row in pq.read_table(path, columns=list(COLUMNS)).to_pylist()
        if all(row[key] == value for key, value in wanted.items())
        and row["moe_ep_size"] <= 16
        and row["num_tokens"] >= least_tokens
        and row["distribution"].startswith("power_law_")
    ]
    if not rows:
        raise SystemExit(f"{path}: no bfloat16 power-law rows of the shape of {model}")
    rng = np.random.default_rng(seed)
    exponents = [float(row["distribution"].removeprefix("power_law_")) for row in rows]
    drawn = [
        [
            draw_busiest_rank(
                rng,
                tokens=row["num_tokens"],
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                num_ranks=row["moe_ep_size"],
                exponent=exponent,
            )
            for _ in range(draws)
        ]
        for row, exponent in zip(rows, exponents, strict=True)
    ]
    return Cases(
        exponent_N=np.array(exponents),
        ranks_N=np.array([row["moe_ep_size"] for row in rows]),
        seconds_N=np.array([row["latency"] for row in rows]) / 1e3,
        tokens_NR=np.array([[count.sum() for count in case] for case in drawn]),
        touched_NR=np.array([[np.count_nonzero(count) for count in case] for case in drawn]),
    )


def fit(cases: Cases) -> KernelFit:
    return fit_kernels(
        cases.tokens_NR.mean(axis=1), cases.touched_NR.mean(axis=1), cases.seconds_N
    )


def predict_NR(cost: KernelFit | LayerCost, cases: Cases) -> np.ndarray:
    return cost.base_s + cost.touch_s * cases.touched_NR + cost.token_s * cases.tokens_NR


def errors(cost: KernelFit | LayerCost, cases: Cases) -> np.ndarray:
    return np.abs(predict_NR(cost, cases).mean(axis=1) / cases.seconds_N - 1)


def chance(cost: KernelFit | LayerCost, cases: Cases, *, seed: int) -> np.ndarray:
    """Errors that the model would make if it were exact, from the measured draws alone."""
    predicted_NR = predict_NR(cost, cases)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, predicted_NR.shape[1], (20, MEASURED_DRAWS))
    measured = predicted_NR[:, picks].mean(axis=2)
    return np.abs(predicted_NR.mean(axis=1)[:, None] / measured - 1).ravel()


def percent(error_N: np.ndarray) -> str:
    return f"{100 * np.median(error_N):6.1f} {100 * np.quantile(error_N, 0.9):6.1f}"


def coefficients(cost: KernelFit | LayerCost) -> str:
    return (
        f"t0 {cost.base_s * 1e3:.3f} ms, kappa {cost.touch_s * 1e3:.4f} ms, "
        f"s {cost.token_s * 1e6:.3f} us"
    )


def report(path: Path, model: str, *, draws: int, seed: int) -> None:
    cases = read_cases(path, model, draws=draws, seed=seed)
    print(f"\n{model}: {len(cases.seconds_N)} measurements")
    print("fitted  predicted  ranks  median    p90   chance: median p90   (percent)")
    for fitted, predicted in (EXPONENTS, EXPONENTS[::-1]):
        found = fit(cases.of(cases.exponent_N == fitted))
        rest = cases.of(cases.exponent_N == predicted)
        error_N = errors(found, rest)
        for ranks in (*np.unique(rest.ranks_N), None):
            keep_N = rest.ranks_N == ranks if ranks else np.ones(len(error_N), dtype=bool)
            print(
                f"{fitted:6}  {predicted:9}  {ranks or 'all':>5}  {percent(error_N[keep_N])}"
                f"          {percent(chance(found, rest.of(keep_N), seed=seed))}"
            )
        print(f"        {coefficients(found)}")
    preset = build_time_model("h200", known_model(model).expert, 8)
    print(f"preset h200, all of them:      {percent(errors(preset.cost, cases))}")
    print(f"        {coefficients(preset.cost)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Validate the linear time model.")
    parser.add_argument("data", type=Path, help="parquet file of measurements")
    parser.add_argument("--draws", type=int, default=200, help="draws per measurement")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for model in MODELS:
        report(options.data, model, draws=options.draws, seed=options.seed)


if __name__ == "__main__":
    main()
