"""A worker that really has no memory left: loads fail, nothing else does."""

import os
import resource
import signal

import numpy as np
import prometheus_client
import psutil
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from driven_worker import DrivenWorker
from moeless.engines.transformers.loader import load_engine_model
from moeless.functions.host.headroom import SMALL_BYTES, invocation_bytes
from moeless.telemetry.metrics import register_runtime

pytestmark = pytest.mark.slow

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 1, 8, 1024, 2048  # 25 MB an expert
ROWS = 64


@pytest.fixture(scope="module")
def large(tmp_path_factory, tokens_of):
    """A checkpoint whose experts have megabytes, and the tokens of its whole model."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=300,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            max_position_embeddings=256,
        )
    ).eval()
    directory = tmp_path_factory.mktemp("large")
    model.save_pretrained(directory)
    return directory, tokens_of(model)


def limit_memory(pid, num_bytes):
    """Have no more private writable memory than this; the limit can be lifted again.

    Not address space: what an allocator reserves for each thread, and never uses, counts there.
    """
    psutil.Process(pid).rlimit(psutil.RLIMIT_DATA, (num_bytes, resource.RLIM_INFINITY))


def test_loads_that_find_no_memory_are_rolled_back_and_repeated_and_no_token_changes(
    large, serve, tokens_of, wait_until
):
    directory, expected = large
    served = serve(directory, slots=LAYERS * EXPERTS, spare_workers=1, max_rows=ROWS)
    assert tokens_of(served.model) == expected
    wait_until(lambda: served.client.report()["spare_pids"])
    (successor,) = served.client.report()["spare_pids"]
    board = served.client.board
    planned_LED = board.planned_LED.copy()
    victim = served.worker_pids()[0]
    held = served.client.report()["resident_bytes_D"][1]
    # What its predecessor has, which serves the same, without two of its four experts (it may be
    # laying one out, which takes as much as another one), and what loads leave alone.
    spare_bytes = SMALL_BYTES + invocation_bytes(served.loaded.spec.expert, ROWS)
    limit_bytes = psutil.Process(victim).memory_info().data - held // 2 + spare_bytes
    limit_memory(successor, limit_bytes)

    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: served.client.report()["failed_loads_D"][0] > 0)
    for _ in range(3):
        assert tokens_of(served.model) == expected
    report = served.client.report()
    assert report["worker_restarts"] == [1, 0]
    assert report["worker_pids"][0] == successor
    assert report["resident_bytes_D"][0] < held
    assert report["failed_loads_D"][1] == 0
    assert np.array_equal(board.planned_LED, planned_LED)
    registry = prometheus_client.CollectorRegistry()
    register_runtime(registry, served.runtime.snapshot)
    labels = {"model": served.runtime.spec.model_id, "device": "cpu:0"}
    assert registry.get_sample_value("moeless_failed_loads_total", labels) >= 1

    limit_memory(successor, resource.RLIM_INFINITY)
    wait_until(lambda: (board.warm_LED >= planned_LED).all())
    assert tokens_of(served.model) == expected
    assert served.client.report()["worker_restarts"] == [1, 0]
    served.close()


def test_a_worker_survives_loads_at_every_limit_that_leaves_it_its_headroom(large):
    directory, _ = large
    loaded = load_engine_model(directory)
    experts, size = list(range(4)), loaded.spec.expert.num_bytes
    fresh_rows = iter(range(2, ROWS))  # for each of these oneDNN asks for memory of its own
    with DrivenWorker(loaded, rows=ROWS) as worker:
        assert worker.load(experts) == experts
        expected_SH = worker.invoke(experts, rows=1)
        assert list(expected_SH) == experts
        refused = []
        headroom_bytes = SMALL_BYTES + invocation_bytes(loaded.spec.expert, ROWS)
        # In the end there is room for all of them and for one as it is read.
        for quarters in range(26):
            worker.evict(experts)
            now_bytes = psutil.Process(worker.pid).memory_info().data
            limit_memory(worker.pid, now_bytes + headroom_bytes + quarters * size // 4)
            rows = next(fresh_rows)
            warm = worker.load(experts, meanwhile=lambda r=rows: worker.invoke(experts, rows=r))
            for rows in (1, next(fresh_rows)):
                y_SH = worker.invoke(experts, rows=rows)
                assert list(y_SH) == warm
                for expert in warm:
                    torch.testing.assert_close(y_SH[expert][:1], expected_SH[expert])
            refused.append(len(experts) - len(warm))
            limit_memory(worker.pid, resource.RLIM_INFINITY)
        assert refused[0] == 4
        assert refused[-1] == 0
        assert worker.load(experts) == experts
