"""Tokens per second of 16 concurrent requests: our loop, transformers' own, a static batch.

The model has the demo model's shape and random float32 weights. The three arms take turns within
one run, so that a busy machine slows all of them alike; CPU seconds say more on a shared one.
Equal prompts and equal lengths are the best case of the static batch, which cannot let requests
join or leave.

    python benchmarks/bench_decode.py [--rounds 3] [--requests 16] [--prompt 32] [--tokens 24]
"""

import argparse
import gc
import statistics
import time

import torch
import transformers
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
)

from moeless.core.generation import GenerationRequest, SamplingParams
from moeless.engines.transformers.generation import EngineOptions, TransformersTextEngine

VOCABULARY = 49152


class NumberTokenizer:
    """Stands in for a tokenizer: a token is shown as one letter."""

    eos_token_id = None

    def decode(self, token_ids, **_):
        """Letters for ids."""
        return "".join(chr(97 + token_id % 26) for token_id in token_ids)


def demo_shaped_config():
    return GraniteMoeSharedConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=48,
        shared_intermediate_size=768,
        num_local_experts=16,
        num_experts_per_tok=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=0,
        pad_token_id=0,
    )


def run_ours(engine, prompts, new_tokens):
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    streams = [
        engine.submit(
            GenerationRequest(request_id=f"{index}", prompt_ids=tuple(p), sampling=sampling)
        )
        for index, p in enumerate(prompts)
    ]
    return [[t for event in stream for t in event.token_ids] for stream in streams]


def run_library(model, prompts, new_tokens):
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=128, page_size=32, max_batch_tokens=512, allow_block_sharing=False
        ),
        persistent_manager=True,
    )
    return [output.generated_tokens for output in outputs.values()]


def run_static(model, prompts, new_tokens):
    ids = torch.tensor(prompts)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
    )
    return output[:, ids.shape[1] :].tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GraniteMoeSharedForCausalLM(demo_shaped_config()).float().eval()
    # The library's own batching changes the attention of its model, so it gets one of its own.
    transformers.logging.set_verbosity_error()
    twin = GraniteMoeSharedForCausalLM(demo_shaped_config()).float().eval()
    twin.load_state_dict(model.state_dict(), assign=True)
    twin.tie_weights()
    gc.collect()
    prompts = torch.randint(1, VOCABULARY, (options.requests, options.prompt)).tolist()
    limits = EngineOptions(max_batch_size=options.requests)
    with TransformersTextEngine(
        model, NumberTokenizer(), model_id="bench", options=limits
    ) as engine:
        arms = {
            "ours": lambda n: run_ours(engine, prompts, n),
            "transformers generate_batch": lambda n: run_library(twin, prompts, n),
            "static generate": lambda n: run_static(model, prompts, n),
        }
        for run in arms.values():
            run(2)
        wall = {name: [] for name in arms}
        cpu = {name: [] for name in arms}
        for _ in range(options.rounds):
            for name, run in arms.items():
                started = time.perf_counter(), time.process_time()
                outputs = run(options.tokens)
                wall[name].append(time.perf_counter() - started[0])
                cpu[name].append(time.process_time() - started[1])
                assert all(len(tokens) == options.tokens for tokens in outputs), name
    total = options.requests * options.tokens
    print(
        f"{options.requests} requests of {options.prompt} + {options.tokens} tokens, float32, "
        f"{torch.get_num_threads()} threads, median of {options.rounds} rounds"
    )
    for clock, seconds in (("second", wall), ("CPU second", cpu)):
        ours = statistics.median(seconds["ours"])
        for name, times in seconds.items():
            middle = statistics.median(times)
            rounds = ", ".join(f"{total / value:.1f}" for value in times)
            print(
                f"{name:28} {total / middle:7.1f} tokens per {clock:10}  "
                f"ours / it: {middle / ours:5.2f}   ({rounds})"
            )


if __name__ == "__main__":
    main()
