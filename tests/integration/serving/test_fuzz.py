"""Requests made up from the OpenAPI document, against a real server.

Runs where MOELESS_FUZZ_EXAMPLES says how many of each kind, as `make fuzz` does.
"""

import os

import httpx
import pytest

from effort import PATIENCE_S
from fakes.fuzzing import fuzz

BODY = {"model": "tiny-granite", "prompt": "Hello", "temperature": 0, "max_tokens": 12}
EXAMPLES = int(os.environ.get("MOELESS_FUZZ_EXAMPLES", "0"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not EXAMPLES, reason="MOELESS_FUZZ_EXAMPLES is not set")
def test_made_up_requests_get_foreseen_answers_and_leave_the_server_as_it_was(
    model_dir, start_serving
):
    server = start_serving(model_dir, "--dtype", "float32", "--max-model-len", "64")

    def answer():
        return httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE_S).json()[
            "choices"
        ]

    before = answer()
    tally = fuzz(server.url, examples=EXAMPLES, number=2)
    assert tally.total > 4 * EXAMPLES
    assert answer() == before
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
