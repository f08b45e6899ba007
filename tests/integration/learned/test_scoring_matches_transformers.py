"""Each rule against the router module of the transformers library that it stands for."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import (  # noqa: E402 - after the skip
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeSharedConfig,
    Llama4TextConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter  # noqa: E402
from transformers.models.granitemoeshared.modeling_granitemoeshared import (  # noqa: E402
    GraniteMoeSharedTopKRouter,
)
from transformers.models.llama4.modeling_llama4 import Llama4Router  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter  # noqa: E402
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter  # noqa: E402
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter  # noqa: E402

from moeless.core.router import RouterRule  # noqa: E402
from moeless.learned.gate_predictor import Gate, GatePredictor  # noqa: E402
from moeless.learned.scoring import choose, count_choices  # noqa: E402

HIDDEN, EXPERTS, TOKENS = 48, 16, 300


def last_output(result):
    return result[-1]


def llama4_choice(result):
    scores, _ = result
    return scores.nonzero()[:, 1].view(len(scores), -1)


CASES = {
    "mixtral": (
        MixtralTopKRouter,
        MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=3),
        RouterRule(kind="softmax_topk", path="mlp.gate", top_k=3, normalize=True),
        last_output,
    ),
    "qwen3_moe": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4),
        RouterRule(kind="softmax_topk", path="mlp.gate", top_k=4),
        last_output,
    ),
    "olmoe": (
        OlmoeTopKRouter,
        OlmoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=8),
        RouterRule(kind="softmax_topk", path="mlp.gate", top_k=8),
        last_output,
    ),
    "gpt_oss": (
        GptOssTopKRouter,
        GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=4),
        RouterRule(kind="topk_softmax", path="mlp.router", top_k=4, has_bias=True),
        last_output,
    ),
    "granitemoeshared": (
        GraniteMoeSharedTopKRouter,
        GraniteMoeSharedConfig(
            hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=8
        ),
        RouterRule(kind="topk_softmax", path="block_sparse_moe.router", top_k=8),
        last_output,
    ),
    "phimoe": (
        PhimoeTopKRouter,
        PhimoeConfig(
            hidden_size=HIDDEN,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            router_jitter_noise=0.01,
        ),
        RouterRule(kind="sparsemixer", path="mlp.router", top_k=2, jitter_eps=0.01),
        last_output,
    ),
    "deepseek_v3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(
            hidden_size=HIDDEN,
            num_local_experts=EXPERTS,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
        ),
        RouterRule(
            kind="sigmoid_group",
            path="mlp.gate",
            top_k=3,
            num_groups=4,
            top_groups=2,
            correction_bias="e_score_correction_bias",
            float32_logits=True,
        ),
        last_output,
    ),
    "llama4": (
        Llama4Router,
        Llama4TextConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2),
        RouterRule(kind="topk_sigmoid", path="feed_forward.router", top_k=2),
        llama4_choice,
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    make, config, rule, read_choice = CASES[request.param]
    generator = torch.Generator().manual_seed(11)
    router = make(config).eval()
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    with torch.no_grad():
        expected = read_choice(router(x.clone()))
    bias = router.bias if rule.has_bias else None
    correction = getattr(router, rule.correction_bias) if rule.correction_bias else None
    return Gate(router.weight, bias, rule, correction), x, expected.sort(dim=-1).values


def test_the_chosen_experts_are_the_router_s(case):
    gate, x, expected = case
    logits = torch.nn.functional.linear(x, gate.weight, gate.bias)
    chosen = choose(logits, gate.rule, gate.correction)
    assert chosen.dtype == torch.int64
    assert torch.equal(chosen.sort(dim=-1).values, expected)


def test_the_cheap_count_equals_the_count_of_the_choice(case):
    gate, x, expected = case
    logits = torch.nn.functional.linear(x, gate.weight, gate.bias)
    counts = count_choices(logits, gate.rule, gate.correction)
    assert torch.equal(counts, torch.bincount(expected.reshape(-1), minlength=EXPERTS))


def test_a_predictor_given_the_true_gate_input_predicts_the_true_load(case):
    gate, x, expected = case
    counts = GatePredictor([gate, gate], distance=1).predict(0, x)
    assert counts.tolist() == torch.bincount(expected.reshape(-1), minlength=EXPERTS).tolist()
