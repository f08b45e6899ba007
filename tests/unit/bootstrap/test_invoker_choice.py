"""Which invoker ``--invoker auto`` stands for."""

import pytest

from moeless.bootstrap.serving.invoker_choice import choose_invoker, count_memory_nodes
from moeless.cli.options import experts_config
from moeless.cli.serve import serve
from moeless.core.cluster import parse_devices


def choose(devices, *, memory_nodes=1, needs_workers=None):
    return choose_invoker(
        devices and parse_devices(devices), memory_nodes=memory_nodes, needs_workers=needs_workers
    )


@pytest.mark.parametrize("devices", [None, "cpu:1", "cpu:2", "cpu:8", "cuda:0"])
def test_one_device_and_cores_of_one_memory_need_no_processes(devices):
    assert choose(devices).name == "inline"


@pytest.mark.parametrize(
    ("devices", "memory_nodes"), [(None, 2), ("cpu:2", 2), ("cuda:0,1", 1), ("cuda:0,1", 2)]
)
def test_what_computes_faster_beside_its_own_memory_gets_processes(devices, memory_nodes):
    assert choose(devices, memory_nodes=memory_nodes).name == "process"


@pytest.mark.parametrize("devices", [None, "cpu:1", "cpu:2", "cuda:0"])
def test_an_option_of_workers_gets_workers_and_is_named(devices):
    choice = choose(devices, needs_workers="--spare-workers")
    assert choice.name == "process"
    assert "--spare-workers" in choice.reason


@pytest.fixture
def nodes(tmp_path):
    def make(**cores):
        for name, text in cores.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "cpulist").write_text(text)
        return tmp_path

    return make


def test_only_memory_nodes_of_our_own_cores_count(nodes):
    path = nodes(node0="0-3,8\n", node1="4-7\n", node2="\n")
    assert count_memory_nodes([0, 8], nodes=path) == 1
    assert count_memory_nodes([3, 4], nodes=path) == 2


def test_a_system_that_does_not_list_nodes_has_one(nodes, tmp_path):
    assert count_memory_nodes([0], nodes=tmp_path / "nothing") == 1
    assert count_memory_nodes([0], nodes=nodes(node0="no list")) == 1


def parse(*arguments):
    """The experts' configuration of a command line of ``serve``."""
    with serve.make_context("serve", ["demo", *arguments]) as context:
        return experts_config(dict(context.params))


@pytest.mark.parametrize(
    "option",
    [
        ("--spare-workers", "1"),
        ("--worker-threads", "1"),
        ("--spin-us", "5"),
        ("--worker-timeout", "10"),
        ("--max-devices", "4"),
    ],
)
def test_serving_takes_workers_for_every_option_of_theirs(option):
    config = parse(*option)
    assert config.invoker == "process"
    assert option[0] in config.invoker_reason


def test_serving_honours_the_devices_that_were_asked_for_without_processes(monkeypatch):
    monkeypatch.setattr("moeless.cli.options.count_memory_nodes", lambda: 1)
    config = parse("--devices", "cpu:3")
    assert (config.invoker, len(config.devices)) == ("inline", 3)
    assert config.max_devices is None
    assert config.invoker_reason


@pytest.mark.parametrize(
    ("arguments", "nodes", "devices"),
    [
        ([], 1, 1),
        ([], 3, 3),
        (["--invoker", "inline"], 2, 1),
        (["--invoker", "process"], 1, 2),
        (["--spare-workers", "1"], 1, 2),
    ],
)
def test_devices_that_nobody_asked_for_fit_the_invoker(monkeypatch, arguments, nodes, devices):
    monkeypatch.setattr("moeless.cli.options.count_memory_nodes", lambda: nodes)
    assert len(parse(*arguments).devices) == devices


@pytest.mark.parametrize("name", ["process", "inline"])
def test_an_invoker_that_was_named_is_not_explained(name):
    config = parse("--invoker", name)
    assert (config.invoker, config.invoker_reason) == (name, "")
