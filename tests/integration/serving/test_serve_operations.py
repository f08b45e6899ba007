"""What operators set of ``moeless serve``, and what they see of it when something is missing."""

import json
import resource
import shutil

import httpx
from prometheus_client.parser import text_string_to_metric_families

from effort import wait_until
from moeless.core.events import EventsLost
from moeless.telemetry.jsonl import read_events

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


def events_lost(url):
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return next(s.value for s in samples if s.name == "moeless_events_lost_total")


def test_events_that_cannot_be_written_are_in_the_metrics_and_marked_in_their_file(
    model_dir, start_serving, tmp_path
):
    events = tmp_path / "events.jsonl"
    server = start_serving(model_dir, "--events", str(events), "--max-model-len", "64")

    def generate():
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
        assert answer.status_code == 200

    generate()
    assert events_lost(server.url) == 0
    supervisor = next(p for p in server.family if "supervisor_process" in " ".join(p.cmdline()))
    soft, hard = supervisor.rlimit(resource.RLIMIT_FSIZE)
    supervisor.rlimit(resource.RLIMIT_FSIZE, (events.stat().st_size, hard))
    generate()
    lost = events_lost(server.url)
    assert lost > 0
    supervisor.rlimit(resource.RLIMIT_FSIZE, (soft, hard))
    generate()
    assert server.stop() == 0
    (mark,) = [event for event in read_events(events) if isinstance(event, EventsLost)]
    assert mark.count >= lost


def test_a_server_whose_checkpoint_is_gone_is_not_ready_until_it_is_back(
    model_dir, start_serving, tmp_path
):
    mine, elsewhere = tmp_path / "models" / "tiny-granite", tmp_path / "elsewhere"
    shutil.copytree(model_dir, mine)
    server = start_serving(mine, "--keep-alive", "0.2", "--max-model-len", "64")
    told = []

    def fails():
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
        told.append(answer.text)
        return answer.status_code == 503

    def ready():
        answer = httpx.get(f"{server.url}/health")
        told.append(answer.text)
        return answer.status_code == 200

    assert not fails()
    assert ready()
    mine.rename(elsewhere)
    wait_until(lambda: fails() and not ready())
    elsewhere.rename(mine)
    wait_until(ready)
    assert not fails()
    assert [text for text in told if str(tmp_path) in text] == []
    assert "could not be served" in "".join(told)
    assert server.stop() == 0
