"""What both generation endpoints accept."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from moeless.server.schemas.fields import Neutral, Stop

_SEED_BOUND = 2**63


class StrictModel(BaseModel):
    """No coercion ("5" is no number, true is no 1), no unknown field, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(StrictModel):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Neutral((False,))] = None


class GenerationBody(StrictModel):
    """Fields of ``/v1/completions`` and ``/v1/chat/completions`` alike.

    A null is the same as leaving the field out. ``top_k`` and ``ignore_eos`` are extensions.
    """

    model: str
    n: Annotated[int | None, Field(ge=1)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[
        int | None, Field(ge=-1, lt=2**31, description="0 and -1 keep all candidates.")
    ] = None
    seed: Annotated[int | None, Field(ge=-_SEED_BOUND, lt=_SEED_BOUND)] = None
    stop: Stop = ()
    ignore_eos: bool | None = None
    user: Annotated[str | None, Field(description="Accepted; changes nothing.")] = None

    frequency_penalty: Annotated[Any, Neutral((0,))] = None
    presence_penalty: Annotated[Any, Neutral((0,))] = None
    repetition_penalty: Annotated[Any, Neutral((1,))] = None
    min_p: Annotated[Any, Neutral((0,))] = None
    logit_bias: Annotated[Any, Neutral(({},))] = None

    @property
    def choices(self) -> int:
        """Number of answers per prompt."""
        return 1 if self.n is None else self.n
