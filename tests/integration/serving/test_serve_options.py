"""Options of ``moeless serve`` that change what requests get."""

import json
import shutil

import httpx

CHAT = {"model": "tiny-granite", "messages": [{"role": "user", "content": "Hello"}]}


def test_a_template_of_one_s_own_the_model_s_advice_and_experts_that_stay_for_good(
    model_dir, start_serving, tmp_path
):
    advised = tmp_path / "tiny-granite"
    shutil.copytree(model_dir, advised)
    config = json.loads((advised / "generation_config.json").read_text())
    greedy = config | {"temperature": 0.0}
    (advised / "generation_config.json").write_text(json.dumps(greedy))
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    options = ["--chat-template", str(template), "--keep-alive", "inf", "--max-model-len", "64"]
    server = start_serving(advised, *options)
    answers = set()
    for seed in range(5):
        body = CHAT | {"seed": seed, "max_tokens": 8}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        answers.add(answer["choices"][0]["message"]["content"])
    plain = {"model": "tiny-granite", "prompt": "Hello", "max_tokens": 1}
    bare = httpx.post(f"{server.url}/v1/completions", json=plain, timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == bare["usage"]["prompt_tokens"]
    assert len(answers) == 1, "greedy, as the model's makers advise"
    assert server.stop() == 0
