"""Requests that join and leave a served model get the tokens of plain ``generate``."""

import random
import shutil

import pytest
import torch
from equality_reference import generate, require_clear_choices

from families import make_tokenizer
from moeless.bootstrap.serving.engine import start_engine
from moeless.config import EngineConfig, ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.core.generation import GenerationRequest, SamplingParams

PROMPT_LENGTHS = (1, 2, 9, 17, 40, 1, 25, 64, 8)


@pytest.fixture
def running_engine(tmp_path):
    """Starts the engine as ``moeless serve`` does, on two workers with small invocations."""
    running = []

    def start(checkpoint):
        directory = tmp_path / "model"
        shutil.copytree(checkpoint, directory)
        make_tokenizer().save_pretrained(directory)
        experts = ExpertsConfig(
            devices=parse_devices("cpu:2"),
            policy=PolicyConfig(policy="paper"),
            worker_threads=1,
            max_rows=12,
        )
        engine = EngineConfig(model=str(directory), max_batch_size=4, prefill_chunk_tokens=16)
        running.append(start_engine(engine, experts))
        return running[-1]

    yield start
    for engine in running:
        engine.close()


def expected_tokens(model, prompt, max_tokens):
    ids = torch.tensor([prompt])
    tokens = generate(model, ids, torch.ones_like(ids), max_new_tokens=max_tokens)
    require_clear_choices(model, tokens, torch.ones_like(ids))
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "family", ["granitemoeshared", pytest.param("gpt_oss", marks=pytest.mark.slow)]
)
def test_requests_that_join_and_leave_get_the_tokens_of_generate_alone(
    family, reference_of, running_engine, splits
):
    reference = reference_of(family)
    chooser = random.Random(family)
    prompts = [[chooser.randrange(3, 314) for _ in range(n)] for n in PROMPT_LENGTHS]
    limits = [chooser.randint(2, 24) for _ in prompts]
    expected = [
        expected_tokens(reference.model, prompt, limit)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    running = running_engine(reference.directory)
    readers, found = [], [[] for _ in prompts]
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if number > 4:  # the later ones arrive while others are half-way
            early = chooser.randrange(number)
            if event := next(readers[early], None):
                found[early].extend(event.token_ids)
        request = GenerationRequest(
            request_id=f"request-{number}",
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=limit),
        )
        readers.append(iter(running.engine.submit(request)))
    for reader, tokens in zip(readers, found, strict=True):
        tokens.extend(token_id for event in reader for token_id in event.token_ids)
    assert found == expected

    snapshot = running.experts.snapshot()
    assert snapshot.steps > max(limits)
    assert (snapshot.tokens_LE.sum(axis=1) > 0).all(), "a layer was not computed by functions"
    assert any((share_ED > 0).sum(axis=0).all() for _, share_ED in splits), "one worker idled"
