"""Receives request bodies: so many at once, each in bounded size and time, and none once a drain begins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request

from service.errors import ApiError, body_timeout, queue_full

MAX_READS = 256
"""Bodies that are received at once."""
READ_SECONDS = 60.0
"""Longest time for a body from its request's arrival on, whatever the limit of the request's own time."""
YIELD_SECONDS = 1.0
"""Where `MAX_READS` are under way, a new one ends the oldest if that has had this long, and is refused if not.
So slow clients cannot keep the others out."""


@dataclass(eq=False, slots=True)
class _Read:
    timer: asyncio.Timeout
    start_time: float
    error: ApiError
    """What the client is told when the timer ends the read."""

    def end(self, error: ApiError) -> None:
        self.error = error
        if not self.timer.expired():
            self.timer.reschedule(0.0)  # the loop's clock is past that


class BodyReader:
    """Called from the event loop only."""

    def __init__(self, max_bytes: int, request_timeout: float | None) -> None:
        """
        Args:
            max_bytes: Largest body accepted.
            request_timeout: Seconds that a request may take, the reading of its body included; ``None``: no limit.
        """
        self._max_bytes = max_bytes
        self._seconds = READ_SECONDS if request_timeout is None else min(READ_SECONDS, request_timeout)
        self._reads: dict[_Read, None] = {}
        """In order of their start."""

    async def read(self, request: Request) -> bytes:
        """The whole body of ``request``; nothing of it may have been read.

        Raises:
            ApiError: 413, 408 if it is not there in time, 429 if too many others are received, or what `end_all`
                was given.
            starlette.requests.ClientDisconnect: The client went away while sending.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        left = request.state.arrival_time + self._seconds - time.monotonic()
        timer = asyncio.timeout(left)
        with self._counted(timer) as read:
            try:
                async with timer:
                    async for part in request.stream():
                        size += len(part)
                        if size > self._max_bytes:
                            raise self._too_large()
                        parts.append(part)
            except TimeoutError:
                raise read.error from None
        return b"".join(parts)

    def end_all(self, error: ApiError) -> None:
        """End every read under way with ``error``."""
        for read in self._reads:
            read.end(error)

    @contextmanager
    def _counted(self, timer: asyncio.Timeout) -> Iterator[_Read]:
        self._make_room()
        read = _Read(timer, time.monotonic(), body_timeout())
        self._reads[read] = None
        try:
            yield read
        finally:
            self._reads.pop(read, None)

    def _make_room(self) -> None:
        if len(self._reads) < MAX_READS:
            return
        oldest = next(iter(self._reads))
        if time.monotonic() - oldest.start_time < YIELD_SECONDS:
            raise queue_full(f"{MAX_READS} request bodies are being received already")
        oldest.end(body_timeout())
        del self._reads[oldest]

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is longer than {self._max_bytes} bytes.", code="request_too_large")
