"""Fixtures: one tiny checkpoint, its tokens, and runtimes that are closed after the test."""

import shutil
import sys
import tempfile
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[2])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import psutil  # noqa: E402 - the path to the shared modules comes first
import pytest  # noqa: E402
import torch  # noqa: E402

import effort  # noqa: E402
from families import make_tiny  # noqa: E402
from moeless.bootstrap.serving.experts import start_experts  # noqa: E402
from moeless.config import ExpertsConfig, PolicyConfig  # noqa: E402
from moeless.core.cluster import parse_devices  # noqa: E402
from moeless.engines.transformers.loader import load_engine_model  # noqa: E402
from moeless.functions.compute.experts import function_bytes  # noqa: E402

PROMPT = torch.tensor([[5, 17, 200, 33, 8], [90, 41, 3, 77, 120]])
NEW_TOKENS = 12


@pytest.fixture(scope="session")
def tokens_of():
    """The greedy tokens of a model for the prompt of these tests."""

    def generate(model):
        with torch.inference_mode():
            return model.generate(
                PROMPT,
                attention_mask=torch.ones_like(PROMPT),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
            ).tolist()

    return generate


@pytest.fixture(scope="session")
def reference(tmp_path_factory, tokens_of):
    """A checkpoint and the tokens that its whole model generates."""
    model = make_tiny("mixtral")
    directory = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory)
    return directory, tokens_of(model)


@pytest.fixture(scope="session")
def expected(reference):
    return reference[1]


@pytest.fixture
def checkpoint(reference, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(reference[0], tmp_path / "checkpoint")


class Served:
    """A model whose experts run in workers."""

    def __init__(self, directory, config):
        self.loaded = load_engine_model(directory)
        self.runtime = start_experts(self.loaded, config(self.loaded.spec))
        self.client = self.runtime.client

    @property
    def model(self):
        return self.loaded.model

    def worker_pids(self):
        return self.client.report()["worker_pids"]

    def close(self):
        self.runtime.close()


@pytest.fixture(scope="module")
def runtime_dir():
    """A short path, as sockets need it, that must be empty in the end."""
    directory = Path(tempfile.mkdtemp(prefix="moe-"))
    yield directory
    left = list(directory.iterdir())
    shutil.rmtree(directory)
    assert left == []


@pytest.fixture(scope="module")
def serve(runtime_dir):
    """Start a model; ``slots`` is the experts that each device may hold."""
    running = []
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    patch.setenv("OMP_NUM_THREADS", "1")

    def start(directory, *, policy="static", slots=None, devices="cpu:2", **options):
        def config(spec):
            memory = slots and slots * function_bytes(spec.expert, "cpu")
            return ExpertsConfig(
                devices=parse_devices(devices) if devices else (),
                policy=PolicyConfig(policy=policy) if isinstance(policy, str) else policy,
                device_memory_bytes=memory,
                **options,
            )

        served = Served(directory, config)
        running.append(served)
        return served

    yield start
    for served in running:
        served.close()
    patch.undo()


@pytest.fixture(scope="session")
def wait_until():
    """Wait for something that another process does."""
    return effort.wait_until


@pytest.fixture(scope="session")
def all_ended():
    """Whether processes are gone; one that nobody has reaped yet counts as gone."""

    def ended(pids):
        for pid in pids:
            try:
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    return False
            except psutil.NoSuchProcess:
                continue
        return True

    return ended
