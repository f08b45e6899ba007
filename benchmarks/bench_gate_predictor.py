"""How long one load prediction takes on one core.

Run ``OMP_NUM_THREADS=1 python benchmarks/bench_gate_predictor.py``; it prints p50 and p99 in
microseconds for several numbers of tokens T, with the shapes of the demo model.
"""

from time import perf_counter

import torch

from moeless.core.router import RouterRule
from moeless.learned.gate_predictor import Gate, GatePredictor
from moeless.telemetry.percentiles import percentiles

HIDDEN, EXPERTS, TOP_K, ROUNDS = 576, 16, 8, 1000


def main() -> None:
    torch.set_num_threads(1)
    rules = {
        "topk_softmax": RouterRule(kind="topk_softmax", path="router", top_k=TOP_K),
        "sigmoid_group": RouterRule(
            kind="sigmoid_group", path="gate", top_k=TOP_K, num_groups=4, top_groups=2
        ),
    }
    print("rule              T        p50       p99   (microseconds)")
    for name, rule in rules.items():
        gate = Gate(torch.randn(EXPERTS, HIDDEN), None, rule)
        predictor = GatePredictor([gate, gate])
        for tokens in (1, 16, 64, 256):
            x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
            samples = []
            for _ in range(ROUNDS):
                start = perf_counter()
                predictor.predict(0, x)
                samples.append((perf_counter() - start) * 1e6)
            found = percentiles(samples[ROUNDS // 10 :])
            print(f"{name:15} {tokens:4}  {found['p50']:9.1f} {found['p99']:9.1f}")


if __name__ == "__main__":
    main()
