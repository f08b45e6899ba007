"""``/dashboard``: the page, and the data that it shows.

The page itself is the same for everybody and needs no key; its data does.
"""

from importlib import resources

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from moeless.errors import MoelessError
from moeless.server.errors import ApiError, engine_unavailable
from moeless.server.openapi import content_of
from moeless.server.state import state_of

router = APIRouter(tags=["dashboard"])

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, no frames: a foreign string cannot become code.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def _read_files() -> dict[str, tuple[bytes, str]]:
    """Name to bytes and media type of every file that may be asked for."""
    root = resources.files("moeless.server") / "dashboard"
    found = {}
    for folder in (root, root / "vendor"):
        for file in folder.iterdir():
            suffix = file.name[file.name.rfind(".") :]
            if file.is_file() and suffix in _TYPES:
                name = file.name if folder is root else f"vendor/{file.name}"
                found[name] = (file.read_bytes(), _TYPES[suffix])
    return found


_FILES = _read_files()


@router.get("/", response_class=Response, include_in_schema=False)
async def get_root() -> Response:
    """Where to look, for those who open the server's address in a browser."""
    return RedirectResponse("/dashboard")


@router.get("/dashboard", response_class=Response, include_in_schema=False)
async def get_dashboard() -> Response:
    """The page."""
    return _answer("index.html")


@router.get("/dashboard/{name:path}", response_class=Response, include_in_schema=False)
async def get_dashboard_file(name: str) -> Response:
    """A script or style of the page."""
    return _answer(name)


@router.get(
    "/moeless/live",
    response_model=None,
    response_class=Response,
    responses=content_of(
        "application/json", "object", "State of the experts, compact.", 401, 404, 503
    ),
)
async def get_live(request: Request) -> Response:
    """What the dashboard shows; ``?layer=N`` adds that layer's loads."""
    feed = state_of(request).live
    if feed is None:
        raise ApiError(
            "this server has no experts to show", status=404, code="no_experts_snapshot"
        )
    given = request.query_params.get("layer", "0")
    layer = int(given) if given.isascii() and given.isdigit() and len(given) < 6 else -1
    compress = "gzip" in request.headers.get("accept-encoding", "")
    try:
        body, compressed = await run_in_threadpool(feed.render, layer, compress=compress)
    except MoelessError as exc:
        raise engine_unavailable(f"the experts do not answer: {exc}") from None
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if compressed:
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type="application/json", headers=headers)


def _answer(name: str) -> Response:
    found = _FILES.get(name)
    if found is None:
        raise ApiError(f"/dashboard/{name[:200]} does not exist", status=404, code="not_found")
    body, media_type = found
    return Response(body, headers={"Content-Type": media_type, **_HEADERS})
