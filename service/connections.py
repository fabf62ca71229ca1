"""Connections: bounded in number, closed where no request comes, and watched while one is answered."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import time
from typing import Any

import h11
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEAD_SECONDS = 10.0
"""Longest time from a connection's start, or a later request's first byte, to the end of the request's head."""
MAX_AHEAD_BYTES = 64 * 1024
"""How much of what a client sends during an answer is read; beyond it reading stops until the answer ends."""
RESERVED_DESCRIPTORS = 128
"""Open files that connections leave to all else: the engine, logs, connections that are just being closed."""
ACCEPTS_PER_ROUND = 16
"""Connections that one round of the event loop accepts: few, so that the reserve has room for those too many."""
WARNING_SECONDS = 60.0
"""What can happen at each new connection is logged this seldom."""

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_log = structlog.get_logger(__name__)


class SeldomWarning:
    """A warning for what clients can cause at will."""

    def __init__(self, event: str) -> None:
        """
        Args:
            event: The event of the log line.
        """
        self._event = event
        self._next_time = 0.0
        self._num = 0

    def __call__(self, **values: object) -> None:
        """Log the event, with how often it came since the last line, unless there was a line not long ago."""
        self._num += 1
        now = time.monotonic()
        if now >= self._next_time:
            _log.warning(self._event, times=self._num, **values)
            self._next_time = now + WARNING_SECONDS
            self._num = 0


class ConnectionBound:
    """How many connections there may be. Above it those without a request give way, the longest idle one first."""

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: Most connections at once.
        """
        self._limit = limit
        self._idle: dict[Connection, None] = {}
        self._warn = SeldomWarning("too_many_connections")

    def add(self, connection: Connection, num_connections: int) -> None:
        """Take a new connection, the last of ``num_connections``; it is closed itself if no other is idle."""
        self._idle[connection] = None
        if num_connections > self._limit:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()  # not close(), which would wait for a client that does not read
            self._warn(limit=self._limit)

    def set_idle(self, connection: Connection, idle: bool) -> None:
        """``connection`` waits for a request, or does so no more."""
        self._idle.pop(connection, None)
        if idle:
            self._idle[connection] = None


class Connection(H11Protocol):
    """uvicorn's connection with a bound on their number and on the time of a head.

    A client that leaves during an answer is noticed even if it sent something after its request: uvicorn stops
    reading there, and would see the end of the connection only after the answer.
    """

    def __init__(
        self, bound: ConnectionBound, config: Config, server_state: ServerState, **options: Any
    ) -> None:
        """
        Args:
            bound: Shared by all connections.
            config: uvicorn's.
            server_state: uvicorn's.
            options: As uvicorn's own class.
        """
        super().__init__(config, server_state, **options)
        self._bound = bound
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        self._bound.add(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self._bound.set_idle(self, False)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.MUST_CLOSE:
            return  # it announced that nothing follows: no reason to end an answer, and nothing to keep
        super().data_received(data)
        if not self._answering and self._head_timer is None and not self.transport.is_closing():
            self._start_timer()

    def handle_events(self) -> None:
        super().handle_events()
        if not self._answering:
            return
        self._stop_timer()
        self._bound.set_idle(self, False)
        ahead, _ = self.conn.trailing_data
        if self.conn.their_state is h11.DONE and len(ahead) <= MAX_AHEAD_BYTES:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._answering:  # else the next request was there already
            self._bound.set_idle(self, True)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def allow_many_connections() -> int:
    """Raise the limit of open files, one for each connection, as far as the system lets.

    Returns:
        How many connections there may be at once.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - min(RESERVED_DESCRIPTORS, soft // 2)


def warn_seldom_of_lacking_descriptors(loop: asyncio.AbstractEventLoop) -> None:
    """Log one line where asyncio has a traceback for each connection that it cannot accept."""
    warn = SeldomWarning("cannot_accept_connections")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES and "socket" in context:
            warn(reason=error.strerror)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
