"""``/health``, ``/metrics`` and ``/moeless/experts``: for probes, scrapers and dashboards."""

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from moeless.errors import MoelessError
from moeless.server.encoding import JsonResponse
from moeless.server.errors import ApiError, engine_unavailable, unavailable
from moeless.server.metrics import CONTENT_TYPE, combine_metrics
from moeless.server.openapi import answer_of, content_of, error_responses
from moeless.server.schemas.answers import Health
from moeless.server.state import state_of

router = APIRouter(tags=["operations"])


@router.get("/health", response_model=None, responses=answer_of(Health, 503))
async def get_health(request: Request) -> Response:
    """200 while requests are worth sending: the engine is up, and the last ones did not fail."""
    state = state_of(request)
    if not state.ready():
        raise unavailable("the engine is starting", code="not_ready")
    stats = state.engine.stats()
    if not stats.healthy:
        reason = stats.reason or "no reason given"
        raise engine_unavailable(f"the engine is not healthy: {reason}")
    if state.readiness.reason is not None:
        raise unavailable(state.readiness.reason, code="degraded")
    return JsonResponse({"status": "ok", "running": stats.running, "waiting": stats.waiting})


@router.get(
    "/metrics",
    response_model=None,
    response_class=Response,
    responses=content_of("text/plain", "string", "Metrics in the Prometheus format."),
)
async def get_metrics(request: Request) -> Response:
    """Prometheus text."""
    state = state_of(request)
    own = await run_in_threadpool(state.metrics.render)
    other = await run_in_threadpool(state.metrics_text) if state.metrics_text else b""
    return Response(combine_metrics(own, other), headers={"Content-Type": CONTENT_TYPE})


@router.get("/moeless/experts", response_model=None, responses=error_responses(401, 404, 503))
async def get_experts(request: Request) -> Response:
    """State of every expert's instances."""
    state = state_of(request)
    if state.experts_snapshot is None:
        raise ApiError(
            "this server has no experts to show", status=404, code="no_experts_snapshot"
        )
    try:
        return JsonResponse(await run_in_threadpool(state.experts_snapshot))
    except MoelessError as exc:
        raise engine_unavailable(f"the experts do not answer: {exc}") from None
