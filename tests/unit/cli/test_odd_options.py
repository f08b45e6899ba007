"""Odd values of options are refused in one line before anything heavy is loaded."""

import socket
import subprocess
import sys

import pytest

from moeless.cli.main import run


def without_progress(err: str) -> list[str]:
    """Lines that do not say that something is being loaded: how often depends on the machine."""
    return [line for line in err.splitlines() if not line.startswith("moeless: loading")]


@pytest.fixture
def refused(capsys):
    """Run a command that must be refused; returns the one line it printed."""

    def check(*arguments: str) -> str:
        assert run(list(arguments)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = without_progress(err)
        assert line.startswith("moeless: error: ")
        return line

    return check


@pytest.mark.parametrize("group", ["devices", "pool", "predictor", "demo-model"])
def test_a_group_without_a_command_names_its_commands_in_one_short_line(refused, group):
    line = refused(group)
    assert f"moeless {group} needs a command: " in line
    assert f"see moeless {group} --help" in line
    assert "Usage" not in line
    assert len(line) < 200


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "demo", "--device-memory", ""],
        ["inspect", "demo", "--device-memory", ""],
        ["record", "demo", "--prompts", "arena", "--out", "x.npz", "--max-disk", ""],
        ["replay", "--routing", "x.npz", "--device-memory", ""],
        ["plan", "x.csv", "--device-memory", ""],
        ["plan", "x.csv", "--expert-bytes", ""],
        ["devices", "add", "cpu", "--budget", ""],
    ],
)
def test_an_empty_size_is_not_taken_for_none(refused, command):
    option = command[-2]
    assert f"{option} '' is not a size" in refused(*command)


def test_an_empty_id_is_not_taken_for_none(refused):
    assert "--model-id is empty" in refused("serve", "demo", "--model-id", "")


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "command",
    [
        ["serve", "demo", "--request-timeout"],
        ["serve", "demo", "--trace-sample"],
        ["serve", "demo", "--worker-timeout"],
        ["pool", "serve", "--pool", "x", "--device-memory", "1GB", "--linger"],
        ["generate", "demo", "hello", "--temperature"],
        ["generate", "demo", "hello", "--top-p"],
        ["record", "demo", "--prompts", "arena", "--temperature"],
        ["predictor", "train", "x", "--out", "y", "--threshold"],
        ["predictor", "train", "x", "--out", "y", "--held-out"],
    ],
)
def test_what_is_no_number_is_refused_by_the_name_of_its_option(refused, command, value):
    assert command[-1] in refused(*command, value)


@pytest.mark.parametrize("value", ["nan", "-inf", "-1"])
def test_a_keep_alive_may_be_without_end_but_no_other_odd_number(refused, value):
    assert "keep-alive" in refused("serve", "demo", "--keep-alive", value)
    assert "/no/such" in refused("serve", "/no/such", "--keep-alive", "inf")


@pytest.mark.parametrize("model", ["/no/such/model", "typo", "", __file__])
def test_a_model_that_cannot_be_one_is_told_before_libraries_are_loaded(model):
    script = (
        "import sys\nfrom moeless.cli.main import run\n"
        f"code = run(['generate', {model!r}, 'hello', '--policy', 'magic'])\n"
        "assert not {'torch', 'numba', 'transformers'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "is not a directory" in line or "is a file" in line


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "demo"],
        ["serve", "demo", "--invoker", "inline"],
        ["pool", "serve", "--pool", "x"],
    ],
)
def test_a_cpu_device_cannot_have_more_memory_than_the_machine(
    refused, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    line = refused(*command, "--device-memory", "1000TB")
    assert "--device-memory of 1,000,000,000,000,000 bytes" in line
    assert "bytes of memory that this machine" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "option",
    [
        ("--spare-workers", "1"),
        ("--worker-threads", "1"),
        ("--spin-us", "5"),
        ("--worker-timeout", "5"),
        ("--max-devices", "4"),
    ],
)
@pytest.mark.parametrize("command", [["serve", "demo"], ["generate", "demo", "hello"]])
def test_options_of_workers_are_refused_where_there_are_none(refused, command, option):
    line = refused(*command, "--invoker", "inline", *option)
    assert f"leave {option[0]} out" in line


def test_a_port_in_use_is_told_before_the_model_is_looked_for(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused("serve", "/no/such/model", "--port", str(port))
    assert f"port {port} is in use" in line


def test_the_demo_of_a_wrong_model_ends_as_its_server_does(capfd):
    assert run(["demo", "--model", "/no/such/model"]) == 2
    (line,) = without_progress(capfd.readouterr().err)
    assert "/no/such/model is not a directory" in line


def test_the_list_of_commands_has_whole_sentences(capsys):
    assert run(["--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert "  serve " in commands
    assert "..." not in commands
