"""``POST /v1/completions`` and ``POST /v1/chat/completions``."""

from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moeless.server.body import BodyT, parse_request
from moeless.server.connection import run_while_connected
from moeless.server.errors import unavailable
from moeless.server.formats.base import AnswerFormat
from moeless.server.formats.chat import ChatFormat
from moeless.server.formats.completions import CompletionFormat
from moeless.server.gate import account_of
from moeless.server.generation import Generation
from moeless.server.openapi import body_of, generation_responses
from moeless.server.plan import GenerationPlan
from moeless.server.record import record_of
from moeless.server.schemas.answers import ChatCompletion, Completion
from moeless.server.schemas.chat import ChatBody
from moeless.server.schemas.completions import CompletionBody
from moeless.server.schemas.generation import GenerationBody
from moeless.server.state import ServerState, state_of
from moeless.server.streaming import EventStreamResponse, WholeAnswerResponse

router = APIRouter(prefix="/v1", tags=["generation"])


@router.post(
    "/completions",
    response_model=None,
    openapi_extra=body_of(CompletionBody),
    responses=generation_responses(Completion),
)
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    state = _ready_state(request)
    body = await _read(request, state, CompletionBody)
    plan = await _make(request, state, state.translator.plan_completion(body))
    answer_format = CompletionFormat(
        plan.answer_id, body.model, logprobs=body.logprobs, with_usage=_wants_usage(body)
    )
    return _respond(request, state, body, plan, answer_format)


@router.post(
    "/chat/completions",
    response_model=None,
    openapi_extra=body_of(ChatBody),
    responses=generation_responses(ChatCompletion),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = _ready_state(request)
    body = await _read(request, state, ChatBody)
    plan = await _make(request, state, state.translator.plan_chat(body))
    answer_format = ChatFormat(
        plan.answer_id,
        body.model,
        with_logprobs=bool(body.logprobs),
        with_usage=_wants_usage(body),
    )
    return _respond(request, state, body, plan, answer_format)


def _ready_state(request: Request) -> ServerState:
    state = state_of(request)
    if not state.ready():
        raise unavailable("the engine is starting: see /health", code="not_ready")
    return state


async def _read(request: Request, state: ServerState, model: type[BodyT]) -> BodyT:
    parsing = parse_request(request, model, state.settings)
    return await run_while_connected(parsing, receive=None, cut=state.cut)


async def _make(
    request: Request, state: ServerState, planning: Coroutine[Any, Any, GenerationPlan]
) -> GenerationPlan:
    return await run_while_connected(
        planning,
        receive=request.receive,
        cut=state.cut,
        timeout_s=state.settings.request_timeout_s,
    )


def _wants_usage(body: GenerationBody) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def _respond(
    request: Request,
    state: ServerState,
    body: GenerationBody,
    plan: GenerationPlan,
    answer_format: AnswerFormat,
) -> Response:
    generation = Generation(
        state.engine,
        plan,
        metrics=state.metrics,
        account=account_of(request.scope),
        record=record_of(request.scope),
        readiness=state.readiness,
    )
    timeout_s = state.settings.request_timeout_s
    if body.stream:
        return EventStreamResponse(
            generation,
            answer_format,
            cut=state.cut,
            timeout_s=timeout_s,
            with_usage=_wants_usage(body),
        )
    return WholeAnswerResponse(generation, answer_format, cut=state.cut, timeout_s=timeout_s)
