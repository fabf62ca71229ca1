"""Receives request bodies: so many and so much at once, each in bounded time, and none once a drain begins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from fastapi import Request

from service.errors import ApiError, body_timeout, queue_full

MAX_READS = 256
"""Bodies that are received at once."""
READ_SECONDS = 60.0
"""Longest time for a body from its request's arrival on, whatever the limit of the request's own time."""
YIELD_SECONDS = 1.0
"""Where `MAX_READS` are under way, a new one ends the oldest if that has had this long, and is refused if not; and
so where the bytes of all have no room for its own. So slow clients cannot keep the others out."""
SMALL_BODY_BYTES = 256 * 1024
"""Bodies up to this long are decoded as soon as they are there, and not counted with the others' bytes: `MAX_READS`
bounds them, and nobody's long bodies keep them out."""


@dataclass(eq=False, slots=True)
class _Read:
    timer: asyncio.Timeout
    start_time: float
    error: ApiError
    """What the client is told when the timer ends the read."""
    held: int = 0
    """How many of the bytes of all bodies are this one's."""

    def end(self, error: ApiError) -> None:
        self.error = error
        if not self.timer.expired():
            self.timer.reschedule(0.0)  # the loop's clock is past that


class BodyReader:
    """Called from the event loop only."""

    def __init__(self, max_bytes: int, max_total_bytes: int, request_timeout: float | None) -> None:
        """
        Args:
            max_bytes: Largest body accepted.
            max_total_bytes: Most bytes of all bodies longer than `SMALL_BODY_BYTES`; ``max_bytes`` if that is more.
            request_timeout: Seconds that a request may take, the reading of its body included; ``None``: no limit.
        """
        self._max_bytes = max_bytes
        self._max_total_bytes = max(max_total_bytes, max_bytes)
        self._held = 0
        """Bytes of the bodies that count, those that are complete but still in use included."""
        self._seconds = READ_SECONDS if request_timeout is None else min(READ_SECONDS, request_timeout)
        self._reads: dict[_Read, None] = {}
        """In order of their start."""

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The whole body of ``request``, of which nothing may have been read. It counts until the context ends.

        Raises:
            ApiError: 413, 408 if it is not there in time, 429 if too many or too much of others is received, or
                what `end_all` was given.
            starlette.requests.ClientDisconnect: The client went away while sending.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        left = request.state.arrival_time + self._seconds - time.monotonic()
        read = _Read(asyncio.timeout(left), time.monotonic(), body_timeout())
        try:
            yield await self._receive(request, read)
        finally:
            self._release(read)

    def end_all(self, error: ApiError) -> None:
        """End every read under way with ``error``."""
        for read in self._reads:
            read.end(error)

    async def _receive(self, request: Request, read: _Read) -> bytes:
        data = bytearray()
        with self._counted(read):
            try:
                async with read.timer:
                    async for part in request.stream():
                        data += part
                        if len(data) > self._max_bytes:
                            raise self._too_large()
                        if len(data) > SMALL_BODY_BYTES:
                            self._hold(read, len(data))
            except TimeoutError:
                raise read.error from None
        return bytes(data)

    @contextmanager
    def _counted(self, read: _Read) -> Iterator[None]:
        if len(self._reads) >= MAX_READS:
            oldest = next(iter(self._reads))
            if not _gives_way(oldest):
                raise queue_full(f"{MAX_READS} request bodies are being received already")
            self._evict(oldest)
        self._reads[read] = None
        try:
            yield
        finally:
            self._reads.pop(read, None)

    def _hold(self, read: _Read, size: int) -> None:
        """Count ``size`` bytes of ``read``; where they have no room, older ones give way. Raises ``ApiError``."""
        if read not in self._reads:  # it gave way itself since its last part
            raise read.error
        lacking = self._held - read.held + size - self._max_total_bytes
        evicted = []
        for other in self._reads:
            if lacking <= 0 or other is read or not _gives_way(other):
                break  # those behind it are younger still
            if other.held:
                evicted.append(other)
                lacking -= other.held
        if lacking > 0:
            raise queue_full(f"{self._max_total_bytes} bytes of request bodies are held already")
        for other in evicted:
            self._evict(other)
        self._held += size - read.held
        read.held = size

    def _evict(self, read: _Read) -> None:
        read.end(body_timeout())
        self._release(read)
        del self._reads[read]

    def _release(self, read: _Read) -> None:
        self._held -= read.held
        read.held = 0

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is longer than {self._max_bytes} bytes.", code="request_too_large")


def _gives_way(read: _Read) -> bool:
    return time.monotonic() - read.start_time >= YIELD_SECONDS
