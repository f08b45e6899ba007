"""From the bytes of a request to a validated body, or to a 4xx that names the field."""

import asyncio
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from moeless.server.errors import ApiError, ClientGoneError
from moeless.server.settings import ServerSettings

BodyT = TypeVar("BodyT", bound=BaseModel)

# A client that is still sending would see a reset instead of our 413 if we closed on it, so
# what is a little too long is read to its end and thrown away.
_DISCARD_FACTOR = 4
_SHOWN_CHARS = 80


class _DuplicateKeyError(ValueError):
    pass


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """Bytes of the body.

    Raises:
        ApiError: 413 too long, 408 too slow, 415 another media type than JSON, or encoded.
        ClientGoneError: The client left.
    """
    media_type = request.headers.get("content-type", "application/json").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise ApiError(
            f"content type {_shorten(media_type)} is not supported: send application/json",
            status=415,
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        raise ApiError(
            f"Content-Encoding {_shorten(encoding)} is not supported: send the body as it is",
            status=415,
            code="unsupported_content_encoding",
        )
    limit = settings.max_body_bytes
    too_long = ApiError(
        f"the body is longer than {limit} bytes: send a shorter one",
        status=413,
        code="body_too_large",
    )
    declared = request.headers.get("content-length", "0")
    # len() first: int() of an absurdly long run of digits is an error of its own.
    if len(declared) > 18 or int(declared) > limit * _DISCARD_FACTOR:
        raise too_long
    chunks: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                length += len(chunk)
                if length <= limit:
                    chunks.append(chunk)
                elif length > limit * _DISCARD_FACTOR:
                    raise too_long
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive within {settings.body_timeout_s:g} s",
            status=408,
            code="body_timeout",
        ) from None
    except ClientDisconnect:
        raise ClientGoneError("the client left while sending its body") from None
    if length > limit:
        raise too_long
    return b"".join(chunks)


def decode_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``; anything that cannot be one is a 400."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_object_without_duplicates)
        # Only an escape can smuggle a lone surrogate into valid UTF-8.
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as exc:
        raise _bad_json(f"the body is not UTF-8 (byte {exc.start})") from None
    except UnicodeEncodeError:
        raise _bad_json("the body holds a lone surrogate, which is no character") from None
    except json.JSONDecodeError as exc:
        raise _bad_json(f"the body is not JSON: {exc}") from None
    except _DuplicateKeyError as exc:
        raise _bad_json(str(exc)) from None
    except ValueError:
        raise _bad_json("the body holds a number with too many digits") from None
    except RecursionError:
        raise _bad_json("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise _bad_json("the body must be a JSON object")
    return value


def validate_body(value: dict[str, Any], model: type[BodyT]) -> BodyT:
    """``value`` as ``model``; the first field that is wrong becomes a 400."""
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _field_error(first) from None


async def parse_request(request: Request, model: type[BodyT], settings: ServerSettings) -> BodyT:
    """Read, decode and validate the body of ``request``."""
    return validate_body(decode_json(await read_body(request, settings)), model)


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DuplicateKeyError(f"the body holds the key {_shorten(name)} twice")
    return result


def _bad_json(message: str) -> ApiError:
    # "replace": the message may quote a key that cannot be sent back.
    return ApiError(message.encode("utf-8", "replace").decode(), code="invalid_json")


def _field_error(detail: ErrorDetails) -> ApiError:
    path = _shorten(_path(detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return ApiError(
            f"unknown field {path}: leave it out", param=path, code="unknown_parameter"
        )
    if detail["type"] == "missing":
        return ApiError(f"{path} is missing", param=path, code="missing_required_parameter")
    reason = detail["msg"][:1].lower() + detail["msg"][1:]
    if detail["type"] == "literal_error":
        reason = reason.replace("'", '"')  # what may be sent, as JSON spells it
    return ApiError(f"{path}: {reason}", param=path, code="invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
