"""The official client works unchanged."""

import openai
import pytest


@pytest.fixture
def sdk(server, engine):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


TURNS = [{"role": "user", "content": "Hi"}]


def test_models(sdk):
    assert [model.id for model in sdk.models.list()] == ["fake/model"]
    assert sdk.models.retrieve("fake/model").owned_by == "moeless"


def test_chat_whole_and_streamed(sdk):
    whole = sdk.chat.completions.create(
        model="fake/model", messages=TURNS, seed=1, logprobs=True, top_logprobs=1
    )
    assert whole.usage.total_tokens == 32
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].token == "a"
    with sdk.chat.completions.create(
        model="fake/model",
        messages=TURNS,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


def test_completions_whole_and_streamed(sdk):
    whole = sdk.completions.create(model="fake/model", prompt=["Hi", "Ho"], seed=1, logprobs=2)
    with sdk.completions.create(
        model="fake/model", prompt=["Hi", "Ho"], seed=1, stream=True
    ) as stream:
        texts = ["", ""]
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert whole.choices[0].logprobs.text_offset == list(range(16))


def test_extensions_go_through_extra_body(sdk, engine):
    extra = {"top_k": 4, "ignore_eos": True}
    sdk.chat.completions.create(model="fake/model", messages=TURNS, extra_body=extra)
    assert engine.submitted[0].sampling.top_k == 4


def test_errors_become_the_clients_exceptions(sdk, engine):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.chat.completions.create(model="gpt-5", messages=TURNS)
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="fake/model", messages=TURNS, temperature=9)
    assert refused.value.param == "temperature"
    engine.queue_limit = 0
    with pytest.raises(openai.RateLimitError):
        sdk.chat.completions.create(model="fake/model", messages=TURNS)


def test_an_error_on_the_way_is_raised_by_the_stream(sdk, engine):
    engine.fail_after = 2
    stream = sdk.completions.create(model="fake/model", prompt="Hi", stream=True)
    with pytest.raises(openai.APIError, match="a device is lost"):
        list(stream)
