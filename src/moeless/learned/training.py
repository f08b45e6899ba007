"""Trains predictors from recorded gate inputs, layer by layer, in bounded memory.

A few layers fall short of a threshold with the copied gate alone; by default only those are
trained. Conversations are divided in three: to fit to, to decide between models (the copied gate
is always among them, so that no layer gets worse by what is known), and to report on.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from moeless.errors import ConfigError, TraceError
from moeless.learned.error_estimate import ErrorEstimate
from moeless.learned.expected_shares import expected_shares, one_hot
from moeless.learned.gate_predictor import Gate
from moeless.learned.judging import (
    JUDGED_BATCH,
    best_spread,
    judge_of,
    logit_error,
)
from moeless.learned.layer_fitting import Fitted, LayerFitter, make_fitter
from moeless.learned.layer_tokens import LayerTokens, gather
from moeless.learned.load_predictor import Reads
from moeless.learned.shards import GateShards
from moeless.learned.token_rows import TokenRows
from moeless.learned.trained_predictor import LayerModel, TrainedPredictor
from moeless.learned.training_options import MemoryEstimate, TrainingOptions, estimate_memory
from moeless.learned.training_threads import layers_at_once, training_threads

MIN_FIT_TOKENS, MIN_JUDGED_TOKENS = 2 * JUDGED_BATCH, JUDGED_BATCH

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many layers of it are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What became of one layer.

    Args:
        layer: MoE layer that is predicted.
        trained: Whether it has another model than the copied gate.
        accuracy_before: Mean load accuracy of the copied gate on held-out conversations.
        accuracy_after: The same of the model it has now.
        spread: See ``expected_shares``.
        penalty: The ridge penalty that won, if any.
        epochs: Passes that descending made.
        error: Error estimate on held-out conversations.
    """

    layer: int
    trained: bool
    accuracy_before: float
    accuracy_after: float
    spread: float = 0.0
    penalty: float | None = None
    epochs: int = 0
    error: ErrorEstimate | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """A trained predictor and how it came about.

    Args:
        predictor: The predictor.
        layers: One report per predicted layer.
        memory: What was held at the most, estimated.
        fit_tokens: Tokens fitted to.
        validation_tokens: Tokens that decided.
        held_out_tokens: Tokens reported on.
    """

    predictor: TrainedPredictor
    layers: tuple[LayerReport, ...]
    memory: MemoryEstimate
    fit_tokens: int
    validation_tokens: int
    held_out_tokens: int


class Trainer:
    """Trains the predictor of one recording.

    Args:
        shards: The recording.
        options: How.

    Raises:
        ConfigError: The model has too few layers for the distance, or memory is too small.
        TraceError: The recording is damaged or too small; the message says how much is needed.
    """

    def __init__(self, shards: GateShards, options: TrainingOptions) -> None:
        manifest = shards.manifest
        if options.distance >= manifest.num_layers:
            raise ConfigError(
                f"distance {options.distance} needs more than the {manifest.num_layers} MoE "
                f"layers of {manifest.model}; use at most {manifest.num_layers - 1}"
            )
        self._shards, self._options = shards, options
        self._ahead = range(options.distance, manifest.num_layers)
        self._divide()
        self.memory = estimate_memory(
            options,
            layers=len(self._ahead),
            hidden=manifest.hidden,
            experts=manifest.num_experts,
            tokens=self._fit.tokens,
            at_once=layers_at_once(options, manifest.hidden),
        )
        self._judge, self._final_judge = judge_of(self._validation), judge_of(self._held_out)
        self._copied: dict[int, tuple[float, float]] = {}

    def train(self, on_progress: Progress = lambda *_: None) -> Training:
        """Train.

        Args:
            on_progress: Told how far it is.

        Raises:
            TraceError: A shard is damaged.
        """
        options = self._options
        with training_threads(self._shards.manifest.hidden):
            wanted = {
                ahead: score
                for ahead, (accuracy, score) in self._ask_copied(on_progress).items()
                if options.all_layers or accuracy < options.threshold
            }
            fitted = self._fit_layers(wanted, on_progress)
            return self._report(fitted, on_progress)

    def limit(self, whole: Training, threshold: float) -> Training:
        """What training only layers below a threshold gives, without doing it.

        Layers are fitted each for itself, in closed form: so those below are the same.

        Args:
            whole: What this trainer made of all layers, by the method ``ridge``.
            threshold: Load accuracy of the copied gate from which it is kept.

        Raises:
            ValueError: The method is another one: how long gradients descend depends on the
                threshold.
            TraceError: A shard is damaged.
        """
        if self._options.method != "ridge" or not self._options.all_layers:
            raise ValueError("only re-fitted gates of all layers can be limited")
        gates, models = self._shards.gates, list(whole.predictor.models)
        spreads, reports = list(whole.predictor.spreads), list(whole.layers)
        with training_threads(self._shards.manifest.hidden):
            for n, (ahead, (accuracy, _)) in enumerate(self._ask_copied().items()):
                if accuracy >= threshold:
                    models[n], spreads[n] = gates[ahead], 0.0
                    reports[n] = self._report_layer(ahead, Fitted(model=gates[ahead]))
        return self._training(models, spreads, reports)

    def _divide(self) -> None:
        options, shards = self._options, self._shards
        rest, held_out = shards.split(options.held_out, options.seed)
        order = torch.randperm(
            len(rest), generator=torch.Generator().manual_seed(options.seed)
        ).tolist()
        known = sorted(rest)
        judged = max(1, round(len(known) * options.validation))
        parts = [
            frozenset(known[i] for i in order[judged:]),
            frozenset(known[i] for i in order[:judged]),
            held_out,
        ]
        limits = [
            options.max_tokens,
            max(MIN_JUDGED_TOKENS, int(options.max_tokens * options.validation)),
            max(MIN_JUDGED_TOKENS, int(options.max_tokens * options.held_out)),
        ]
        self._fit, self._validation, self._held_out = (
            TokenRows(shards, part, reads=options.reads) for part in parts
        )
        self._require_tokens()
        # Judged tokens stay whole stretches of conversations: batches are made of them.
        self._fit = self._fit.sample(limits[0], seed=options.seed)
        self._validation = self._validation.first(limits[1])
        self._held_out = self._held_out.first(limits[2])

    def _require_tokens(self) -> None:
        needed = (MIN_FIT_TOKENS, MIN_JUDGED_TOKENS, MIN_JUDGED_TOKENS)
        parts = (self._fit, self._validation, self._held_out)
        if all(part.tokens >= least for part, least in zip(parts, needed, strict=True)):
            return
        options = self._options
        total = self._shards.manifest.tokens
        factor = max(
            least / max(part.tokens, 1) for part, least in zip(parts, needed, strict=True)
        )
        share = min(options.held_out, (1.0 - options.held_out) * options.validation)
        enough = max(int(total * min(factor, 100.0)), int(1.5 * MIN_JUDGED_TOKENS / share))
        raise TraceError(
            f"{self._shards.directory} holds {total:,} tokens of "
            f"{len(self._shards.conversations)} conversations, which leaves "
            f"{parts[0].tokens:,} to fit to, {parts[1].tokens:,} to decide and "
            f"{parts[2].tokens:,} to report on, but {needed[0]}, {needed[1]} and {needed[2]} are "
            f"needed; record about {enough:,} tokens"
        )

    def _ask_copied(
        self, on_progress: Progress = lambda *_: None
    ) -> dict[int, tuple[float, float]]:
        """Accuracy and score of each layer's copied gate, asked once."""
        if self._copied:
            return self._copied
        for done, ahead in enumerate(self._ahead):
            on_progress("copied gates", done + 1, len(self._ahead))
            accuracy = score = 0.0
            if self._options.reads == "gate_input":
                tokens = self._gather(self._validation, ahead)
                gate = self._shards.gates[ahead]
                share_TE = _shares(gate, 0.0, tokens)
                true_TE = one_hot(tokens.ids_TK, gate.weight.shape[0])
                accuracy = self._judge.accuracy(share_TE, true_TE)
                score = self._judge.score(share_TE, true_TE)
            self._copied[ahead] = accuracy, score
        return self._copied

    def _fit_layers(self, wanted: dict[int, float], on_progress: Progress) -> dict[int, Fitted]:
        fitted: dict[int, Fitted] = {}
        layers = sorted(wanted)
        for first in range(0, len(layers), self.memory.group):
            group = layers[first : first + self.memory.group]
            fitter = make_fitter(self._shards.gates, group, self._options)
            progress = _GroupProgress(on_progress, first, len(group), len(layers))
            fitter.read(self._fit, progress)
            before = [wanted[ahead] for ahead in group]
            chosen = self._map(partial(self._choose, fitter), group, before)
            for done, (ahead, found) in enumerate(zip(group, chosen, strict=True), start=1):
                fitted[ahead] = found
                progress(1.0 + done / len(group))
        return fitted

    def _map(
        self,
        choose: Callable[[int, float], Fitted],
        layers: Sequence[int],
        before: Sequence[float],
    ) -> Iterator[Fitted]:
        if self._options.method == "ridge" or len(layers) == 1:
            yield from map(choose, layers, before)
            return
        one_each = partial(torch.set_num_threads, 1)
        with ThreadPoolExecutor(len(layers), initializer=one_each) as pool:
            yield from pool.map(choose, layers, before)

    def _choose(self, fitter: LayerFitter, ahead: int, before: float) -> Fitted:
        """The candidate that does best on validation tokens, or the copied gate."""
        tokens = self._gather(self._validation, ahead)
        gate = self._shards.gates[ahead]
        best = Fitted(model=gate, score=before)
        for candidate in fitter.candidates(ahead, tokens, self._judge):
            logits_TE = candidate.model.logits(tokens.inputs_TH)
            scale = candidate.error_scale or logit_error(logits_TE, tokens.true_logits_TE)
            spread, score = best_spread(
                candidate.model, logits_TE, tokens.ids_TK, self._judge, scale=scale
            )
            if score > best.score:
                best = replace(candidate, spread=spread, score=score)
        if best.model is gate:
            return best
        return fitter.finish(ahead, best, tokens)

    def _report(self, fitted: dict[int, Fitted], on_progress: Progress) -> Training:
        gates = self._shards.gates
        models: list[LayerModel] = []
        spreads, reports = [], []
        for done, ahead in enumerate(self._ahead):
            on_progress("held-out conversations", done + 1, len(self._ahead))
            found = fitted.get(ahead) or Fitted(model=gates[ahead])
            models.append(found.model)
            spreads.append(found.spread)
            reports.append(self._report_layer(ahead, found))
        return self._training(models, spreads, reports)

    def _training(
        self, models: list[LayerModel], spreads: list[float], reports: list[LayerReport]
    ) -> Training:
        options = self._options
        predictor = TrainedPredictor(
            models,
            options.distance,
            hidden=self._shards.manifest.hidden,
            spreads=spreads,
            errors={report.layer: report.error for report in reports if report.error},
            reads=options.reads,
        )
        return Training(
            predictor=predictor,
            layers=tuple(reports),
            memory=self.memory,
            fit_tokens=self._fit.tokens,
            validation_tokens=self._validation.tokens,
            held_out_tokens=self._held_out.tokens,
        )

    def _report_layer(self, ahead: int, found: Fitted) -> LayerReport:
        gate, judge = self._shards.gates[ahead], self._final_judge
        tokens = self._gather(self._held_out, ahead)
        true_TE = one_hot(tokens.ids_TK, gate.weight.shape[0])
        share_TE = _shares(found.model, found.spread, tokens)
        # A copied gate can be asked with gate inputs only, whatever the trained model reads.
        asked = self._gather(self._held_out, ahead, reads="gate_input")
        return LayerReport(
            layer=ahead,
            trained=found.model is not gate,
            accuracy_before=judge.accuracy(_shares(gate, 0.0, asked), true_TE),
            accuracy_after=judge.accuracy(share_TE, true_TE),
            spread=found.spread,
            penalty=found.penalty,
            epochs=found.epochs,
            error=judge.error(share_TE, true_TE),
        )

    def _gather(self, rows: TokenRows, ahead: int, *, reads: Reads | None = None) -> LayerTokens:
        return gather(
            rows,
            self._shards.gates[ahead],
            ahead=ahead,
            distance=self._options.distance,
            reads=reads or self._options.reads,
        )


class _GroupProgress:
    """Reading counts for half of a group's work; choosing is the other half."""

    def __init__(self, tell: Progress, first: int, size: int, total: int) -> None:
        self._tell, self._first, self._size, self._total = tell, first, size, total

    def __call__(self, share: float) -> None:
        self._tell("fitting", self._first + int(share * self._size / 2), self._total)


def original_gates(gates: Sequence[Gate], distance: int) -> TrainedPredictor:
    """The untrained predictor: copied gates, taken at their word."""
    return TrainedPredictor(gates[distance:], distance, hidden=gates[0].weight.shape[1])


def _shares(model: LayerModel, spread: float, tokens: LayerTokens) -> torch.Tensor:
    logits_TE = model.logits(tokens.inputs_TH)
    return expected_shares(logits_TE, model.rule, model.correction, spread=spread)
