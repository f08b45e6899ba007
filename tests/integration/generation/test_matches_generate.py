"""Greedy tokens are those of the library's ``generate``, whoever shares the batch."""

import random

import pytest
import torch

from families import FAMILIES, make_tiny
from moeless.engines.transformers.generation.batch_cache import BatchCache
from moeless.engines.transformers.generation.model_runner import ModelRunner
from moeless.engines.transformers.generation.packed_prompts import can_pack
from moeless.engines.transformers.generation.position_scaling import scale_by_position

PROMPT_LENGTHS = (1, 2, 3, 7, 8, 9, 17, 40, 64, 1, 25, 90)


def draw_prompts(seed, lengths=PROMPT_LENGTHS):
    chooser = random.Random(seed)
    return [[chooser.randrange(3, 314) for _ in range(length)] for length in lengths]


def submit_together(engine, requests):
    """Let the engine see all of them in one step, so that their prompts are packed."""
    with engine._changed:
        return [engine.submit(request) for request in requests]


def tokens_of(stream):
    return [token_id for event in stream for token_id in event.token_ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_join_and_leave_get_the_tokens_of_generate_alone(
    family, start_engine, make_request, generate_alone
):
    model = FAMILIES[family]()
    chooser = random.Random(family)
    prompts = draw_prompts(family)
    limits = [chooser.randint(1, 40) for _ in prompts]
    expected = [
        generate_alone(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)
    ]
    engine = start_engine(model, max_batch_size=5, prefill_chunk_tokens=16)
    readers, found = [], [[] for _ in prompts]
    for prompt, limit in zip(prompts, limits, strict=True):
        if len(readers) > 6:  # the later ones arrive while others are half-way
            early = chooser.randrange(len(readers))
            if event := next(readers[early], None):
                found[early].extend(event.token_ids)
        readers.append(iter(engine.submit(make_request(prompt, max_tokens=limit))))
    for reader, tokens in zip(readers, found, strict=True):
        tokens.extend(tokens_of(reader))
    assert found == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_stay_right_when_buffers_grow_shift_and_refill(family, generate_alone):
    model = FAMILIES[family]()
    prompts = draw_prompts(f"cache {family}", (5, 1, 30, 2, 60, 11, 3, 100, 4))
    limits = [12, 50, 4, 70, 9, 25, 60, 6, 2]
    expected = [
        generate_alone(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)
    ]
    scale_by_position(model, 512)
    found = decode_with_tiny_buffers(model, prompts, limits, seed=family)
    # What generate ends early by its end token goes on here.
    assert [tokens[: len(wanted)] for tokens, wanted in zip(found, expected, strict=True)] == (
        expected
    )


def decode_with_tiny_buffers(model, prompts, limits, seed):
    """Joins and leaves at random over buffers that start with one row and four columns."""
    chooser = random.Random(seed)
    runner = ModelRunner(model)
    batch = BatchCache(max_rows=4, max_length=128, rows=1, columns=4)
    waiting = list(range(len(prompts)))
    running = []
    found = [[] for _ in prompts]
    with torch.inference_mode():
        while waiting or running:
            if waiting and len(running) < 4 and (not running or chooser.random() < 0.2):
                index = waiting.pop(0)
                cache = BatchCache.for_prefill(len(prompts[index]))
                for start in range(0, len(prompts[index]), 7):
                    logits = runner.prefill(cache, prompts[index][start : start + 7])
                found[index].append(int(logits[0].argmax()))
                batch.append_row(cache)
                running.append(index)
            else:
                batch.reserve(1)
                last = [found[index][-1] for index in running]
                if chooser.random() < 0.2:
                    logits, failures = runner.decode_alone(batch, last)
                    assert not failures
                else:
                    logits = runner.decode(batch, last)
                for index, token_id in zip(running, logits.argmax(-1).tolist(), strict=True):
                    found[index].append(token_id)
            for row in reversed(range(len(running))):
                if len(found[running[row]]) >= limits[running[row]]:
                    batch.remove_row(row)
                    running[row] = running[-1]
                    running.pop()
    return found


def test_a_llama4_row_is_scaled_by_its_own_position_not_the_longest_rows(
    start_engine, make_request, generate_alone
):
    model = make_tiny("llama4", floor_scale=4, attn_scale=-0.3)
    prompts = draw_prompts("scale", (3, 70, 20))
    expected = [generate_alone(model, prompt, 30) for prompt in prompts]
    engine = start_engine(model)
    streams = submit_together(engine, [make_request(p, max_tokens=30) for p in prompts])
    assert [tokens_of(stream) for stream in streams] == expected


def test_prompt_chunks_of_any_size_give_the_same_tokens(
    start_engine, make_request, generate_alone
):
    model = FAMILIES["gpt_oss"]()
    (prompt,) = draw_prompts("chunks", (61,))
    expected = generate_alone(model, prompt, 10)
    for chunk in (1, 7, 60, 61, 500):
        engine = start_engine(model, prefill_chunk_tokens=chunk)
        assert tokens_of(engine.submit(make_request(prompt, max_tokens=10))) == expected
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_packed_into_one_row_give_the_logits_of_each_alone(family):
    model = FAMILIES[family]()
    config = model.config.get_text_config()
    assert can_pack(config)
    prompts = draw_prompts(f"pack {family}", (1, 30, 2, 17, 9))
    scale_by_position(model, 512)
    runner = ModelRunner(model)
    cache = BatchCache.for_prefill(sum(map(len, prompts)))
    with torch.inference_mode():
        packed = runner.prefill_packed(cache, prompts)
        alone = [runner.prefill(BatchCache.for_prefill(len(p)), p)[0] for p in prompts]
    assert torch.allclose(packed, torch.stack(alone), atol=2e-4)


def test_models_that_were_not_checked_are_not_packed():
    config = FAMILIES["mixtral"]().config
    config._attn_implementation = "flash_attention_2"
    assert not can_pack(config)
    config._attn_implementation = "sdpa"
    config.model_type = "new_family"
    assert not can_pack(config)


def test_eager_and_sdpa_attention_agree(start_engine, make_request, generate_alone):
    prompts = draw_prompts("attention", (4, 33))
    for implementation in ("eager", "sdpa"):
        model = FAMILIES["mixtral"]()
        model.set_attn_implementation(implementation)
        expected = [generate_alone(model, prompt, 12) for prompt in prompts]
        engine = start_engine(model)
        streams = submit_together(engine, [make_request(p, max_tokens=12) for p in prompts])
        assert [tokens_of(stream) for stream in streams] == expected
