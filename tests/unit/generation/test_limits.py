"""What is refused, with which words; health; context limits."""

from types import SimpleNamespace

import pytest

from moeless.core.generation import GenerationRequest, SamplingParams
from moeless.engines.transformers.generation.context_limit import resolve_max_model_len
from moeless.engines.transformers.generation.health import HealthMonitor
from moeless.engines.transformers.generation.options import EngineOptions
from moeless.engines.transformers.generation.validation import validate_request
from moeless.errors import ConfigError, RequestError


def validate(prompt_ids=(1, 2, 3), **sampling):
    validate_request(
        GenerationRequest(
            request_id="r", prompt_ids=tuple(prompt_ids), sampling=SamplingParams(**sampling)
        ),
        max_model_len=10,
        vocabulary=50,
    )


def test_a_request_that_just_fits_is_accepted():
    validate(max_tokens=7, temperature=0.7, top_p=1.0, top_k=50, seed=-3, logprobs=20, stop=("x",))


def test_a_request_that_is_one_token_too_long_is_refused_with_the_numbers():
    with pytest.raises(RequestError, match="3 tokens and max_tokens is 8, together 11") as caught:
        validate(max_tokens=8)
    assert caught.value.code == "context_length_exceeded"
    assert "10 tokens" in str(caught.value)
    assert caught.value.param == "max_tokens"


def test_a_prompt_that_alone_is_too_long_is_named_as_the_culprit():
    with pytest.raises(RequestError) as caught:
        validate([1] * 10, max_tokens=1)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 0.5),
        ("seed", "abc"),
        ("logprobs", -1),
        ("logprobs", 51),
        ("stop", ("",)),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_named(field, value):
    with pytest.raises(RequestError) as caught:
        validate(**{"max_tokens": 2, field: value})
    assert caught.value.param == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [-1, 50, 10**30, "7", 1.0])
def test_a_token_id_outside_the_vocabulary_is_named_with_its_place(bad):
    with pytest.raises(RequestError, match=r"prompt token 1 is .*0 to 49"):
        validate([3, bad, 4], max_tokens=2)


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="empty"):
        validate([])


def test_a_model_counts_as_broken_after_failures_that_nothing_interrupts():
    health = HealthMonitor(failures_allowed=3)
    for _ in range(5):
        health.record_failure("boom", 0.0)
        health.record_failure("boom", 0.0)
        assert health.healthy
        health.record_success()
    for _ in range(3):
        health.record_failure("boom", 0.0)
    assert not health.healthy
    assert "3 times in a row, last: boom" in health.reason
    health.record_success()
    assert health.healthy


def test_pauses_between_new_attempts_double_up_to_a_limit():
    health = HealthMonitor(failures_allowed=1, first_retry_s=1.0, longest_retry_s=5.0)
    for _ in range(4):  # a whole batch fails at once: that is one pause
        health.record_failure("boom", 100.0)
    pauses = [health.seconds_to_retry(100.0)]
    for _ in range(4):
        health.record_failed_retry("boom", 100.0)
        pauses.append(health.seconds_to_retry(100.0))
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert health.seconds_to_retry(1000.0) == 0.0
    health.record_success()
    health.record_failure("boom", 100.0)
    assert health.seconds_to_retry(100.0) == 1.0


def test_the_models_own_limit_is_served_when_nothing_is_asked():
    config = SimpleNamespace(max_position_embeddings=512, rope_parameters={"rope_type": "yarn"})
    assert resolve_max_model_len(config, None) == 512
    assert resolve_max_model_len(config, 100) == 100
    assert resolve_max_model_len(SimpleNamespace(), None) == 4096


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(ConfigError, match=r"513.*up to 512"):
        resolve_max_model_len(SimpleNamespace(max_position_embeddings=512), 513)


def test_batch_dependent_rotary_embeddings_are_served_up_to_the_original_context():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    config = SimpleNamespace(max_position_embeddings=512, rope_parameters=rope)
    assert resolve_max_model_len(config, None) == 64
    with pytest.raises(ConfigError, match="up to 64"):
        resolve_max_model_len(config, 65)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_batch_size", 0),
        ("max_waiting", -1),
        ("prefill_chunk_tokens", 0),
        ("first_retry_s", 0),
    ],
)
def test_options_that_cannot_work_are_refused(option, value):
    with pytest.raises(ConfigError, match=option):
        EngineOptions(**{option: value})
