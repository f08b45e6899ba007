"""What ``moeless replay`` prints: the comparison of policies, and explanations."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print one column per policy.

    Args:
        console: Where to.
        report: As written to the JSON file.
    """
    trace, config = report["trace"], report["config"]
    console.print(
        f"{trace['model']}, {trace['phase']}: {trace['steps']} steps of {trace['layers']} layers, "
        f"{trace['experts']} experts, top-{trace['top_k']}; {trace['warm_up_steps']} steps of "
        f"warm-up left out, {trace['zero_token_layer_steps']} layer-steps without tokens",
        highlight=False,
    )
    console.print(
        f"{config['devices']} devices; time: {config['cost']['label']}; prediction "
        f"{config['prediction']} at distance {config['distance']}; seed {config['seed']}",
        highlight=False,
    )
    policies = report["policies"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for name in policies:
        table.add_column(name, justify="right", no_wrap=True)
    sampled = any("optimum" in figures for figures in policies.values())
    rows_P = [
        _rows(figures) | (_optimum_rows(figures.get("optimum")) if sampled else {})
        for figures in policies.values()
    ]
    for label in rows_P[0]:
        table.add_row(label, *(rows[label] for rows in rows_P))
    console.print(table)
    console.print(
        "straggler = max device tokens ÷ ceil(mean), 1 is ideal; ÷ bound = layer time over the "
        "least of any lossless split; memory = warm replicas over experts; cold = replicas "
        "loaded per layer-step, blocking = those that a token waited for; GB·s = memory × time: "
        "billed while executing, resident on devices, reserved devices, and the paper's "
        "comparison.",
        style="dim",
        highlight=False,
    )
    if sampled:
        console.print(
            "÷ optimum = layer time over the least of any split over the same warm replicas, in "
            "sampled layer-steps; those not solved in time and those whose tokens waited for a "
            "load are left out.",
            style="dim",
            highlight=False,
        )
    if "oracle" in policies:
        console.print("oracle is lossy: it ignores the gate.", style="dim", highlight=False)


def _rows(figures: dict[str, Any]) -> dict[str, str]:
    ratio, layer_ms, bound, gb_s = (
        figures[name] for name in ("straggler_ratio", "layer_forward_ms", "bound_ratio", "gb_s")
    )
    return {
        "straggler mean": f"{ratio['mean']:.4f}",
        "straggler p99": f"{ratio['p99']:.3f}",
        "layer ms mean": f"{layer_ms['mean']:.4g}",
        "layer ms p99": f"{layer_ms['p99']:.4g}",
        "÷ bound mean": f"{bound['mean']:.4f}",
        "memory ÷ E": f"{figures['memory_factor']:.3f}",
        "cold/layer": f"{figures['cold_starts_per_layer_step']:.4f}",
        "blocking/layer": f"{figures['blocking_loads_per_layer_step']:.4f}",
        **{
            f"{name} GB·s": _short(gb_s[name])
            for name in ("billed", "resident", "reserved", "paper")
        },
        "plan µs p50": f"{figures['plan_us']['p50']:.0f}",
        "split µs p50": f"{figures['split_us']['p50']:.1f}",
    }


def _optimum_rows(optimum: dict[str, Any] | None) -> dict[str, str]:
    ratio = None if optimum is None else optimum["ratio"]
    return {
        "÷ optimum mean": "-" if ratio is None else f"{ratio['mean']:.4f}",
        "÷ optimum p99": "-" if ratio is None else f"{ratio['p99']:.3f}",
        "solved": "-" if optimum is None else f"{optimum['solved']}/{optimum['samples']}",
    }


def _short(number: float) -> str:
    if number >= 1e6:
        return f"{number / 1e6:.3f}M"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def print_explanation(console: Console, name: str, explanation: dict[str, Any]) -> None:
    """Print why a layer's replicas were what they were.

    Args:
        console: Where to.
        name: The policy.
        explanation: As ``simulator.explain`` makes it.
    """
    step, layer = explanation["step"], explanation["layer"]
    table = Table(
        title=f"{name}: step {step}, layer {layer}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("expert", "expected", "true"):
        table.add_column(column, justify="right")
    table.add_column("planned on", no_wrap=True)
    table.add_column("warm on", no_wrap=True)
    table.add_column("tokens by device", no_wrap=True)
    expected_E = explanation["expected_load"]
    for expert, true in enumerate(explanation["true_load"]):
        shares = explanation["shares"][expert]
        table.add_row(
            str(expert),
            "-" if expected_E is None else f"{expected_E[expert]:.1f}",
            str(true),
            _join(explanation["planned"][expert]),
            _join(explanation["warm"][expert]),
            ", ".join(f"{device}: {tokens}" for device, tokens in enumerate(shares) if tokens),
        )
    console.print(table)
    for line in _lines(explanation):
        console.print(line, highlight=False, markup=False)


def _lines(explanation: dict[str, Any]) -> list[str]:
    planned_for = explanation["planned_for_step"]
    price = explanation["load_price"]
    lines = [
        f"device tokens {_join(explanation['device_tokens'])}; ideal "
        f"{explanation['ideal_device_tokens']}",
        f"layer time {explanation['layer_s'] * 1e3:.4g} ms, bound "
        f"{explanation['bound_s'] * 1e3:.4g} ms",
        "no plan is in force"
        if planned_for is None
        else f"the plan in force was made for step {planned_for}",
        f"a load moves {price['bytes']:,} bytes and takes {price['link_s'] * 1e3:.4g} ms of a "
        f"free link",
    ]
    lines += [
        f"loaded expert {load['expert']} onto device {load['device']} in "
        f"{load['load_s'] * 1e3:.4g} ms{', tokens waited' if load['blocking'] else ''}"
        for load in explanation["loaded"]
    ]
    lines += [
        f"evicted expert {gone['expert']} from device {gone['device']} ({gone['reason']})"
        for gone in explanation["evicted"]
    ]
    if not explanation["loaded"] and not explanation["evicted"]:
        lines.append("nothing was loaded or evicted since the layer ran before")
    if explanation["reason"]:
        lines += [f"the planner says: {explanation['reason']}"]
    return lines


def _join(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers) or "-"
