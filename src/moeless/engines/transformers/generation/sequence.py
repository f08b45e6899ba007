"""One request on its way through the engine."""

from dataclasses import dataclass, field

from moeless.core.generation import FinishReason, GenerationRequest, TokenEvent, TokenLogprob
from moeless.engines.transformers.generation.detokenizer import TextAssembler
from moeless.engines.transformers.generation.sampler import RowSampler
from moeless.engines.transformers.generation.streams import EventStream


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A request's state; the engine thread alone changes it.

    Args:
        request: What was asked for.
        sampler: How it chooses tokens.
        text: Its text so far.
        eos_ids: Tokens that end it.
        arrived_s: When it was submitted, by the engine's clock.
    """

    request: GenerationRequest
    sampler: RowSampler
    text: TextAssembler
    eos_ids: frozenset[int]
    arrived_s: float
    stream: EventStream = field(default_factory=EventStream)
    last_token_id: int = 0
    completion_tokens: int = 0
    last_token_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.request.sampling.max_tokens - self.completion_tokens

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> TokenEvent:
        """Take the next token in; the event's finish reason says whether it was the last."""
        self.last_token_id = token_id
        self.completion_tokens += 1
        is_eos = token_id in self.eos_ids and not self.request.sampling.ignore_eos
        text = "" if is_eos else self.text.push(token_id)
        reason: FinishReason | None = None
        if self.text.stopped:
            reason = "stop"
        elif is_eos or self.remaining_tokens <= 0:
            text += self.text.finish()
            reason = "stop" if is_eos or self.text.stopped else "length"
        return TokenEvent(
            request_id=self.request.request_id,
            token_ids=(token_id,),
            text=text,
            logprobs=() if logprob is None else (logprob,),
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )

    def ending(
        self, reason: FinishReason, error: str | None = None, *, unavailable: bool = False
    ) -> TokenEvent:
        """The last event of a request that ends without another token."""
        return TokenEvent(
            request_id=self.request.request_id,
            finish_reason=reason,
            error=error,
            unavailable=unavailable,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )
