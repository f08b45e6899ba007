"""What is recorded is what enters the gates of unmodified transformers, token by token."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip
from transformers import AutoModelForCausalLM  # noqa: E402

from families import FAMILIES, make_tokenizer  # noqa: E402
from moeless.bootstrap.recording.record import record_routing  # noqa: E402
from moeless.bootstrap.recording.record_config import RecordConfig  # noqa: E402
from moeless.cli.main import run  # noqa: E402
from moeless.engines.transformers.gate_access import find_gates  # noqa: E402
from moeless.engines.transformers.generation.engine import (  # noqa: E402
    TransformersTextEngine,
)
from moeless.engines.transformers.generation.sampler import RowSampler  # noqa: E402
from moeless.engines.transformers.generation.streams import EventStream  # noqa: E402
from moeless.errors import EngineError, TraceError  # noqa: E402
from moeless.learned.scoring import choose  # noqa: E402
from moeless.learned.shards import GateShards, Shard, fingerprint_gates  # noqa: E402
from moeless.workloads.routing_trace import read_trace  # noqa: E402

pytestmark = pytest.mark.slow

MAX_TOKENS = 9


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    """The tiny checkpoint of a family; each is written once."""
    made = {}

    def checkpoint_of(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("models") / family
            FAMILIES[family]().save_pretrained(made[family])
            make_tokenizer().save_pretrained(made[family])
        return made[family]

    return checkpoint_of


@pytest.fixture
def record(configure, prompts_file, tmp_path):
    """Record the prompts; returns the shards and the report."""

    def record(directory, *, concurrency=3, on_progress=lambda _: None, **options):
        engine, experts = configure(directory, concurrency=concurrency)
        config = RecordConfig(
            prompts=str(prompts_file),
            max_tokens=MAX_TOKENS,
            **{"gate_inputs": tmp_path / "gate-inputs", **options},
        )
        report = record_routing(engine, experts, config, on_progress=on_progress)
        return GateShards(config.gate_inputs), report

    return record


def joined(shards):
    """All rows, ordered by conversation and position."""
    everything = list(shards)
    columns = zip(*everything, strict=True)
    shard = Shard(*(None if parts[0] is None else torch.cat(parts) for parts in columns))
    order = np.lexsort((shard.position.numpy(), shard.conversation.numpy()))
    return Shard(*(None if part is None else part[order.copy()] for part in shard))


def equal(first, second):
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


class Reference:
    """What enters the gates and the decoder layers of an unmodified model."""

    def __init__(self, directory, layer_ids, gate_path):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.seen = {}
        for layer_id in layer_ids:
            block = self.model.get_submodule(f"model.layers.{layer_id}")
            block.register_forward_pre_hook(self._keep("layer"), with_kwargs=True)
            block.get_submodule(gate_path).register_forward_pre_hook(self._keep("gate"))

    def _keep(self, name):
        def hook(_module, arguments, *_named):
            state = arguments[0]
            self.seen.setdefault(name, []).append(state.reshape(-1, state.shape[-1]))

        return hook

    @torch.no_grad()
    def run(self, token_ids):
        """Gate inputs and layer inputs of a sequence, [T, L, H] each."""
        self.seen.clear()
        self.model(input_ids=torch.tensor([token_ids]))
        return torch.stack(self.seen["gate"], dim=1), torch.stack(self.seen["layer"], dim=1)

    @torch.no_grad()
    def answer(self, prompt_ids):
        """The prompt's and the greedy answer's tokens, but the last: it is not computed."""
        ids = torch.tensor([prompt_ids])
        answered = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS
        )
        return answered[0, :-1].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_that_see_the_recorded_inputs_choose_the_recorded_experts(
    family, checkpoint_of, record, prompts_file
):
    directory = checkpoint_of(family)
    shards, report = record(directory, layer_inputs=True)
    manifest = shards.manifest
    assert manifest.complete
    assert manifest.family == family
    rows = joined(shards)
    for layer, gate in enumerate(shards.gates):
        logits_TE = torch.nn.functional.linear(
            rows.gate_input[:, layer].float(), gate.weight, gate.bias
        )
        chosen_TK = choose(logits_TE, gate.rule, gate.correction).sort(dim=-1).values
        assert torch.equal(chosen_TK, rows.topk_ids[:, layer].long().sort(dim=-1).values)
        assert len(chosen_TK.unique()) > gate.rule.top_k, "the experts are always the same"

    reference = Reference(directory, manifest.layer_ids, manifest.router_rule.path)
    assert fingerprint_gates(find_gates(reference.model, manifest.layer_ids)) == (
        manifest.gates_sha256
    )
    tokenizer = make_tokenizer()
    prompts = prompts_file.read_text(encoding="utf-8").splitlines()
    assert shards.conversations == tuple(range(len(prompts)))
    for number, prompt in enumerate(prompts):
        mine = rows.conversation == number
        prompt_ids = tokenizer(prompt.strip())["input_ids"]
        token_ids = reference.answer(prompt_ids)
        assert rows.token_ids[mine].tolist() == token_ids
        assert rows.position[mine].tolist() == list(range(len(token_ids)))
        assert rows.decode[mine].tolist() == [
            int(position >= len(prompt_ids)) for position in range(len(token_ids))
        ]
        gate_input, layer_input = reference.run(token_ids)
        torch.testing.assert_close(rows.gate_input[mine], gate_input, atol=1e-4, rtol=1e-4)
        assert rows.layer_input is not None
        torch.testing.assert_close(rows.layer_input[mine], layer_input, atol=1e-4, rtol=1e-4)
    assert report.gate_inputs.tokens == len(rows.position) == report.tokens


def test_half_precision_is_kept_bit_by_bit(checkpoint_of, configure, prompts_file, tmp_path):
    engine, experts = configure(checkpoint_of("mixtral"), concurrency=1)
    config = RecordConfig(
        prompts=str(prompts_file), gate_inputs=tmp_path / "half", max_tokens=3, limit=3
    )
    record_routing(replace(engine, dtype="bfloat16"), experts, config)
    shards = GateShards(tmp_path / "half")
    rows = joined(shards)
    assert shards.manifest.dtype == "bfloat16"
    assert rows.gate_input.dtype == torch.bfloat16
    for layer, gate in enumerate(shards.gates):
        logits_TE = torch.nn.functional.linear(rows.gate_input[:, layer], gate.weight.bfloat16())
        chosen_TK = choose(logits_TE, gate.rule).sort(dim=-1).values
        agree = (chosen_TK == rows.topk_ids[:, layer].long().sort(dim=-1).values).all(dim=-1)
        # Sums of another shape may be rounded another way where two logits nearly tie.
        assert agree.float().mean() > 0.95


def test_trace_and_gate_inputs_of_one_run_agree(checkpoint_of, record, tmp_path):
    shards, report = record(checkpoint_of("gpt_oss"), out=tmp_path / "trace.npz", unit="requests")
    trace, rows = read_trace(tmp_path / "trace.npz"), joined(shards)
    assert trace.tokens_N.tolist() == torch.bincount(rows.conversation).tolist()
    assert trace.decode_tokens_N.sum() == int(rows.decode.sum())
    for number, load_LE in enumerate(trace.loads_NLE):
        ids_TLK = rows.topk_ids[rows.conversation == number].long()
        for layer, load_E in enumerate(load_LE):
            counted = torch.bincount(ids_TLK[:, layer].flatten(), minlength=len(load_E))
            assert counted.tolist() == load_E.tolist()
    assert report.entries == len(shards.conversations)


def test_an_interrupted_recording_is_continued_to_the_same_end(checkpoint_of, record, tmp_path):
    directory = checkpoint_of("mixtral")

    def interrupt(report):
        if report.feed.finished == 3:
            os.kill(os.getpid(), signal.SIGINT)

    begun, report = record(directory, on_progress=interrupt)
    assert report.feed.interrupted
    assert not begun.manifest.complete
    assert 3 <= len(begun.conversations) < 9
    continued, report = record(directory, resume=True)
    assert report.feed.already == len(begun.conversations)
    assert report.feed.finished == 9 - len(begun.conversations)
    assert continued.manifest.complete
    at_once, _ = record(directory, gate_inputs=tmp_path / "at-once", concurrency=1)
    together, alone = joined(continued), joined(at_once)
    for name in ("conversation", "position", "token_ids", "decode", "topk_ids"):
        assert torch.equal(getattr(together, name), getattr(alone, name)), name
    torch.testing.assert_close(together.gate_input, alone.gate_input, atol=1e-4, rtol=1e-4)


def test_a_bound_of_tokens_is_met_exactly_and_can_be_raised_later(checkpoint_of, record):
    directory = checkpoint_of("olmoe")
    shards, report = record(directory, max_recorded_tokens=100)
    assert report.feed.full
    assert report.gate_inputs.tokens == shards.manifest.tokens == 100
    assert shards.manifest.complete, "it got to the end that it was asked for"
    first = joined(shards)
    for number in shards.conversations:
        positions = first.position[first.conversation == number]
        assert positions.tolist() == list(range(len(positions)))
    again, report = record(directory, max_recorded_tokens=100, resume=True)
    assert report.steps == 0
    assert equal(joined(again), first)
    more, _ = record(directory, max_recorded_tokens=150, resume=True)
    assert more.manifest.tokens == 150
    assert set(more.conversations) > set(shards.conversations)
    assert more.manifest.config["limits"]["max_recorded_tokens"] == 150


def test_a_bound_of_the_disk_is_never_exceeded(checkpoint_of, record, tmp_path):
    directory, bound = tmp_path / "gate-inputs", 90_000

    def require_bound(_report):
        assert sum(path.stat().st_size for path in directory.iterdir()) <= bound

    shards, report = record(
        checkpoint_of("mixtral"), max_disk_bytes=bound, on_progress=require_bound
    )
    require_bound(report)
    assert report.gate_inputs.ran_out_of_disk
    assert not shards.manifest.complete
    assert report.gate_inputs.num_bytes > bound / 2
    assert shards.manifest.tokens == report.gate_inputs.tokens > 50


def test_gate_inputs_that_are_not_finite_end_the_recording(checkpoint_of, record, tmp_path):
    directory = tmp_path / "broken"
    directory.mkdir()
    for path in checkpoint_of("mixtral").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"].fill_(float("inf"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TraceError, match="gate input of MoE layer 1 is not finite"):
        record(directory)


def test_a_model_that_fails_leaves_what_was_whole_to_be_continued(
    checkpoint_of, record, monkeypatch, tmp_path
):
    choose_token, calls = RowSampler.choose, []

    def fail_late(self, logits, row, best):
        calls.append(row)
        if len(calls) > 24:
            raise RuntimeError("worn out")
        return choose_token(self, logits, row, best)

    directory = checkpoint_of("mixtral")
    monkeypatch.setattr(RowSampler, "choose", fail_late)
    with pytest.raises(EngineError, match=r"tokens of 2 conversations, to continue with --resume"):
        record(directory, concurrency=1)
    monkeypatch.undo()
    shards, report = record(directory, resume=True)
    assert report.feed.already == 2
    assert len(shards.conversations) == 9


# -- on the command line ----------------------------------------------------------------------


@pytest.fixture
def command(checkpoint_of, prompts_file):
    """Run the command with usual arguments."""

    def command(*more):
        usual = ["--prompts", prompts_file, "--max-tokens", 5, "--threads", 1]
        return run([str(part) for part in ("record", checkpoint_of("mixtral"), *usual, *more)])

    return command


def test_it_says_what_the_directory_holds_and_why_it_stopped(command, capfd, tmp_path):
    directory = tmp_path / "gate-inputs"
    assert command("--gate-inputs", directory, "--max-recorded-tokens", 60) == 0
    out = capfd.readouterr().out
    assert "holds gate inputs of 60 tokens" in out
    assert "stopped at --max-recorded-tokens" in out
    assert len(out.splitlines()) == 1
    assert command("--gate-inputs", directory, "--resume", "--max-disk", "60KB") == 0
    assert "stopped at --max-disk" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --out, --gate-inputs or both"),
        (["--out", "{}/t.npz", "--layer-inputs"], "--layer-inputs is about gate inputs"),
        (["--out", "{}/t.npz", "--max-recorded-tokens", 5], "--max-recorded-tokens is about"),
        (["--out", "{}/t.npz", "--max-disk", "1GB"], "--max-disk is about"),
        (["--out", "{}/t.npz", "--resume"], "--resume is about"),
        (["--out", "{}/t.npz", "--gate-inputs", "{}/g", "--resume"], "a trace is recorded in one"),
        (["--gate-inputs", "{}/g", "--max-disk", "much"], "--max-disk 'much' is not a size"),
        (["--gate-inputs", "{}/g", "--max-disk", "1KB"], "--max-disk leaves no room"),
        (["--gate-inputs", "{}/g", "--max-recorded-tokens", 0], "--max-recorded-tokens"),
        (["--gate-inputs", "{}"], "is not empty (prompts.txt)"),
        (["--gate-inputs", "{}/prompts.txt"], "is a file; name a directory"),
        (["--gate-inputs", "{}/no/where"], "create it first"),
    ],
)
def test_options_that_cannot_work_are_named(command, capfd, tmp_path, options, message):
    assert command(*(str(option).format(tmp_path) for option in options)) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("moeless: error: ")
    assert message in line


def test_an_interrupt_before_anything_is_whole_leaves_nothing(
    command, tmp_path, monkeypatch, capfd
):
    def interrupt(self, request):
        os.kill(os.getpid(), signal.SIGINT)
        return EventStream()  # nothing ever comes

    monkeypatch.setattr(TransformersTextEngine, "submit", interrupt)
    assert command("--gate-inputs", tmp_path / "gate-inputs") == 130
    assert capfd.readouterr().err.endswith("\nmoeless: error: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


def test_a_recording_is_neither_overwritten_nor_mixed_with_another(command, capfd, tmp_path):
    directory = tmp_path / "gate-inputs"
    assert command("--gate-inputs", directory, "--limit", 2) == 0
    assert command("--gate-inputs", directory) == 2
    assert "continue it with --resume" in capfd.readouterr().err
    assert command("--gate-inputs", directory, "--resume", "--temperature", 1) == 2
    assert "config.temperature was 0.0 and is now 1.0" in capfd.readouterr().err
    assert command("--gate-inputs", directory, "--resume", "--limit", 4) == 0
    assert "from 4 of 4 prompts" in capfd.readouterr().out
