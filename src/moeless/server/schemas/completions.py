"""Body of ``POST /v1/completions``."""

from typing import Annotated, Any

from pydantic import Field

from moeless.server.schemas.fields import Neutral, Prompt
from moeless.server.schemas.generation import GenerationBody


class CompletionBody(GenerationBody):
    """Continue one or several prompts."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0)] = None
    best_of: Annotated[int | None, Field(ge=1, description="Only n itself.")] = None
    suffix: Annotated[Any, Neutral(("",))] = None
