"""Fixtures: tiny models, their tokenizer, engines that are closed after the test."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[2])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import pytest  # noqa: E402 - the path to the shared modules comes first
import torch  # noqa: E402

from families import FAMILIES, make_tokenizer  # noqa: E402
from moeless.core.generation import GenerationRequest, SamplingParams  # noqa: E402
from moeless.engines.transformers.generation import (  # noqa: E402
    EngineOptions,
    TransformersTextEngine,
)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def granite():
    return FAMILIES["granitemoeshared"]()


@pytest.fixture
def start_engine(tokenizer):
    engines = []

    def start(model, **keywords):
        limits = {
            name: keywords.pop(name)
            for name in list(keywords)
            if name in EngineOptions.__dataclass_fields__
        }
        engine = TransformersTextEngine(
            model, tokenizer, model_id="tiny", options=EngineOptions(**limits), **keywords
        )
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def make_request():
    counter = iter(range(1_000_000))

    def make(prompt_ids, **sampling):
        return GenerationRequest(
            request_id=f"request-{next(counter)}",
            prompt_ids=tuple(prompt_ids),
            sampling=SamplingParams(**sampling),
        )

    return make


@pytest.fixture(scope="session")
def generate_alone():
    """The tokens that the library's own ``generate`` gives for one prompt."""

    def generate(model, prompt_ids, max_tokens):
        ids = torch.tensor([list(prompt_ids)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
        )
        return output[0, len(prompt_ids) :].tolist()

    return generate
