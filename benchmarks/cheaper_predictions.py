"""What a prediction from fewer tokens or fewer features would lose, on recorded gate inputs.

The product of a prediction takes tokens x hidden x experts multiplications; leaving out tokens or
features is the only way to fewer. Gates are re-fitted to the features that are left. Printed are
mean load accuracies of batches of 256 tokens of conversations that nothing was fitted to, and the
points lost against all tokens and features; in every fourth layer.

    python benchmarks/cheaper_predictions.py RECORDING [--distances 1 3]
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moeless.learned.accuracy import load_accuracies
from moeless.learned.batching import Batching, batch_tokens
from moeless.learned.expected_shares import expected_shares, one_hot
from moeless.learned.gate import Gate
from moeless.learned.judging import Judge, best_spread, judge_of, logit_error
from moeless.learned.layer_tokens import LayerTokens, gather
from moeless.learned.load_predictor import finish_load
from moeless.learned.ridge import RidgeSums
from moeless.learned.shards import GateShards
from moeless.learned.token_rows import TokenRows

_BATCH = 256
_EVERY_LAYERS = 4
_PENALTIES = (1e-3, 1e-2, 1e-1)
_FULL = "all tokens and features"


class Layer:
    """One layer's tokens: to fit to, to decide by, to report on.

    Args:
        parts: The recording's tokens for these.
        gate: The layer's own gate.
        ahead: The layer.
        distance: d.
    """

    def __init__(self, parts: list[TokenRows], gate: Gate, ahead: int, distance: int) -> None:
        self.gate = gate
        self.fit, self.decide, self.report = (
            gather(rows, gate, ahead=ahead, distance=distance) for rows in parts
        )
        self._judge: Judge = judge_of(parts[1])
        experts, hidden = gate.weight.shape
        self._sums = RidgeSums(hidden, experts)
        self._sums.add(self.fit.inputs_TH, self.fit.true_logits_TE)

    def shares(self, features: list[int]) -> Tensor:
        """Expected shares [T, E] of the report's tokens by a gate of some features."""
        best: tuple[float, Gate, float] | None = None
        for penalty in _PENALTIES:
            gate = self._solve(features, penalty)
            logits_TE = gate.logits(self.decide.inputs_TH)
            spread, score = best_spread(
                gate,
                logits_TE,
                self.decide.ids_TK,
                self._judge,
                scale=logit_error(logits_TE, self.decide.true_logits_TE),
            )
            if best is None or score > best[0]:
                best = (score, gate, spread)
        assert best is not None
        return _shares(best[1], self.report, best[2])

    def important(self, count: int) -> list[int]:
        """The features that move the copied gate's logits most."""
        moved_H = self.gate.weight.abs().mean(dim=0) * self.fit.inputs_TH.std(dim=0)
        found: list[int] = sorted(moved_H.topk(count).indices.tolist())
        return found

    def _solve(self, features: list[int], penalty: float) -> Gate:
        """Ridge towards the copied gate, from the sums of the features that are left."""
        hidden = self.gate.weight.shape[1]
        kept = torch.tensor([*features, hidden])  # the bias is the last
        gram, cross = self._sums._gram[kept][:, kept], self._sums._cross[kept]
        prior = torch.zeros_like(cross)
        prior[:-1] = self.gate.weight[:, features].T
        strength = penalty * float(gram.diagonal()[:-1].mean())
        ridge = gram.clone()
        ridge.diagonal()[:-1] += strength
        ridge.diagonal()[-1] += 1e-6 * strength
        solved = prior + torch.cholesky_solve(cross - gram @ prior, torch.linalg.cholesky(ridge))
        weight_HE = torch.zeros(hidden, solved.shape[1])
        weight_HE[features] = solved[:-1].float()
        return self.gate._replace(weight=weight_HE.T.contiguous(), bias=solved[-1].float())


def _shares(gate: Gate, tokens: LayerTokens, spread: float) -> Tensor:
    logits_TE = gate.logits(tokens.inputs_TH)
    return expected_shares(logits_TE, gate.rule, gate.correction, spread=spread)


def _loads(share_TE: Tensor, batch_T: Tensor, every: int = 1) -> np.ndarray:
    """Loads of all batches [N, E], from every so many tokens of each."""
    parts = [torch.nonzero(batch_T == n)[::every, 0] for n in range(int(batch_T.max()) + 1)]
    return torch.stack([share_TE[rows].double().sum(dim=0) for rows in parts]).numpy()


def _ways(layer: Layer, batch_T: Tensor) -> Iterator[tuple[str, np.ndarray]]:
    hidden = layer.gate.weight.shape[1]
    full_TE = layer.shares(list(range(hidden)))
    yield "copied gate", _loads(_shares(layer.gate, layer.report, 0.0), batch_T)
    yield _FULL, _loads(full_TE, batch_T)
    mean_E = full_TE.double().mean(dim=0).numpy()
    for every in (2, 4):
        load_NE = _loads(full_TE, batch_T, every)
        yield f"every {every}. token", load_NE
        mixed_NE = 0.4 * load_NE + 0.6 * mean_E * (_BATCH / every)
        yield f"every {every}. token, mean load weighted 0.6", mixed_NE
    for part in (2, 4, 8):
        yield (
            f"1/{part} of the features",
            _loads(layer.shares(layer.important(hidden // part)), batch_T),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--distances", type=int, nargs="+", default=[1, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    shards = GateShards(options.recording)
    rest, held_out = shards.split(0.2, 0)
    known = np.random.default_rng(0).permutation(sorted(rest)).tolist()
    parts = [
        TokenRows(shards, chosen)
        for chosen in (known[len(known) // 7 :], known[: len(known) // 7], held_out)
    ]
    batchings: tuple[Batching, ...] = ("recorded", "mixed")
    for distance in options.distances:
        for batching in batchings:
            rows = parts[2]
            batch_T = torch.from_numpy(
                batch_tokens(
                    rows.conversation, rows.position, rows.decode, size=_BATCH, batching=batching
                )
            )
            found: dict[str, list[float]] = defaultdict(list)
            for ahead in range(distance, len(shards.gates), _EVERY_LAYERS):
                layer = Layer(parts, shards.gates[ahead], ahead, distance)
                true_NE = _loads(one_hot(layer.report.ids_TK, layer.gate.weight.shape[0]), batch_T)
                for way, load_NE in _ways(layer, batch_T):
                    expected_NE = finish_load(load_NE, true_NE.sum(axis=-1))
                    found[way].append(float(load_accuracies(expected_NE, true_NE).mean()))
            full = np.mean(found[_FULL])
            print(f"{shards.manifest.model}, d = {distance}, {batching}")
            for way, values in found.items():
                mean = np.mean(values)
                print(f"  {way:42} {mean:.4f} {100 * (mean - full):+.2f} points")


if __name__ == "__main__":
    main()
