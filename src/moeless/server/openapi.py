"""The OpenAPI document.

Bodies are parsed by :mod:`moeless.server.body`, not by the framework, so that every error has
OpenAI's shape; hence their schemas are put into the document here.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from moeless.server.schemas.chat import ChatBody
from moeless.server.schemas.completions import CompletionBody

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody)
_NULLABLE_STRING = {"type": ["string", "null"]}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_STRING,
                "code": _NULLABLE_STRING,
            },
        }
    },
}
_REASONS = {
    400: "A field is wrong, or cannot be honoured.",
    401: "No valid API key.",
    404: "Not found.",
    413: "The body is too long.",
    429: "Too many requests; see Retry-After.",
    500: "The engine failed.",
    503: "The engine cannot answer now.",
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The ``requestBody`` of an endpoint."""
    ref = _REF.format(model=model.__name__)
    content = {"application/json": {"schema": {"$ref": ref}}}
    return {"requestBody": {"required": True, "content": content}}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses`` for these statuses."""
    schema = {"$ref": _REF.format(model="Error")}
    content = {"application/json": {"schema": schema}}
    return {status: {"description": _REASONS[status], "content": content} for status in statuses}


def generation_responses() -> dict[int | str, dict[str, Any]]:
    """``responses`` of the generation endpoints."""
    answers = {"application/json": {}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        200: {"description": "The answer, or its chunks if stream is true.", "content": answers},
        **error_responses(400, 401, 404, 413, 429, 500, 503),
    }


def describe(app: FastAPI) -> dict[str, Any]:
    """The document of ``app``."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        _, bodies = models_json_schema(
            [(model, "validation") for model in _BODIES], ref_template=_REF
        )
        schemas.update(bodies["$defs"])
        schemas["Error"] = _ERROR_SCHEMA
        app.openapi_schema = document
    return app.openapi_schema
