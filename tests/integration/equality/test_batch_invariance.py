"""With batch invariance an answer is the same to the bit alone and beside any others."""

import random
import shutil

import pytest
import torch

from families import FAMILIES, make_tiny, make_tokenizer
from moeless.bootstrap.serving.engine import start_engine
from moeless.config import EngineConfig, ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.core.generation import GenerationRequest, SamplingParams
from moeless.errors import ConfigError

TOKENS = 12


@pytest.fixture(autouse=True)
def two_compute_threads():
    """Products are shared out among threads as in serving."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start(tmp_path):
    """Starts an engine as ``moeless serve`` does, experts split over two devices."""
    running = []

    def start(family, dtype, *, invoker="inline", invariant=True):
        directory = tmp_path / family
        if not directory.exists():
            make_tiny(family).to(getattr(torch, dtype)).save_pretrained(directory)
            make_tokenizer().save_pretrained(directory)
        experts = ExpertsConfig(
            devices=parse_devices("cpu:2"), invoker=invoker, policy=PolicyConfig(policy="paper")
        )
        engine = EngineConfig(
            model=str(directory),
            dtype=dtype,
            max_batch_size=6,
            prefill_chunk_tokens=16,
            batch_invariant=invariant,
            threads=2,
        )
        running.append(start_engine(engine, experts))
        return running[-1].engine

    yield start
    for engine in running:
        engine.close()
    shutil.rmtree(tmp_path, ignore_errors=True)


def ask(engine, prompts):
    """Tokens and log-probabilities of prompts that are answered at the same time."""
    streams = [
        engine.submit(
            GenerationRequest(
                request_id=f"request-{number}",
                prompt_ids=prompt,
                sampling=SamplingParams(max_tokens=TOKENS, logprobs=3, ignore_eos=True),
            )
        )
        for number, prompt in enumerate(prompts)
    ]
    return [
        [
            (event.token_ids, [(entry.logprob, entry.top) for entry in event.logprobs])
            for event in stream
            if event.token_ids
        ]
        for stream in streams
    ]


def draw_prompts(family):
    chooser = random.Random(family)
    return [tuple(chooser.randrange(3, 314) for _ in range(n)) for n in (5, 17, 1, 40, 9, 24)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_the_same_to_the_bit_whatever_runs_beside_it(family, dtype, start):
    engine, prompts = start(family, dtype), draw_prompts(family)
    alone = [ask(engine, [prompt])[0] for prompt in prompts]
    assert all(len(answer) == TOKENS for answer in alone)
    assert ask(engine, prompts) == alone
    for prompt, answer in zip(prompts[:2], alone, strict=False):
        assert ask(engine, [prompt] * 2) == [answer] * 2
        assert ask(engine, [prompt] * 6) == [answer] * 6


@pytest.mark.slow
def test_workers_do_not_change_it(start):
    prompts = draw_prompts("mixtral")
    inline = ask(start("mixtral", "bfloat16"), prompts[:1])
    engine = start("mixtral", "bfloat16", invoker="process")
    assert ask(engine, prompts)[:1] == inline


def test_what_cannot_be_invariant_is_refused(start):
    with pytest.raises(ConfigError, match="batch invariance is for known families on a CPU"):
        start("mixtral", "float16")
