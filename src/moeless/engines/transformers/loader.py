"""Loads a model for the engine: all of it but the experts."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from moeless.core.checkpoint import ExpertLayout
from moeless.core.model import DTYPE_BYTES, ModelSpec
from moeless.core.router import RouterRule
from moeless.engines.transformers.dense_layers import lay_out_dense
from moeless.engines.transformers.engine_weights import EngineWeights
from moeless.engines.transformers.families import Family, family_for
from moeless.engines.transformers.quantization import check_quantization
from moeless.engines.transformers.weightless import (
    BACKEND,
    Runtime,
    WeightlessExperts,
    replaced_class,
)
from moeless.errors import CheckpointError, ConfigError
from moeless.functions.store.index import CheckpointIndex
from moeless.functions.store.shard import refuse_pointer
from moeless.functions.store.sources import check_expert_count

_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ChooseDtype = Callable[[ModelSpec], str]
"""Told the model in its own dtype; says in which one to compute."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_PROCESSOR_TEMPLATE = "chat_template.json"
"""Where models that see images keep their chat template; tokenizers read the other places."""


class MoeBlock(NamedTuple):
    """One MoE layer of a loaded model.

    ``layer`` counts MoE layers from 0; the router may be hooked to see its inputs.
    """

    layer: int
    experts: WeightlessExperts
    router: nn.Module
    block: nn.Module


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model whose experts are elsewhere.

    Args:
        model: The causal language model, in evaluation mode, on the CPU.
        tokenizer: Its tokenizer, or None if the directory has none.
        spec: The routed experts.
        layout: Where their weights are stored.
        family: The model's family.
        router_rule: How routers choose.
        moe_blocks: The MoE layers in order.
        directory: Where the checkpoint is.
    """

    model: Any
    tokenizer: Any | None
    spec: ModelSpec
    layout: ExpertLayout
    family: Family
    router_rule: RouterRule
    moe_blocks: tuple[MoeBlock, ...]
    directory: Path


def load_engine_model(
    model_dir: Path,
    *,
    dtype: str = "auto",
    model_id: str | None = None,
    choose_dtype: ChooseDtype | None = None,
) -> LoadedModel:
    """Load everything but the experts; nothing is downloaded and no remote code is run.

    Args:
        model_dir: Holds ``config.json``, safetensors weights and, usually, a tokenizer.
        dtype: ``auto``, or ``float32``, ``bfloat16``, ``float16``.
        model_id: The id under which the model is served; the directory's name by default.
        choose_dtype: Asked for the meaning of ``auto``; None takes the configuration's.

    Returns:
        The model; its experts raise until ``attach_runtime`` was called.

    Raises:
        CheckpointError: A file or tensor is missing, damaged or quantised in an unknown way.
        ModelError: A dense model, or an unknown family.
        ConfigError: An unknown dtype.
    """
    if dtype != "auto" and dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not known; use auto, {', '.join(DTYPE_BYTES)}")
    with _quiet():
        family, config = read_config(model_dir)
        spec, layout, model = _read_checkpoint(
            model_dir, family, config, dtype, model_id, choose_dtype
        )
        tokenizer = _load_tokenizer(model_dir)
    moe_blocks = _find_blocks(model, family, spec)
    lay_out_dense(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        spec=spec,
        layout=layout,
        family=family,
        router_rule=family.router_rule(config),
        moe_blocks=moe_blocks,
        directory=model_dir,
    )


@dataclass(frozen=True, kw_only=True)
class DescribedModel:
    """What a checkpoint's configuration and headers say.

    Args:
        spec: The routed experts.
        layout: Where their weights are stored.
        tokenizer: Its tokenizer, or None if the directory has none.
    """

    spec: ModelSpec
    layout: ExpertLayout
    tokenizer: Any | None


def describe_model(
    model_dir: Path, *, model_id: str | None = None, choose_dtype: ChooseDtype | None = None
) -> DescribedModel:
    """Read a model's configuration, its weights' headers and its tokenizer, and nothing else.

    What ``load_engine_model`` would refuse for what these say is refused here, too.

    Args:
        model_dir: Holds ``config.json`` and safetensors weights.
        model_id: Its id; the directory's name by default.
        choose_dtype: As for ``load_engine_model``.

    Raises:
        CheckpointError: A file or tensor is missing, damaged or quantised in an unknown way.
        ModelError: A dense model, or an unknown family.
    """
    with _quiet():
        family, config = read_config(model_dir)
        spec, layout, _ = _read_checkpoint(
            model_dir, family, config, "auto", model_id, choose_dtype, hollow=True
        )
        tokenizer = _load_tokenizer(model_dir)
    return DescribedModel(spec=spec, layout=layout, tokenizer=tokenizer)


def attach_runtime(loaded: LoadedModel, runtime: Runtime | None) -> None:
    """Set what computes the experts of all layers; None detaches."""
    for block in loaded.moe_blocks:
        block.experts.attach(runtime)


def read_config(model_dir: Path) -> tuple[Family, Any]:
    """Read a model's configuration.

    Args:
        model_dir: Holds ``config.json``.

    Returns:
        The family and the transformers configuration.

    Raises:
        CheckpointError: No configuration, or one that cannot be read.
        ModelError: A dense model, or an unknown family.
    """
    path = model_dir / "config.json"
    if not path.is_file() and any(model_dir.glob("*.gguf")):
        raise CheckpointError(
            f"{model_dir} holds GGUF files; only safetensors are read: download the original model"
        )
    for name in ("config.json", "generation_config.json", *_TOKENIZER_FILES):
        refuse_pointer(model_dir / name)
    if not path.is_file():
        raise CheckpointError(f"{model_dir} has no config.json; give a model directory")
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON; download it again") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} is not a JSON object; download it again")
    family = family_for(fields)
    try:
        config = AutoConfig.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise CheckpointError(f"{path} cannot be used: {_first_line(error)}") from error
    return family, config


def _read_checkpoint(
    model_dir: Path,
    family: Family,
    config: Any,
    dtype: str,
    model_id: str | None,
    choose_dtype: ChooseDtype | None,
    *,
    hollow: bool = False,
) -> tuple[ModelSpec, ExpertLayout, Any]:
    """The experts, where they are stored, and the model without them."""
    check_quantization(config, model_dir)
    index = CheckpointIndex(model_dir)
    try:
        _settle_dtype(config, family, index, dtype)
        spec = family.spec(config, model_id or model_dir.resolve().name)
        if dtype == "auto" and choose_dtype is not None:
            spec = _change_dtype(config, family, spec, choose_dtype)
        layout = family.layout(config, index)
        check_expert_count(index, layout, spec)
        return spec, layout, _build(model_dir, family, config, index, hollow=hollow)
    finally:
        index.close()


def _settle_dtype(config: Any, family: Family, index: CheckpointIndex, dtype: str) -> None:
    """Write one dtype into the configuration, that of the language model's part included."""
    text = family.text_config(config)
    chosen: Any = dtype
    if dtype == "auto":
        chosen = text.dtype or config.dtype
        if chosen is None:
            stored = EngineWeights(index, family, config, torch.float32).float_dtype()
            chosen = _DTYPE_NAMES.get(stored or "", "float32")
    name = str(chosen).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ConfigError(
            f"{config.model_type}: dtype {name} of config.json is not served; "
            f"ask for {', '.join(DTYPE_BYTES)}"
        )
    config.dtype = text.dtype = getattr(torch, name)


def _change_dtype(
    config: Any, family: Family, spec: ModelSpec, choose_dtype: ChooseDtype
) -> ModelSpec:
    """Write the chosen dtype into the configuration; returns the model in it."""
    name = choose_dtype(spec)
    if name == spec.expert.dtype:
        return spec
    config.dtype = family.text_config(config).dtype = getattr(torch, name)
    return family.spec(config, spec.model_id)


def _build(
    model_dir: Path, family: Family, config: Any, index: CheckpointIndex, *, hollow: bool
) -> Any:
    text = family.text_config(config)
    weights = EngineWeights(index, family, config, text.dtype, hollow=hollow)
    state_dict = weights.state_dict()
    # Weights are decoded while they are read; transformers must not look for quantised ones.
    for part in (config, text):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    model_class = getattr(transformers, family.model_class)
    with replaced_class(family.experts_class, _replacement(family)):
        try:
            model, info = model_class.from_pretrained(
                None,
                config=text,
                state_dict=state_dict,
                dtype=text.dtype,
                experts_implementation=BACKEND,
                generation_config=_load_generation_config(model_dir),
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, by name
            )
        except Exception as error:
            if weights.failure is not None:
                raise weights.failure from error
            raise CheckpointError(f"{model_dir} cannot be loaded: {_first_line(error)}") from error
    if info["mismatched_keys"]:
        name, stored, expected = min(info["mismatched_keys"])
        raise CheckpointError(
            f"key {name} of {model_dir} is {list(stored)}, expected {list(expected)}: config.json "
            f"and the weights do not belong together"
        )
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(
            f"key {names[0]}{more} is missing from {model_dir}; download the checkpoint again"
        )
    return model


def _replacement(family: Family) -> type[nn.Module]:
    if family.name != "llama4":
        return WeightlessExperts
    from moeless.engines.transformers.llama4_block import Llama4WeightlessMoe

    return Llama4WeightlessMoe


def _load_generation_config(model_dir: Path) -> GenerationConfig | None:
    if not (model_dir / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{model_dir / 'generation_config.json'} cannot be used: {_first_line(error)}"
        ) from error


def _load_tokenizer(model_dir: Path) -> Any | None:
    if not any((model_dir / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        beside = model_dir / _PROCESSOR_TEMPLATE
        if not tokenizer.chat_template and beside.is_file():
            tokenizer.chat_template = json.loads(beside.read_text("utf-8"))["chat_template"]
    except Exception as error:
        raise CheckpointError(
            f"the tokenizer of {model_dir} cannot be loaded: {_first_line(error)}"
        ) from error
    return tokenizer


def _find_blocks(model: Any, family: Family, spec: ModelSpec) -> tuple[MoeBlock, ...]:
    layers = model.get_submodule("model.layers")
    blocks = []
    for layer, layer_id in enumerate(spec.layer_ids):
        block = getattr(layers[layer_id], family.block)
        block.experts.moe_layer = layer
        blocks.append(MoeBlock(layer, block.experts, getattr(block, family.router), block))
    return tuple(blocks)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing: what matters of its findings is raised as an error."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
