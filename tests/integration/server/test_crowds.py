"""A process of its own under 2,000 idle connections and slow-loris clients."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from effort import PATIENCE_S
from fakes.text_engine import FakeTextEngine

pytestmark = pytest.mark.slow

BODY = {"model": "fake/model", "prompt": "Hi", "temperature": 0}
CROWD = 2000


@pytest.fixture
def process():
    tests = Path(__file__).resolve().parents[2]
    started = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("serve_fake.py"), "0", "inf"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
    )
    try:
        started.url = started.stdout.readline().strip()
        yield started
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CROWD + 500:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, CROWD + 500), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_two_thousand_slow_connections_keep_nobody_else_from_an_answer(process):
    place = urlsplit(process.url)
    expected = FakeTextEngine().answer_to_prompt("Hi", max_tokens=16)
    me = psutil.Process(process.pid)
    before = me.memory_info().rss
    with contextlib.ExitStack() as stack:
        for number in range(CROWD):
            one = socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S)
            stack.enter_context(contextlib.closing(one))
            # One half says nothing, the other a little of a request that never ends.
            if number % 2:
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ")
        for _ in range(20):  # a connection of its own each time
            answer = httpx.post(f"{process.url}/v1/completions", json=BODY, timeout=PATIENCE_S)
            assert answer.json()["choices"][0]["text"] == expected
        assert me.num_fds() <= 2048 + 512
        assert me.memory_info().rss - before < 200 * 2**20
    assert httpx.get(f"{process.url}/health", timeout=PATIENCE_S).status_code == 200
