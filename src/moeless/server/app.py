"""The application: endpoints, middleware and error handlers around one engine."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from moeless import __version__
from moeless.core.generation import TextEngine
from moeless.server.edge import EdgeMiddleware
from moeless.server.encoding import to_response
from moeless.server.errors import ApiError, ClientGoneError
from moeless.server.gate import GateMiddleware, open_accounts
from moeless.server.live import LiveFeed
from moeless.server.metrics import ServerMetrics
from moeless.server.openapi import DescribedApp
from moeless.server.readiness import Readiness
from moeless.server.routes import dashboard, generation, models, operations
from moeless.server.settings import ServerSettings
from moeless.server.state import ServerState
from moeless.server.tokenizing import TokenizerPool
from moeless.server.translation import RequestTranslator
from moeless.telemetry.snapshot import RuntimeSnapshot
from moeless.telemetry.tracing import Tracing


def create_app(
    engine: TextEngine,
    *,
    settings: ServerSettings,
    metrics_text: Callable[[], bytes] | None = None,
    experts_snapshot: Callable[[], dict[str, Any]] | None = None,
    ready: Callable[[], bool] = lambda: True,
    live: Callable[[], RuntimeSnapshot] | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """An OpenAI-compatible application over ``engine``.

    Args:
        engine: Generates text.
        settings: Limits and keys.
        metrics_text: Prometheus text to serve along with the server's own; called off the
            event loop at each scrape. Its metric names must differ from the server's.
        experts_snapshot: JSON state of the experts for ``/moeless/experts``; called off the
            event loop.
        ready: Whether the engine can answer; ``/health`` is 503 until then.
        live: State of the experts for the dashboard; called off the event loop.
        tracing: Traces a sample of the requests, or None.
    """
    metrics = ServerMetrics(engine.stats)
    tokenizer = TokenizerPool(engine, settings)
    state = ServerState(
        engine=engine,
        settings=settings,
        metrics=metrics,
        tokenizer=tokenizer,
        translator=RequestTranslator(engine, tokenizer, settings),
        ready=ready,
        readiness=Readiness(engine),
        metrics_text=metrics_text,
        experts_snapshot=experts_snapshot,
        accounts=open_accounts(settings),
        live=None if live is None else LiveFeed(live, engine.stats, metrics),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        state.readiness.close()
        tokenizer.close()

    app = DescribedApp(
        model_ids=[engine.model_id],
        with_keys=bool(settings.api_keys),
        title="MoEless",
        description="Serverless expert serving behind OpenAI's API.",
        version=__version__,
        # Their pages load scripts from a CDN; the document itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.moeless = state
    for group in (generation, models, operations, dashboard):
        app.include_router(group.router)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(ClientGoneError, _answer_nobody)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_middleware(GateMiddleware, settings=settings, accounts=state.accounts, metrics=metrics)
    app.add_middleware(EdgeMiddleware, metrics=metrics, settings=settings, tracing=tracing)
    return app


async def _answer_api_error(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, ApiError)
    return to_response(exc)


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """Nobody reads it, but the server and the metrics want a response; 499 as in nginx."""
    return Response(status_code=499)


async def _answer_http_error(request: Request, exc: Exception) -> Response:
    """What the framework itself refuses: unknown paths and wrong methods."""
    assert isinstance(exc, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    code, message = {
        404: ("not_found", f"{place} does not exist: see /openapi.json"),
        405: ("method_not_allowed", f"{place} is not allowed: see /openapi.json"),
    }.get(exc.status_code, ("http_error", str(exc.detail)))
    headers = dict(exc.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"
    return to_response(ApiError(message, status=exc.status_code, code=code, headers=headers))
