"""The predictors that are compared, by name, and how each is made from a recording."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from moeless import __version__
from moeless.errors import MoelessError
from moeless.learned.gradient import DescentOptions
from moeless.learned.load_predictor import LoadPredictor
from moeless.learned.mean_load import average_load
from moeless.learned.online_ridge import OnlineRidge
from moeless.learned.predictor_file import load_predictor, recording_digest, save_predictor
from moeless.learned.shards import GateShards
from moeless.learned.token_rows import TokenRows
from moeless.learned.training import Trainer, Training, original_gates
from moeless.learned.training_options import TrainingOptions
from moeless.learned.transition_table import count_transitions
from moeless_experiments.context import Context
from moeless_experiments.recordings import open_recording, tokens_of

HELD_OUT: Final = 0.2
"""Share of the conversations that no predictor is fitted to."""

GATE, RIDGE, FINETUNE, MLP, LINEAR = (
    "gate reuse",
    "ridge",
    "finetune",
    "mlp",
    "linear from layer input",
)
TABLE, MEAN, ONLINE = "transition table", "mean load", "online ridge"
COPIED: Final = "copied gates"
"""As ``GATE``, but written to a directory as if it had been trained."""
RIDGE_80, RIDGE_95 = "ridge h=0.8", "ridge h=0.95"
FINETUNE_80, FINETUNE_95 = "finetune h=0.8", "finetune h=0.95"

LOOKING_AHEAD: Final = (
    GATE,
    RIDGE,
    RIDGE_80,
    RIDGE_95,
    FINETUNE,
    FINETUNE_80,
    FINETUNE_95,
    MLP,
    LINEAR,
    ONLINE,
    TABLE,
    MEAN,
)

_LIMITED: Final = {RIDGE_80: 0.8, RIDGE_95: 0.95}
"""Kinds that are all layers re-fitted, but for those where the copied gate is good enough."""

_OF_TOKENS: Final = ", tokens: "

MLP_EPOCHS, QUICK_MLP_EPOCHS = 20, 4
"""Passes over the tokens at the most; it ends earlier after three without gain."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A predictor.

    Args:
        predictor: The predictor.
        layers_trained: Layers with another model than the copied gate; None for kinds that have
            no such thing.
        fit_tokens: Tokens that it was fitted to; None for the same kinds.
    """

    predictor: LoadPredictor
    layers_trained: int | None = None
    fit_tokens: int | None = None


def of_tokens(name: str, tokens: int) -> str:
    """The name of a kind that is trained on at most so many tokens."""
    return f"{name}{_OF_TOKENS}{tokens}"


def options_of(context: Context, name: str, distance: int) -> TrainingOptions | None:
    """How a kind is trained; None for those that are counted or copied."""
    name, _, most = name.partition(_OF_TOKENS)

    def options(**settings: Any) -> TrainingOptions:
        if most or context.quick:
            settings["max_tokens"] = int(most or tokens_of(context))
        return TrainingOptions(distance=distance, held_out=HELD_OUT, seed=context.seed, **settings)

    epochs = QUICK_MLP_EPOCHS if context.quick else MLP_EPOCHS
    table: dict[str, Callable[[], TrainingOptions]] = {
        RIDGE: lambda: options(all_layers=True),
        RIDGE_80: lambda: options(threshold=0.8),
        RIDGE_95: lambda: options(threshold=0.95),
        FINETUNE: lambda: options(method="finetune", all_layers=True),
        FINETUNE_80: lambda: options(method="finetune", threshold=0.8),
        FINETUNE_95: lambda: options(method="finetune", threshold=0.95),
        MLP: lambda: options(method="mlp", all_layers=True, descent=DescentOptions(epochs=epochs)),
        COPIED: lambda: options(threshold=0.0),
        LINEAR: lambda: options(reads="layer_input", all_layers=True),
    }
    return table[name]() if name in table else None


def is_possible(shards: GateShards, name: str) -> bool:
    """Whether a recording holds what a kind reads."""
    return name != LINEAR or bool(shards.manifest.config.get("layer_inputs"))


def make_predictor(context: Context, model: str, prompts: str, distance: int, name: str) -> Made:
    """Make a predictor, or give the one that was made before.

    Trained ones are read each time: perceptrons of one model take 80 MB.

    Args:
        context: Says how much to train.
        model: Demo model.
        prompts: What it is fitted to: all conversations but the held-out ones.
        distance: d.
        name: Kind.

    Raises:
        MoelessError: The recording is damaged or too small.
    """
    if options_of(context, name, distance) is not None:
        return _keep(context, model, prompts, distance, name)[1]
    return context.share(
        ("predictor", model, prompts, distance, name),
        lambda: _make(context, model, prompts, distance, name),
    )


def _make(context: Context, model: str, prompts: str, distance: int, name: str) -> Made:
    shards = open_recording(context, model, prompts)
    if name == GATE:
        return Made(predictor=original_gates(shards.gates, distance), layers_trained=0)
    context.progress(f"{model}, {prompts}, d = {distance}: {name}", 0, 1)
    known = shards.manifest
    fit, _ = shards.split(HELD_OUT, context.seed)
    rows = TokenRows(shards, fit).sample(tokens_of(context), seed=context.seed)
    if name == TABLE:
        return Made(predictor=count_transitions(shards.gates, rows, distance))
    if name == ONLINE:
        return _fit_online(shards, rows, distance)
    assert name == MEAN, name
    return Made(
        predictor=average_load(
            rows, layers=known.num_layers, experts=known.num_experts, distance=distance
        )
    )


def _fit_online(shards: GateShards, rows: TokenRows, distance: int) -> Made:
    """As live learning does: a part at a time, in the order of arrival, old ones counting less."""
    ridge, layers = OnlineRidge(shards.gates, distance), range(shards.manifest.num_layers)
    fitted = ridge.fit()
    for chunk in rows:
        ridge.add(torch.stack([chunk.states(layer) for layer in layers], dim=1))
        # Each fit is held against the part that comes next, which tells how sure it may be.
        fitted = ridge.fit()
    return Made(
        predictor=fitted, layers_trained=len(fitted.models), fit_tokens=round(ridge.tokens)
    )


def keep_predictor(context: Context, model: str, prompts: str, distance: int, name: str) -> Path:
    """Directory of a trained predictor, kept between runs.

    Args:
        context: Says where, and how much to train.
        model: Demo model.
        prompts: What it is fitted to.
        distance: d.
        name: A kind that is trained.

    Raises:
        MoelessError: The recording is damaged or too small, or the cache cannot be written.
    """
    return _keep(context, model, prompts, distance, name)[0]


def is_kept(context: Context, model: str, prompts: str, distance: int, name: str) -> bool:
    """Whether a trained predictor is there from before, or its kind is not trained at all.

    Args:
        context: Says where, and how much to train.
        model: Demo model.
        prompts: What it is fitted to.
        distance: d.
        name: A kind.
    """
    options = options_of(context, name, distance)
    if options is None:
        return True
    shards = open_recording(context, model, prompts)
    return _directory(context, shards, options).exists()


def trained_as(name: str) -> str:
    """The kind with which a kind comes into being: several may be the work of one."""
    return RIDGE if name in _LIMITED else name


def _keep(
    context: Context, model: str, prompts: str, distance: int, name: str
) -> tuple[Path, Made]:
    shards = open_recording(context, model, prompts)
    options = options_of(context, name, distance)
    assert options is not None, name
    directory = _directory(context, shards, options)
    kept = _find_kept(directory, shards)
    if kept is None:
        what = f"{model}, {prompts}, d = {distance}: {name}"
        if trained_as(name) == RIDGE:
            _refit(context, shards, distance, what)
        else:
            training = _run(context, Trainer(shards, options), what)
            save_predictor(directory, training, options, shards.manifest)
        kept = _find_kept(directory, shards)
        assert kept is not None
    return directory, kept


def _refit(context: Context, shards: GateShards, distance: int, what: str) -> None:
    """All layers once, and from them the kinds that keep some copied gates."""
    options = options_of(context, RIDGE, distance)
    assert options is not None
    trainer = Trainer(shards, options)
    whole = _run(context, trainer, what)
    for name in (RIDGE, *_LIMITED):
        training = trainer.limit(whole, _LIMITED[name]) if name in _LIMITED else whole
        written = options_of(context, name, distance)
        assert written is not None
        save_predictor(_directory(context, shards, written), training, written, shards.manifest)


def _run(context: Context, trainer: Trainer, what: str) -> Training:
    return trainer.train(
        lambda stage, done, total: context.progress(f"{what}: {stage}", done, total)
    )


def _directory(context: Context, shards: GateShards, options: TrainingOptions) -> Path:
    return context.cache / "predictors" / _digest(shards, options)


def _find_kept(directory: Path, shards: GateShards) -> Made | None:
    if not directory.exists():
        return None
    try:
        predictor, manifest = load_predictor(
            directory, gates=shards.gates, model=shards.manifest.model
        )
    except MoelessError:
        return None  # half written, or of another version: made again
    return Made(
        predictor=predictor,
        layers_trained=sum(entry.trained for entry in manifest.layers),
        fit_tokens=manifest.tokens["fit"],
    )


def _digest(shards: GateShards, options: TrainingOptions) -> str:
    depends_on = [__version__, recording_digest(shards.manifest), asdict(options)]
    described = json.dumps(depends_on, sort_keys=True)
    return f"{options.method}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
