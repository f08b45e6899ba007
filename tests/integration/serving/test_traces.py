"""Traces of a real engine: down to the work of each device."""

import asyncio

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from effort import wait_until
from moeless.bootstrap.serving.engine import start_engine
from moeless.config import EngineConfig, ExpertsConfig
from moeless.core.cluster import parse_devices
from moeless.core.generation import GenerationRequest, SamplingParams
from moeless.telemetry.engine_metrics import EngineMetrics
from moeless.telemetry.tracing import TraceConfig, Tracing

pytestmark = pytest.mark.slow


@pytest.fixture
def run(model_dir):
    """Generate with a traced engine; returns the spans and the metrics."""
    spans, registry = InMemorySpanExporter(), CollectorRegistry()
    config = TraceConfig(endpoint="http://127.0.0.1:1", sample=1.0, every_steps=2)
    tracing = Tracing(config, SimpleSpanProcessor(spans))
    running = start_engine(
        EngineConfig(model=str(model_dir), dtype="float32", max_model_len=64),
        ExpertsConfig(devices=parse_devices("cpu:2"), invoker="inline"),
        metrics=EngineMetrics(registry),
        tracing=tracing,
    )

    async def read(stream):
        while (event := await stream.next_event()) is not None:
            last = event
        return last

    def generate(*, traced):
        trace = tracing.begin_request("POST", "/v1/completions", []) if traced else None
        request = GenerationRequest(
            request_id=f"r-{traced}",
            prompt_ids=(5, 6, 7),
            sampling=SamplingParams(max_tokens=5, ignore_eos=True),
        )
        if trace:
            trace.follow(request.request_id)
        last = asyncio.run(read(running.engine.submit(request)))
        assert last.finish_reason == "length"
        if trace:
            trace.end(status=200, fields={})
        return spans.get_finished_spans(), registry

    yield generate
    running.close()


def test_a_traced_request_shows_some_steps_with_layers_and_invocations(run):
    found, _ = run(traced=True)
    by_id = {span.context.span_id: span for span in found}

    def parent(span):
        return by_id[span.parent.span_id].name.split(" ")[0]

    steps = [span for span in found if span.name.startswith("step ")]
    assert [span.name for span in steps] == ["step prefill", "step decode", "step decode"]
    assert steps[0].attributes["moeless.tokens"] == 3
    layers = [span for span in found if span.name.startswith("layer ")]
    assert len(layers) % len(steps) == 0
    invocations = [span for span in found if span.name.startswith("invoke ")]
    assert {parent(span) for span in steps} == {"POST"}
    assert {parent(span) for span in layers} == {"step"}
    assert {parent(span) for span in invocations} == {"layer"}
    assert sum(span.attributes["moeless.assignments"] for span in invocations) > 0
    assert "engine prefill" in {span.name for span in found}


def test_the_step_loop_is_counted_and_timed(run):
    sample = run(traced=False)[1].get_sample_value
    wait_until(lambda: sample("moeless_engine_sequences_total", {"reason": "length"}) == 1)
    assert sample("moeless_queue_seconds_count") == 1
    assert sample("moeless_engine_step_tokens_total", {"phase": "prefill"}) == 3
    assert sample("moeless_engine_step_tokens_total", {"phase": "decode"}) == 4
    assert sample("moeless_engine_step_seconds_count", {"phase": "decode"}) == 4


def test_steps_of_requests_that_are_not_traced_make_no_span(run):
    found, _ = run(traced=False)
    assert found == ()
