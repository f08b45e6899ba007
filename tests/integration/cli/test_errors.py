"""Bad input to a command: one line that says what is wrong and what to do, and exit code 2."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from families import make_tiny, make_tokenizer
from moeless.cli.main import run


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "mixtral"
    make_tiny("mixtral").save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def broken(mixtral, tmp_path):
    """A copy of the model that a test may break."""
    return shutil.copytree(mixtral, tmp_path / "model")


@pytest.fixture
def fails(capfd):
    """Run a command that must fail; returns the one line it printed."""

    def check(*arguments: object, code: int = 2) -> str:
        capfd.readouterr()
        assert run([str(argument) for argument in arguments]) == code
        lines = [
            line
            for line in capfd.readouterr().err.splitlines()
            if not line.startswith(("moeless: loading", "moeless: starting", "moeless: computing"))
        ]
        assert len(lines) == 1, lines
        assert lines[0].startswith("moeless: error: ")
        return lines[0]

    return check


@pytest.mark.parametrize("command", [["serve"], ["generate"], ["inspect"]])
def test_a_directory_that_does_not_exist(fails, command):
    extra = ["hello"] if command == ["generate"] else []
    line = fails(*command, "/no/such/model", *extra)
    assert "/no/such/model" in line


def test_a_directory_without_a_model(fails, tmp_path):
    assert "config.json" in fails("serve", tmp_path)


def test_a_dense_model(fails, tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    line = fails("serve", tmp_path)
    assert "dense" in line
    assert "no experts" in line


def test_an_unknown_family_lists_the_known_ones(fails, broken):
    config = json.loads((broken / "config.json").read_text())
    config["model_type"] = "jamba"
    (broken / "config.json").write_text(json.dumps(config))
    line = fails("serve", broken)
    for family in ("mixtral", "phimoe", "llama4", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3"):
        assert family in line


def test_a_truncated_shard_is_named(fails, broken):
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    line = fails("serve", broken)
    assert "model.safetensors" in line


def test_a_shard_that_is_something_else_is_named(fails, broken):
    (broken / "model.safetensors").write_bytes(b"not a checkpoint" * 100)
    assert "model.safetensors" in fails("serve", broken)


def test_a_missing_shard_is_named(fails, broken, tmp_path):
    tensors = load_file(broken / "model.safetensors")
    names = sorted(tensors)
    (broken / "model.safetensors").unlink()
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, broken / file, {"format": "pt"})
    weight_map = {key: file for file, keys in halves.items() for key in keys}
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (broken / "b.safetensors").unlink()
    assert "b.safetensors" in fails("serve", broken)


def test_a_missing_expert_key_is_named(fails, broken):
    path = broken / "model.safetensors"
    tensors = load_file(path)
    gone = next(key for key in sorted(tensors) if ".experts." in key)
    del tensors[gone]
    save_file(tensors, path, {"format": "pt"})
    assert gone in fails("serve", broken)


def test_an_expert_of_another_shape_is_named(fails, broken):
    path = broken / "model.safetensors"
    tensors = load_file(path)
    odd = next(key for key in sorted(tensors, reverse=True) if ".experts." in key)
    tensors[odd] = torch.zeros(3, 3)
    save_file(tensors, path, {"format": "pt"})
    assert odd in fails("serve", broken)


@pytest.mark.parametrize("invoker", ["process", "inline"])
def test_a_budget_that_is_too_small_says_what_is_needed(fails, mixtral, invoker):
    line = fails("serve", mixtral, "--device-memory", "4KB", "--invoker", invoker)
    assert "at least" in line
    assert "bytes" in line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--devices", "gpu"], "gpu"),
        (["--devices", "cpu:0"], "cpu:0"),
        (["--devices", "cuda:0,0"], "cuda:0,0"),
        (["--devices", "cpu:-1"], "cpu:-1"),
        (["--device-memory", "lots"], "lots"),
        (["--memory-factor", "0.5"], "--memory-factor"),
        (["--memory-factor", "nan"], "--memory-factor"),
        (["--cv-threshold", "-1"], "CV threshold"),
        (["--keep-alive", "-1"], "keep-alive"),
        (["--policy", "magic"], "magic"),
        (["--predictor", "magic"], "magic"),
        (["--distance", "0"], "--distance"),
        (["--distance", "3"], "has 3 MoE layers; use 2 or less"),
        (["--distance", "1000", "--predictor", "auto"], "has 3 MoE layers; use 2 or less"),
        (["--port", "70000"], "--port"),
        (["--max-batch-size", "0"], "--max-batch-size"),
        (["--dtype", "int8"], "--dtype"),
        (["--api-key", ""], "key"),
        (["--colour"], "--colour"),
        (["--max-model-len", "10000000"], "max_model_len"),
    ],
)
def test_an_option_that_cannot_work_is_named(fails, mixtral, options, named):
    assert named in fails("serve", mixtral, *options)


def test_a_gpu_that_is_not_there(fails, mixtral):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "cuda" in fails("serve", mixtral, "--devices", "cuda:0").lower()


def test_an_unknown_command(fails):
    assert "fly" in fails("fly")


def test_a_port_that_is_taken(fails, mixtral):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = fails("serve", mixtral, "--port", port, "--invoker", "inline")
    assert str(port) in line


@pytest.mark.parametrize("command", ["serve", "generate", "inspect", "demo", "demo-model"])
def test_help_has_examples_and_needs_nothing_heavy(command):
    script = (
        "import sys\nfrom moeless.cli.main import run\n"
        f"code = run(['{command}', '--help'])\n"
        "assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: moeless" in done.stdout
    assert "Example" in done.stdout
    assert "\\b" not in done.stdout, "an example is shown as it was written"


def test_inspect_prints_what_a_budget_holds(mixtral, capfd):
    assert run(["inspect", str(mixtral), "--device-memory", "1GB", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["family"] == "mixtral"
    assert facts["functions"] == facts["moe_layers"] * facts["experts_per_layer"]
    assert facts["bytes_of_all_functions"] == facts["functions"] * facts["bytes_per_function"]
    assert facts["serves"] is True


def test_inspect_refuses_what_serve_refuses(fails, broken):
    path = broken / "model.safetensors"
    tensors = load_file(path)
    for lost in ("model.norm.weight", "q_proj", "gate.weight"):
        kept = {key: tensor for key, tensor in tensors.items() if not key.endswith(lost)}
        kept = {key: tensor for key, tensor in kept.items() if lost not in key}
        save_file(kept, path, {"format": "pt"})
        said = fails("inspect", broken)
        assert lost in said
        assert said == fails("serve", broken)
    save_file(tensors, path, {"format": "pt"})
    for file in broken.glob("tokenizer*"):
        file.unlink()
    assert fails("inspect", broken) == fails("serve", broken)


def test_without_a_home_directory_that_is_said(fails, monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("MOELESS_CACHE_DIR", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for model in ("demo", "~/model"):
        assert "set HOME, or MOELESS_CACHE_DIR" in fails("inspect", model)


def test_a_model_without_chat_template_is_asked_to_go_on_with_raw_text(fails, mixtral):
    line = fails("generate", mixtral, "Hello", "--invoker", "inline", "--devices", "cpu:1")
    assert f"{mixtral} has no chat template; add --raw" in line


@pytest.mark.parametrize("utf8", [True, False])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_words_are_utf8_whatever_the_locale(mixtral, utf8, encoding):
    command = [sys.executable, "-m", "moeless", "generate", str(mixtral)]
    options = ["--raw", "--max-tokens", "1", "--invoker", "inline", "--devices", "cpu:1"]
    word = "Grüße" if utf8 else os.fsdecode("Grüße".encode("latin-1"))
    done = subprocess.run(
        [*command, word, *options],
        capture_output=True,
        env={
            **os.environ,
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONIOENCODING": encoding,
        },
    )
    said = done.stderr.decode(encoding, "replace")
    assert done.returncode == (0 if utf8 else 2), said
    assert ("1 answer tokens" if utf8 else "PROMPT is not text in the encoding") in said
    assert "Traceback" not in said


_NEEDS = "import resource, sys; resource.setrlimit(resource.{}, ({}, {}));"
_RUNS = "from moeless.cli.main import run; sys.exit(run(sys.argv[1:]))"
LARGEST = (
    "File too large: the limit is 512 bytes in one file, shared memory included; .* ulimit -f"
)
OPEN = "Too many open files: the limit is 24 open files; raise it with ulimit -n"
ANSWER = ["--raw", "--max-tokens", "2", "--invoker", "process"]
RECORD = ["--max-tokens", "1", "--limit", "2", "--prompts"]


@pytest.mark.parametrize(
    ("limit", "command", "said"),
    [
        ("FSIZE", ["generate", "MODEL", "Hello", *ANSWER], LARGEST),
        ("NOFILE", ["generate", "MODEL", "Hello", *ANSWER], OPEN),
        ("FSIZE", ["record", "MODEL", *RECORD, "PROMPTS", "--out", "OUT/r.npz"], LARGEST),
        ("FSIZE", ["record", "MODEL", *RECORD, "PROMPTS", "--gate-inputs", "OUT/g"], LARGEST),
        ("FSIZE", ["plan", "LOADS", "--output", "json", "-o", "OUT/p.json"], LARGEST),
        ("FSIZE", ["serve", "MODEL", "--port", "0", "--ledger", "OUT/l"], LARGEST),
    ],
)
def test_a_resource_that_runs_out_is_told_with_its_limit(mixtral, tmp_path, limit, command, said):
    (tmp_path / "prompts.txt").write_text("Hello\nHello again\n")
    (tmp_path / "loads.csv").write_text("\n".join(["5,1,2,4"] * 40))
    names = {"MODEL": str(mixtral), "OUT": str(tmp_path)}
    names |= {"PROMPTS": str(tmp_path / "prompts.txt"), "LOADS": str(tmp_path / "loads.csv")}
    words = [names.get(word, word.replace("OUT", str(tmp_path))) for word in command]
    value = 24 if limit == "NOFILE" else 512
    script = _NEEDS.format(f"RLIMIT_{limit}", value, value) + _RUNS
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert re.search(rf"moeless: error: .*{said}", last), done.stderr
    assert "malformed" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 2)
    assert not (tmp_path / "p.json").exists()


def test_generate_answers(mixtral, capfd):
    options = ["--raw", "--max-tokens", "5", "--invoker", "inline", "--devices", "cpu:1"]
    assert run(["generate", str(mixtral), "Hello", *options]) == 0
    out, err = capfd.readouterr()
    assert out.endswith("\n")
    assert "5 answer tokens" in err
