"""What the endpoints of one application share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request

from moeless.core.generation import TextEngine
from moeless.server.formats.base import unix_seconds
from moeless.server.limits import Account
from moeless.server.live import LiveFeed
from moeless.server.metrics import ServerMetrics
from moeless.server.readiness import Readiness
from moeless.server.settings import ServerSettings
from moeless.server.tokenizing import TokenizerPool
from moeless.server.translation import RequestTranslator


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """Parts of one application.

    Args:
        engine: Generates.
        settings: Limits.
        metrics: Counts.
        tokenizer: Encodes off the event loop.
        translator: Bodies to plans.
        ready: Whether the engine can answer.
        readiness: Whether it does.
        metrics_text: More Prometheus text, if there is any.
        experts_snapshot: State of the experts, if there is any.
        live: What the dashboard shows, if there are experts.
        accounts: What each API key may use and has used, by the key's name.
        cut: Set when open requests must end now.
        started: When the application was made, in seconds of Unix time.
    """

    engine: TextEngine
    settings: ServerSettings
    metrics: ServerMetrics
    tokenizer: TokenizerPool
    translator: RequestTranslator
    ready: Callable[[], bool]
    readiness: Readiness
    metrics_text: Callable[[], bytes] | None
    experts_snapshot: Callable[[], dict[str, Any]] | None
    accounts: dict[str, Account]
    live: LiveFeed | None
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    started: int = field(default_factory=unix_seconds)


def state_of(request: Request) -> ServerState:
    """The state of the application that got ``request``."""
    return cast(ServerState, request.app.state.moeless)
