"""Answers that end when their client does: server-sent events, and work that stops with the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service import responses
from service.errors import ApiError, error_response

DONE = b"data: [DONE]\n\n"

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


def event(data: bytes) -> bytes:
    """One server-sent event; ``data`` is JSON, so it has no line end."""
    return b"data: " + data + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run ``work``, but cancel it as soon as the client goes away.

    Args:
        receive: The ASGI channel of a request whose body was read.
        work: What to run; cancelling it must undo what it began.

    Raises:
        ClientGone: The client went first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events.

    The status waits for the first piece: an error before it is an ordinary error response. One after it
    becomes an event with the error object, and the stream ends without ``[DONE]``, so that no client takes it
    for complete.
    """

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[bytes, None]) -> None:
        """
        Args:
            pieces: Each is one or more whole events. Closed in every case.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._pieces) as pieces:
            try:
                async for piece in pieces:
                    if not started:
                        started = True
                        await self._start(send)
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except ApiError as exc:
                if not started:
                    await error_response(exc)(scope, receive, send)
                    return
                body = event(responses.encode(exc.body()))
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
