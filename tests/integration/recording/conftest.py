"""Fixtures: tiny checkpoints with a tokenizer, and where their unmodified models route tokens."""

import sys
from dataclasses import dataclass
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[2])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import numpy as np  # noqa: E402 - the path to the shared modules comes first
import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from families import make_tiny, make_tokenizer  # noqa: E402
from moeless.config import EngineConfig, ExpertsConfig, PolicyConfig  # noqa: E402
from moeless.core.cluster import parse_devices  # noqa: E402

PROMPTS = (
    "a",
    "The rain in Spain stays mainly in the plain, or so they say in songs and on stages.",
    "Why?",
    "No.",
    "How now",
    "One two three four five six seven eight nine ten",
    "Let there be light",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was",
    "xyz " * 30,
)
CHUNK = 16
"""Prefill chunk in tokens: some prompts take several, some share one."""

MAX_TOKENS = 9


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A checkpoint and where its unmodified model routes the tokens of the prompts.

    Args:
        directory: The checkpoint.
        num_experts: E.
        ids: For each prompt, the experts of every token that is computed, [T, L, K], sorted.
        prompt_tokens: For each prompt, its length in tokens.
    """

    directory: Path
    num_experts: int
    ids: tuple[np.ndarray, ...]
    prompt_tokens: tuple[int, ...]

    def count(self, ids_TLK):
        """Tokens of each layer's experts, [L, E]."""
        return np.stack(
            [
                np.bincount(ids.ravel(), minlength=self.num_experts)
                for ids in np.moveaxis(ids_TLK, 1, 0)
            ]
        )


@pytest.fixture(scope="session", autouse=True)
def one_compute_thread():
    """Cores are few here, and more threads would only fight each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory):
    """The reference of a family; each is made once."""
    made = {}

    def reference_of(family):
        if family not in made:
            made[family] = _make_reference(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return reference_of


@pytest.fixture
def prompts_file(tmp_path):
    """The prompts, one a line."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


@pytest.fixture
def configure():
    """Engine and experts as ``moeless record`` sets them, with small prefill chunks."""

    def configure(directory, *, concurrency, devices=1):
        engine = EngineConfig(
            model=str(directory),
            max_batch_size=concurrency,
            max_waiting=2 * concurrency,
            prefill_chunk_tokens=CHUNK,
            threads=1,
        )
        policy = PolicyConfig(policy="static", predictor="previous", memory_factor=1.0)
        experts = ExpertsConfig(
            devices=parse_devices(f"cpu:{devices}"), invoker="inline", policy=policy
        )
        return engine, experts

    return configure


def _make_reference(family, directory):
    make_tiny(family).save_pretrained(directory)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    config = model.config
    num_experts = getattr(config, "n_routed_experts", None) or config.num_local_experts
    prompts = [tokenizer(prompt.strip())["input_ids"] for prompt in PROMPTS]
    return Reference(
        directory=directory,
        num_experts=num_experts,
        ids=tuple(_route(model, prompt) for prompt in prompts),
        prompt_tokens=tuple(len(prompt) for prompt in prompts),
    )


@torch.no_grad()
def _route(model, prompt):
    """Experts of the prompt's and the greedy answer's tokens, but the last: it is not computed."""
    ids = torch.tensor([prompt])
    answered = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS
    )
    chosen = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, output: chosen.append(_choice(model, output)))
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Router")
    ]
    model(input_ids=answered[:, :-1])
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(chosen, dim=1).numpy(), axis=2)


def _choice(model, output):
    """The experts that a router chose, [T, K]."""
    if model.config.model_type == "llama4_text":
        _, logits = output
        return logits.topk(model.config.num_experts_per_tok, dim=-1).indices
    return output[-1].reshape(-1, output[-1].shape[-1])
