"""``moeless record`` on the command line: what it prints, writes and refuses."""

import os
import signal
import subprocess
import sys

import pytest

from moeless.cli.main import run
from moeless.engines.transformers.generation.engine import TransformersTextEngine
from moeless.engines.transformers.generation.streams import EventStream
from moeless.workloads.recording.recorder import RoutingRecorder
from moeless.workloads.routing_trace import read_trace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(reference_of):
    return reference_of("mixtral").directory


@pytest.fixture
def command(model, prompts_file, tmp_path):
    """Run the command with usual arguments, and others in their place."""

    def command(*more, prompts=prompts_file, out=tmp_path / "trace.npz", directory=model):
        usual = ["--prompts", prompts, "--out", out, "--max-tokens", 5, "--threads", 1]
        return run([str(part) for part in ("record", directory, *usual, *more)])

    return command


@pytest.fixture
def refuses(command, capfd, tmp_path):
    """Run a command that must fail; returns its error line."""

    def refuses(*more, **arguments):
        capfd.readouterr()
        assert command(*more, **arguments) == 2
        progress = ("moeless: loading", "moeless: starting", "moeless: computing", "prompts ")
        lines = [
            line for line in capfd.readouterr().err.splitlines() if not line.startswith(progress)
        ]
        assert len(lines) == 1, lines
        assert lines[0].startswith("moeless: error: ")
        assert not (tmp_path / "trace.npz").exists()
        return lines[0]

    return refuses


def test_it_says_what_the_trace_holds(command, capfd, tmp_path):
    assert command("--limit", 3, "--concurrency", 2) == 0
    trace = read_trace(tmp_path / "trace.npz")
    out = capfd.readouterr().out
    assert f"holds {len(trace)} steps: {trace.tokens_N.sum()} tokens" in out
    assert "3 of 3 prompts" in out
    assert len(out.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_prompts_that_the_model_cannot_serve_are_skipped_and_counted(command, capfd, tmp_path):
    assert command("--max-model-len", 60, "--unit", "requests") == 0
    out = capfd.readouterr().out
    assert "skipped" in out
    assert "1 to 59" in out
    assert read_trace(tmp_path / "trace.npz").tokens_N.max() < 60


def test_an_interrupt_says_so_and_keeps_what_is_whole(command, capfd, tmp_path, monkeypatch):
    finish, finished = RoutingRecorder.finish, []

    def finish_and_interrupt(self, request_id):
        finish(self, request_id)
        finished.append(request_id)
        if len(finished) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RoutingRecorder, "finish", finish_and_interrupt)
    assert command("--unit", "requests", "--concurrency", 1) == 130
    assert "interrupted; what was whole is kept" in capfd.readouterr().out
    assert 2 <= len(read_trace(tmp_path / "trace.npz")) < 7
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_anything_is_whole_writes_nothing(
    command, capfd, tmp_path, monkeypatch
):
    def interrupt(self, request):
        os.kill(os.getpid(), signal.SIGINT)
        return EventStream()  # nothing ever comes

    monkeypatch.setattr(TransformersTextEngine, "submit", interrupt)
    assert command() == 130
    assert capfd.readouterr().err.endswith("\nmoeless: error: interrupted\n")
    assert list(tmp_path.iterdir()) == [tmp_path / "prompts.txt"]


def test_prompts_alone_are_prefill(command, tmp_path):
    assert command("--max-tokens", 1, "--unit", "requests", "--topk-ids") == 0
    trace = read_trace(tmp_path / "trace.npz")
    assert trace.meta.phase == "prefill"
    assert trace.decode_tokens_N.tolist() == [0] * len(trace)
    assert trace.topk_offsets[-1] == trace.tokens_N.sum()


def test_a_prompt_file_that_is_not_there_is_named(refuses, tmp_path):
    assert "missing.jsonl" in refuses(prompts=tmp_path / "missing.jsonl")


def test_a_prompt_file_that_is_no_prompt_file_is_named_with_the_line(refuses, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "good"}\n{"prompt": \n')
    line = refuses(prompts=path)
    assert "broken.jsonl" in line
    assert "line 2" in line


def test_a_missing_model_directory_is_named(refuses, tmp_path):
    assert "no-model" in refuses(directory=tmp_path / "no-model")


def test_a_missing_output_folder_is_named(refuses, tmp_path):
    line = refuses(out=tmp_path / "nowhere" / "trace.npz")
    assert "nowhere" in line
    assert "create it" in line


def test_an_output_that_is_a_directory_is_named(refuses, tmp_path):
    assert "is a directory" in refuses(out=tmp_path)


def test_an_output_folder_that_cannot_be_written_is_named(refuses, tmp_path, monkeypatch):
    def read_only(**_options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    line = refuses()
    assert str(tmp_path) in line
    assert "Read-only file system" in line


@pytest.mark.parametrize(
    "option",
    [
        ["--limit", 0],
        ["--max-tokens", 0],
        ["--concurrency", 0],
        ["--unit", "tokens"],
        ["--temperature", -1],
        ["--seed", -1],
        ["--devices", "gpu"],
        ["--dtype", "int8"],
    ],
)
def test_an_option_that_cannot_work_is_named(refuses, option):
    assert str(option[0]) in refuses(*option)


def test_prompts_none_of_which_fits_are_no_trace(refuses, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("A prompt of many words.\nAnother one.\n")
    line = refuses("--max-model-len", 2, prompts=path)
    assert "none of the 2 prompts could be recorded" in line
    assert "1 to 1" in line


def test_help_has_examples_and_needs_nothing_heavy():
    script = (
        "import sys\nfrom moeless.cli.main import run\ncode = run(['record', '--help'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Examples:" in done.stdout
    assert "--max-tokens 1" in done.stdout


def test_experts_in_worker_processes_are_recorded_as_well(command, tmp_path):
    traces = []
    for invoker in ("process", "inline"):
        options = ["--invoker", invoker, "--devices", "cpu:2", "--unit", "requests"]
        assert command(*options, "--limit", 4) == 0
        traces.append(read_trace(tmp_path / "trace.npz"))
    assert traces[0].loads_NLE.tolist() == traces[1].loads_NLE.tolist()
