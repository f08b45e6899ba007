"""Checkpoints in MXFP4 and block FP8, end to end, and those that are refused."""

import pytest
import torch
from store_checkpoints import (
    assert_equal_to_model,
    assert_serves_like,
    edit_config,
    open_store,
    rewrite,
    save,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from families import FAMILIES, make_tiny
from moeless.engines.transformers.loader import load_engine_model
from moeless.errors import CheckpointError
from moeless.functions.store.codecs import decode_fp8_block

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def pack_gpt_oss(model, directory):
    """Random MXFP4 experts, in the checkpoint as published and in the model decoded."""
    generator = torch.manual_seed(3)

    def change(tensors):
        for key in [key for key in tensors if key.endswith("_proj") and "experts" in key]:
            plain = tensors.pop(key)
            experts, inputs, outputs = plain.shape
            size = (experts, outputs, inputs // 32, 16)
            blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, size[:3], generator=generator, dtype=torch.uint8)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(key).data.copy_(decoded)
        return tensors

    rewrite(save(model, directory), change)
    return edit_config(directory, quantization_config=MXFP4)


def pack_fp8(model, directory):
    """Block FP8 for attention, dense and expert matrices; the model gets the decoded values."""

    def change(tensors):
        for key in [key for key in tensors if is_linear(key)]:
            weight = tensors.pop(key)
            grid = [-(-size // 128) for size in weight.shape]
            scale = 0.002 + 0.001 * torch.arange(grid[0] * grid[1]).view(grid)
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            spread = spread[: weight.shape[0], : weight.shape[1]]
            packed = (weight / spread).to(torch.float8_e4m3fn)
            tensors |= {key: packed, f"{key}_scale_inv": scale}
        return tensors

    rewrite(save(model, directory), change)
    return edit_config(directory, quantization_config=FP8)


def is_linear(key):
    return key.endswith("_proj.weight") or key.endswith("_a_proj_with_mqa.weight")


def unpack_into(model, directory):
    """Give the model the values that an FP8 checkpoint stands for."""
    from safetensors.torch import load_file

    stored = load_file(directory / "model.safetensors")
    plain = {}
    for key, tensor in stored.items():
        if key.endswith("_scale_inv"):
            continue
        scale = stored.get(f"{key}_scale_inv")
        if scale is not None:
            tensor = decode_fp8_block(tensor, scale, (128, 128), torch.float32)
        plain[key] = tensor
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            parts = [
                torch.cat([plain[name.replace("gate_up_proj", f"{e}.{part}_proj.weight")]
                           for part in ("gate", "up")])
                for e in range(len(parameter))
            ]  # fmt: skip
            parameter.data.copy_(torch.stack(parts))
        elif name.endswith("experts.down_proj"):
            parts = [
                plain[name.replace("down_proj", f"{e}.down_proj.weight")]
                for e in range(len(parameter))
            ]
            parameter.data.copy_(torch.stack(parts))
        else:
            parameter.data.copy_(plain[name])


def test_gpt_oss_in_mxfp4_is_served(tmp_path):
    model = FAMILIES["gpt_oss"]()
    pack_gpt_oss(model, tmp_path)
    assert_equal_to_model(open_store(tmp_path), model, "gpt_oss")
    loaded = load_engine_model(tmp_path)
    assert loaded.layout.gate_up.codec == "mxfp4"
    assert_serves_like(loaded, model, atol=2e-5)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_block_fp8_with_ragged_edges_is_served(family, tmp_path):
    model = make_tiny(family, hidden_size=160, moe_intermediate_size=136)
    pack_fp8(model, tmp_path)
    unpack_into(model, tmp_path)
    assert_equal_to_model(open_store(tmp_path), model, family)
    loaded = load_engine_model(tmp_path)
    assert loaded.layout.down.codec == "fp8_block"
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.float32}
    assert_serves_like(loaded, model, atol=2e-5)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_other_quantisation_is_refused_in_one_line(method, tmp_path):
    save(FAMILIES["mixtral"](), tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(CheckpointError, match=f"is quantised with {method}, which is not served"):
        load_engine_model(tmp_path)


def test_fp8_without_blocks_is_refused(tmp_path):
    save(FAMILIES["mixtral"](), tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="quantised with fp8 without weight_block_size"):
        load_engine_model(tmp_path)


def test_fp8_weights_of_the_engine_without_scales_are_refused(tmp_path):
    model = make_tiny("qwen3_moe")
    pack_fp8(model, tmp_path)
    lost = "model.layers.1.self_attn.q_proj.weight"

    def drop(tensors):
        del tensors[f"{lost}_scale_inv"]
        return tensors

    rewrite(tmp_path, drop)
    with pytest.raises(CheckpointError, match=f"tensor {lost} .* is FP8 without block scales"):
        load_engine_model(tmp_path)
