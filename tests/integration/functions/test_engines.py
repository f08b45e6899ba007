"""Several engines of one model on the same workers: shared instances, and nothing else."""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from moeless.errors import FunctionError
from moeless.functions.supervisor.client import SupervisorClient

pytestmark = pytest.mark.slow

# An engine of its own process: it says that it has begun, then generates until it is killed.
ENGINE = """
import json, sys
from pathlib import Path
import torch
from moeless.bootstrap.serving.experts import start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.engines.transformers.loader import load_engine_model

torch.set_num_threads(1)
loaded = load_engine_model(Path(sys.argv[1]))
config = ExpertsConfig(pool=Path(sys.argv[2]), policy=PolicyConfig(policy=sys.argv[3]))
runtime = start_experts(loaded, config)
prompt = torch.tensor([[3, 1, 4, 1, 5, 9]])
rounds = 0
while True:
    with torch.inference_mode():
        loaded.model.generate(prompt, do_sample=False, max_new_tokens=8, min_new_tokens=8)
    rounds += 1
    if rounds == 2:
        print(json.dumps(runtime.client.report()["cold_starts_L"]), flush=True)
"""


@pytest.fixture
def start_engine():
    """Start an engine of its own process; returns it once it generates."""
    running = []

    def start(directory, pool, policy):
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(directory), str(pool), policy],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(engine)
        assert json.loads(engine.stdout.readline())
        return engine

    yield start
    for engine in running:
        engine.kill()
        engine.wait()
        engine.stdout.close()


@pytest.fixture(scope="module")
def first(serve, reference):
    return serve(reference[0], policy="moeless")


@pytest.fixture
def pool(first):
    return first.runtime.supervisor.directory.path


@pytest.fixture
def join(first, pool, serve, reference):
    def attach(**options):
        return serve(reference[0], policy="moeless", devices=None, pool=pool, **options)

    return attach


def test_two_engines_give_the_whole_models_tokens_at_the_same_time_from_the_same_instances(
    first, join, tokens_of, expected
):
    tokens_of(first.model)
    before = first.client.report()
    second = join()
    assert second.client.report()["worker_pids"] == before["worker_pids"]
    results = {}

    def generate(name, served):
        results[name] = [tokens_of(served.model) for _ in range(3)]

    threads = [
        threading.Thread(target=generate, args=item)
        for item in [("first", first), ("second", second)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"first": [expected] * 3, "second": [expected] * 3}
    board, other = first.client.board, second.client.board
    assert (board.warm_LED == other.warm_LED).all()
    assert (board.planned_LED == other.planned_LED).all()
    assert int(board.step[0]) > int(other.step[0]) > 0
    second.close()


def test_an_engine_that_is_killed_leaves_the_others_request_and_all_instances_alone(
    first, pool, reference, start_engine, tokens_of, expected
):
    tokens_of(first.model)
    other = start_engine(reference[0], pool, "moeless")
    before = first.client.report()
    killer = threading.Timer(0.05, other.send_signal, [signal.SIGKILL])
    killer.start()
    for _ in range(3):
        assert tokens_of(first.model) == expected
    killer.join()
    other.wait()
    assert tokens_of(first.model) == expected
    after = first.client.report()
    for name in ("worker_pids", "worker_restarts", "blocking_loads", "failed_loads_D"):
        assert after[name] == before[name], name
    assert (first.client.board.warm_LED.any(axis=2)).all()


def test_one_engine_that_ends_takes_no_plan_with_it(first, join, tokens_of, expected):
    second = join()
    assert tokens_of(second.model) == expected
    second.close()
    board = first.client.board
    first.client.report()  # the supervisor has had its turn
    assert board.planned_LED.any(axis=2).all()
    assert tokens_of(first.model) == expected


def test_an_engine_that_leaves_twice_closes_no_descriptor_of_others(join):
    second = join()
    second.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
    second.close()
    for descriptor in others:
        os.close(descriptor)  # fails if somebody has closed it


def test_what_an_engine_used_stays_on_the_bill_when_it_is_gone(first, join, tokens_of):
    second = join()
    tokens_of(second.model)
    billed = sum(first.client.report()["gb_s_L"]["billed"])
    own = second.client.board.busy_ns_LD.sum() * second.client.function_bytes / 1e18
    assert billed >= own > 0
    second.close()
    first.client.report()
    assert sum(first.client.report()["gb_s_L"]["billed"]) == pytest.approx(billed)


def test_an_engine_that_looks_ahead_differently_is_refused(first, pool):
    loaded, shape = first.loaded, first.runtime.invoker.shape
    with pytest.raises(FunctionError, match="give this one the same options of the policy"):
        SupervisorClient(
            str(pool / "supervisor.sock"),
            spec=loaded.spec,
            layout=loaded.layout,
            directory=loaded.directory,
            shape=shape,
            lookahead=2,
        )


@pytest.fixture(scope="module")
def crowded(serve, reference):
    """Two engines on devices that hold one layer between them: what one needs drives out the
    other's."""
    first = serve(reference[0], slots=4, keep_alive_s=300.0)
    pool = first.runtime.supervisor.directory.path
    return first, serve(reference[0], policy="static", devices=None, pool=pool)


def test_demands_of_two_engines_are_answered_to_the_one_that_made_them(
    crowded, tokens_of, expected
):
    with concurrent.futures.ThreadPoolExecutor() as threads:
        running = [threads.submit(tokens_of, served.model) for served in crowded]
    # An engine that waited in vain says for what.
    assert [generated.result() for generated in running] == [expected, expected]
    # Who waited for most of them depends on who came first.
    assert sum(served.client.report()["blocking_loads"] for served in crowded) > 0


@pytest.mark.parametrize("ends", ["with its last layer", "in the middle"])
def test_an_engine_that_rests_keeps_nothing_from_the_others(crowded, tokens_of, expected, ends):
    resting, other = crowded
    board = resting.client.board
    if ends == "with its last layer":
        layer = len(board.warm_LED) - 1
    else:
        layer = 1

        def fail(at, _ids, _x):
            if at == 2:
                raise RuntimeError("no memory")

        resting.runtime.dispatcher.observe_choices(fail)
    many = torch.arange(3, 253)[None]  # tokens for all experts of a layer
    with torch.inference_mode(), contextlib.suppress(RuntimeError):
        resting.model(many)
    resting.runtime.dispatcher.observe_choices(None)
    assert board.warm_LED[layer].any(axis=1).all(), "its experts are all that there is room for"
    assert tokens_of(other.model) == expected
