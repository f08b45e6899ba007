"""The report of a soak: figures, a table to read, and what is wrong."""

from collections import Counter

from chaos.faults import Fault
from chaos.traffic import Outcome

MEMORY_MAY_CHANGE = 0.03
_MIB = 1 << 20
_SLOWEST = 12


def compare(calm: dict, rough: dict, name: str) -> float | None:
    """99th percentile with faults as a multiple of that in peace."""
    if not rough[name] or not calm[name]:
        return None
    return round(rough[name]["p99"] / calm[name]["p99"], 2)


def slowest_requests(outcome: Outcome, faults: list[Fault]) -> list[dict]:
    """Requests that waited longest for a token, and the fault before they got it."""
    found = []
    for arrival_s, seconds in sorted(outcome.first_s, key=lambda f: -f[1])[:_SLOWEST]:
        before = [f for f in faults if f.at_s <= arrival_s + seconds]
        found.append(
            {
                "arrived_s": round(arrival_s, 2),
                "ttft_s": round(seconds, 3),
                "fault": before[-1].kind if before else None,
                "fault_s": before[-1].at_s if before else None,
            }
        )
    return found


def memory_change(before: dict, after: dict) -> float:
    """Relative change of all memory, experts' own subtracted from both."""
    return round(after["other_bytes"] / before["other_bytes"] - 1.0, 4)


def find_problems(report: dict) -> list[str]:
    """What is wrong, if anything."""
    problems = [
        f"{name}: {report[name][kind]} {kind}: {report[name]['examples']}"
        for name in ("peace", "with_faults", "afterwards")
        for kind in ("failed", "wrong")
        if report[name][kind]
    ]
    done = sum(report["faults"].values())
    if done < report["faults_wanted"]:
        problems.append(f"only {done} of {report['faults_wanted']} faults could be done")
    if abs(report["memory_change"]) > MEMORY_MAY_CHANGE:
        problems.append(f"memory changed by {report['memory_change']:+.1%}")
    if report["stopped_workers_left"]:
        problems.append(f"workers {report['stopped_workers_left']} were left stopped")
    if report["processes_left"]:
        problems.append(f"{report['processes_left']} processes were left after the server's end")
    return problems


def count_kinds(faults: list[Fault]) -> dict[str, int]:
    """How often each kind was done."""
    return dict(sorted(Counter(f.kind for f in faults if f.victim is not None).items()))


def to_table(report: dict) -> str:
    """What an operator reads."""
    lines = [
        f"soak: {report['minutes']:g} minutes with faults after {report['peace_minutes']:g} in "
        f"peace, seed {report['seed']}",
        f"arrivals: {report['arrivals']}",
        "faults: " + ", ".join(f"{n} {kind}" for kind, n in report["faults"].items()),
        "",
        f"{'':<14}{'requests':>9}{'failed':>8}{'wrong':>7}{'close':>7}"
        f"{'TTFT p50':>10}{'p99':>8}{'max':>8}{'TPOT p50':>10}{'p99':>8}{'max':>8}",
    ]
    for name in ("peace", "with_faults", "afterwards"):
        row = report[name]
        lines.append(
            f"{name.replace('_', ' '):<14}{row['requests']:>9}{row['failed']:>8}{row['wrong']:>7}"
            f"{row['differ_at_a_close_call']:>7}{_seconds(row['ttft_s'])}{_seconds(row['tpot_s'])}"
        )
    ttft, tpot = report["p99_ttft_ratio"], report["p99_tpot_ratio"]
    lines += ["", f"p99 with faults / in peace: TTFT x {ttft}, TPOT x {tpot}", ""]
    before, after = report["memory_before"], report["memory_after"]
    lines.append(f"{'memory, MiB *':<14}{'before':>9}{'after':>9}{'change':>9}")
    for role in sorted(before["roles"] | after["roles"]):
        sizes = [_held(stock, role) for stock in (before, after)]
        lines.append(_memory_row(role, *sizes))
    lines.append(_memory_row("experts", before["expert_bytes"], after["expert_bytes"]))
    lines.append(_memory_row("without them", before["other_bytes"], after["other_bytes"]))
    lines += ["* anonymous and shared pages, shared ones counted once; no pages of files", ""]
    lines.append(
        f"this program itself stood still for {report['stood_still_s']['peace']:g} s in peace and "
        f"{report['stood_still_s']['with_faults']:g} s with faults (0 on a machine of its own)"
    )
    problems = find_problems(report)
    lines += ["", *(f"problem: {p}" for p in problems)] if problems else ["", "no problems"]
    return "\n".join(lines)


def _seconds(tail: dict[str, float]) -> str:
    if not tail:
        return f"{'-':>10}{'-':>8}{'-':>8}"
    return f"{tail['p50']:>10.3f}{tail['p99']:>8.3f}{tail['max']:>8.3f}"


def _held(stock: dict, role: str) -> int:
    sizes = stock["roles"].get(role, {})
    return sizes.get("anonymous", 0) + sizes.get("shared", 0)


def _memory_row(name: str, before: int, after: int) -> str:
    change = f"{after / before - 1:+.1%}" if before else "-"
    return f"{name:<14}{before / _MIB:>9.1f}{after / _MIB:>9.1f}{change:>9}"
