"""What unmodified transformers answers, and the comparison of MoEless with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from families import PAD_ID, VOCABULARY, make_tiny
from moeless.bootstrap.serving.experts import ExpertsRuntime, start_experts
from moeless.config import ExpertsConfig, PolicyConfig
from moeless.core.cluster import parse_devices
from moeless.engines.transformers.loader import LoadedModel, load_engine_model
from moeless.functions.compute.experts import function_bytes

TOLERANCE = 1e-5
"""Largest difference of a logit in float32: the order of sums may differ, nothing else.

Logits are of the order of one here (see ``_LOGIT_SCALE``). Against float64, transformers itself is
off by a third of this.
"""

_LOGIT_SCALE = 0.125

NEW_TOKENS = 8

# With at least three MoE layers a forecast two layers ahead has something to predict.
LAYERS = {"qwen3_moe": 4, "deepseek_v3": 4, "llama4": 6}

# Lengths of the prompts of each batch; shorter prompts are padded on the left.
BATCHES = {
    "one token": (1,),
    "one token each": (1, 1, 1),
    "same length": (17, 17),
    "padded": (1, 5, 12),
    "long": (97, 60),
}


DECODED = ("one token", "padded", "long")
"""The batches that are also continued greedily, to keep the time short."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of prompts and the answer of transformers.

    Args:
        input_ids: Prompts, padded on the left [B, T].
        attention_mask: 1 where a token is [B, T].
        logits: Answer of one forward [B, T, V].
        tokens: Prompt and greedy continuation [B, T + N].
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A checkpoint with the answers of transformers.

    Args:
        family: The model's family.
        directory: Where the checkpoint is.
        model: The unmodified model.
        cases: Answers by the name of their batch.
    """

    family: str
    directory: Path
    model: PreTrainedModel
    cases: dict[str, Case]


def make_reference(family: str, folder: Path) -> Reference:
    """Save a tiny model, load it again with transformers alone, and let it answer."""
    overrides = {"num_hidden_layers": LAYERS[family]} if family in LAYERS else {}
    directory = folder / family
    tiny = make_tiny(family, **overrides)
    with torch.no_grad():
        for parameter in tiny.model.norm.parameters():
            parameter.mul_(_LOGIT_SCALE)
    tiny.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(11)
    cases = {name: _answer(model, lengths, generator) for name, lengths in BATCHES.items()}
    return Reference(family=family, directory=directory, model=model, cases=cases)


def _answer(model: PreTrainedModel, lengths: tuple[int, ...], generator: torch.Generator) -> Case:
    longest = max(lengths)
    input_ids = torch.full((len(lengths), longest), PAD_ID)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        prompt = torch.randint(3, VOCABULARY, (length,), generator=generator)
        input_ids[row, longest - length :] = prompt
        attention_mask[row, longest - length :] = 1
    tokens = generate(model, input_ids, attention_mask)
    require_clear_choices(model, tokens, attention_mask)
    return Case(
        input_ids=input_ids,
        attention_mask=attention_mask,
        logits=forward(model, input_ids, attention_mask),
        tokens=tokens,
    )


def require_clear_choices(model, tokens: torch.Tensor, prompt_mask: torch.Tensor) -> None:
    """No greedy choice may be so close that differences within the tolerance could turn it."""
    longest = prompt_mask.shape[1]
    new = tokens.shape[1] - longest
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(tokens), new)], dim=1)
    best = forward(model, tokens, mask)[:, longest - 1 : -1].topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 4 * TOLERANCE, "choose another seed"


@torch.no_grad()
def forward(model, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Logits of all positions."""
    return model(input_ids=input_ids, attention_mask=attention_mask).logits


@torch.no_grad()
def generate(
    model, input_ids: torch.Tensor, attention_mask: torch.Tensor, max_new_tokens: int = NEW_TOKENS
) -> torch.Tensor:
    """Prompts and greedy continuations."""
    return model.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=PAD_ID,
    )


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model whose experts MoEless runs."""

    loaded: LoadedModel
    runtime: ExpertsRuntime


@contextmanager
def serving(
    directory: Path,
    *,
    invoker: str,
    devices: int,
    dtype: str = "auto",
    tight: bool = False,
    max_rows: int = 4096,
    tell: Callable[[str], None] = lambda _: None,
    **policy: object,
) -> Iterator[Served]:
    """Serve a checkpoint with MoEless on CPU devices.

    Args:
        directory: The checkpoint.
        invoker: ``inline`` or ``process``.
        devices: D.
        dtype: As ``load_engine_model`` takes it.
        tight: Whether the devices hold the experts of one layer and no more; else all replicas
            that the policy may ask for have room.
        max_rows: Tokens per invocation.
        tell: As ``start_experts`` takes it.
        policy: Fields of ``PolicyConfig``.
    """
    loaded = load_engine_model(directory, dtype=dtype)
    budget = None
    if tight:
        slots = -(-loaded.spec.num_experts // devices)
        budget = slots * function_bytes(loaded.spec.expert, "cpu")
    config = ExpertsConfig(
        devices=parse_devices(f"cpu:{devices}"),
        invoker=invoker,
        policy=PolicyConfig(**policy),
        device_memory_bytes=budget,
        worker_threads=1,
        max_rows=max_rows,
    )
    runtime = start_experts(loaded, config, tell=tell)
    try:
        yield Served(loaded=loaded, runtime=runtime)
    finally:
        runtime.close()


def assert_same_logits(served: Served, case: Case, name: str = "") -> None:
    """One forward gives the logits of transformers, padded positions included."""
    logits = forward(served.loaded.model, case.input_ids, case.attention_mask)
    assert logits.dtype == case.logits.dtype
    difference = (logits - case.logits).abs().max().item()
    assert difference <= TOLERANCE, f"{name}: logits differ by {difference:.2e}"


def assert_same_tokens(served: Served, case: Case, name: str = "") -> None:
    """Greedy decoding gives the tokens of transformers."""
    tokens = generate(served.loaded.model, case.input_ids, case.attention_mask)
    assert torch.equal(tokens, case.tokens), f"{name}: tokens differ"


def assert_same_answers(served: Served, reference: Reference) -> None:
    """All batches of a reference get the logits of transformers, most also its tokens."""
    for name, case in reference.cases.items():
        assert_same_logits(served, case, name)
    for name in DECODED:
        assert_same_tokens(served, reference.cases[name], name)


def assert_experts_came_and_went(served: Served) -> None:
    """Instances were evicted and loaded again while the model answered, within their budget."""
    snapshot, spec = served.runtime.snapshot(), served.loaded.spec
    assert snapshot.evictions > 0
    assert snapshot.cold_starts > spec.num_functions, "no expert was loaded a second time"
    budgets = zip(snapshot.resident_bytes_D, snapshot.budget_bytes_D, strict=True)
    assert all(held <= budget for held, budget in budgets)


def assert_same_answers_until(
    served: Served, reference: Reference, happened: Callable[[], bool], attempts: int = 20
) -> None:
    """Answers are the same while plans are carried out, and something happens meanwhile.

    Plans are carried out beside the token path, so only repetition can tell when.
    """
    for _ in range(attempts):
        assert_same_answers(served, reference)
        if happened():
            return
    raise AssertionError(f"it did not happen in {attempts} rounds")


def replicas_shared_tokens(served: Served, splits: list) -> bool:
    """Whether an expert has several warm replicas, and tokens were divided over such.

    Args:
        served: A served model.
        splits: Tokens per expert [E] and per replica [E, D] of each split so far.
    """
    for count_E, share_ED in splits:
        assert (share_ED.sum(axis=1) == count_E).all(), "a token was lost or computed twice"
    replicas_LE = served.runtime.snapshot().replicas_LED.sum(axis=2)
    divided = any(((share_ED > 0).sum(axis=1) > 1).any() for _, share_ED in splits)
    return bool((replicas_LE > 1).any()) and divided
