"""Work that ends with its client, its time or the server."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from moeless.server.errors import ApiError, ClientGoneError, unavailable

ResultT = TypeVar("ResultT")


async def run_while_connected(
    work: Coroutine[Any, Any, ResultT],
    *,
    receive: Receive | None,
    cut: asyncio.Event,
    timeout_s: float | None = None,
) -> ResultT:
    """The result of ``work``, which is cancelled as soon as nobody waits for it.

    Args:
        work: What to do.
        receive: The ASGI channel that tells of a disconnect; None while ``work`` itself reads
            the body from it.
        cut: Set when the server wants open requests to end.
        timeout_s: Longest time for ``work``; None = any.

    Raises:
        ClientGoneError: The client closed the connection.
        ApiError: 503 the server shuts down, 504 out of time.
    """
    doing = asyncio.create_task(work)
    cutting = asyncio.create_task(cut.wait())
    tasks: list[asyncio.Task[Any]] = [doing, cutting]
    if receive is not None:
        tasks.append(asyncio.create_task(_wait_for_disconnect(receive)))
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if doing in done:
            return doing.result()
        if cutting in done:
            raise unavailable("the server is shutting down", code="shutting_down")
        if done:
            raise ClientGoneError("the client left before it had its answer")
        raise ApiError(
            f"the answer took more than {timeout_s} s",
            status=504,
            kind="timeout_error",
            code="timeout",
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
