"""The OpenAPI document.

Bodies are parsed by :mod:`moeless.server.body`, not by the framework, so that every error has
OpenAI's shape; hence their schemas are put into the document here.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from moeless.server.schemas import answers
from moeless.server.schemas.chat import ChatBody
from moeless.server.schemas.completions import CompletionBody

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody)
_ANSWERS: tuple[type[BaseModel], ...] = (
    answers.Completion,
    answers.ChatCompletion,
    answers.ModelInfo,
    answers.ModelList,
    answers.Health,
    answers.Error,
)
_REASONS = {
    400: "A field is wrong, or cannot be honoured.",
    401: "No valid API key.",
    403: "The request comes from a web page of another site.",
    404: "Not found.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "Too many requests; see Retry-After.",
    431: "The headers are too long.",
    500: "The engine failed.",
    503: "The engine cannot answer now; see Retry-After.",
    504: "The answer took too long.",
}
_EVENTS = {"description": "The data of each event is a chunk, that of the last one [DONE]."}
# What can happen to any request.
_ALWAYS = (403, 431)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The ``requestBody`` of an endpoint."""
    return {"requestBody": {"required": True, "content": _json(model)}}


def answer_of(model: type[BaseModel], *failures: int) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint: an answer of this shape, or one of these failures."""
    return {
        200: {"description": (model.__doc__ or "").split("\n")[0], "content": _json(model)},
        **error_responses(*failures),
    }


def content_of(
    media_type: str, kind: str, what: str, *failures: int
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint whose answer has a media type and a JSON type, no shape."""
    content = {media_type: {"schema": {"type": kind}}}
    return {200: {"description": what, "content": content}, **error_responses(*failures)}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses`` for these statuses and those that every endpoint has."""
    return {
        status: {"description": _REASONS[status], "content": _json(answers.Error)}
        for status in (*statuses, *_ALWAYS)
    }


def generation_responses(answer: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a generation endpoint."""
    responses = answer_of(answer, 400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
    responses[200]["description"] = "The answer, or its chunks if stream is true."
    responses[200]["content"]["text/event-stream"] = {"schema": _EVENTS}
    return responses


class DescribedApp(FastAPI):
    """An application whose document is the one of ``describe``.

    Args:
        model_ids: The models that are served.
        with_keys: Whether requests need a key.
        options: FastAPI's own.
    """

    def __init__(self, *, model_ids: Sequence[str], with_keys: bool, **options: Any) -> None:
        self._model_ids, self._with_keys = model_ids, with_keys
        super().__init__(**options)

    def openapi(self) -> dict[str, Any]:
        """The document; made once."""
        return describe(self, model_ids=self._model_ids, with_keys=self._with_keys)


def describe(app: FastAPI, *, model_ids: Sequence[str], with_keys: bool) -> dict[str, Any]:
    """The document of ``app``.

    Args:
        app: The application.
        model_ids: The models that are served.
        with_keys: Whether requests need a key.
    """
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
        )
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        schemas.update(_shapes(_BODIES, "validation") | _shapes(_ANSWERS, "serialization"))
        for body in _BODIES:
            schemas[body.__name__]["properties"]["model"]["enum"] = list(model_ids)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # the framework's own, never sent
                if with_keys and "401" in operation["responses"]:
                    operation["security"] = [{"key": []}]
        if with_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = document
    return app.openapi_schema


def _shapes(models: Sequence[type[BaseModel]], mode: JsonSchemaMode) -> dict[str, Any]:
    """The schemas of models, and of what they are made of, by name."""
    _, made = models_json_schema([(each, mode) for each in models], ref_template=_REF)
    found: dict[str, Any] = made["$defs"]
    return found


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
