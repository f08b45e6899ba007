"""OpenAI-compatible HTTP server over any :class:`~moeless.core.generation.TextEngine`.

This package must not know any engine, torch, or how experts are served: it translates HTTP to
the generation port and back.
"""

from moeless.errors import MissingExtraError

try:
    from moeless.server.app import create_app
    from moeless.server.keys import ApiKey, read_key_file
    from moeless.server.limits import KeyLimits
    from moeless.server.run import ServerAddress, run_server
    from moeless.server.settings import ServerSettings
except ModuleNotFoundError as exc:
    if (exc.name or "").split(".")[0] not in {"fastapi", "prometheus_client", "uvicorn"}:
        raise
    raise MissingExtraError(
        f"the server needs {exc.name}: run pip install 'moeless[serve]'"
    ) from exc

__all__ = [
    "ApiKey",
    "KeyLimits",
    "ServerAddress",
    "ServerSettings",
    "create_app",
    "read_key_file",
    "run_server",
]
