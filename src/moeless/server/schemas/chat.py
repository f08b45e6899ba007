"""Body of ``POST /v1/chat/completions``."""

from typing import Annotated, Any, Literal

from pydantic import Field

from moeless.server.schemas.fields import Content, Neutral
from moeless.server.schemas.generation import GenerationBody, StrictModel


class ChatMessage(StrictModel):
    """One turn. Text parts are joined by line ends; ``developer`` is another word for system."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    name: Annotated[
        str | None, Field(max_length=256, description="Told to the chat template.")
    ] = None
    refusal: Annotated[Any, Neutral()] = None
    audio: Annotated[Any, Neutral()] = None
    annotations: Annotated[Any, Neutral(([],))] = None
    tool_calls: Annotated[Any, Neutral(([],))] = None
    function_call: Annotated[Any, Neutral()] = None


class ChatBody(GenerationBody):
    """Answer a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0)] = None
    safety_identifier: Annotated[str | None, Field(description="Changes nothing.")] = None
    prompt_cache_key: Annotated[str | None, Field(description="Changes nothing.")] = None

    tools: Annotated[
        list[dict[str, Any]] | None, Field(description='With tool_choice "none" only.')
    ] = None
    tool_choice: Annotated[Any, Neutral(("none",))] = None
    parallel_tool_calls: Annotated[Any, Neutral((False, True))] = None
    functions: Annotated[
        list[dict[str, Any]] | None, Field(description='With function_call "none" only.')
    ] = None
    function_call: Annotated[Any, Neutral(("none",))] = None
    response_format: Annotated[Any, Neutral(({"type": "text"},))] = None
    modalities: Annotated[Any, Neutral((["text"],))] = None
    audio: Annotated[Any, Neutral()] = None
    prediction: Annotated[Any, Neutral()] = None
    reasoning_effort: Annotated[Any, Neutral(("none",))] = None
    verbosity: Annotated[Any, Neutral(("medium",))] = None
    web_search_options: Annotated[Any, Neutral()] = None
    service_tier: Annotated[Any, Neutral(("auto", "default"))] = None
    store: Annotated[Any, Neutral((False,))] = None
    metadata: Annotated[Any, Neutral(({},))] = None
