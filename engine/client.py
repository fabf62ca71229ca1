"""What the service talks to: an engine in a process of its own, or in a thread, behind one interface.

A client belongs to the event loop that called ``start``; all its methods are called from that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Literal, Protocol, Self, TypeVar

from engine.errors import EngineDeadError, RequestError
from engine.options import EngineOptions
from engine.types import (
    AbortRequest,
    AddRequest,
    EngineInfo,
    Fatal,
    FromEngine,
    Heartbeat,
    Outputs,
    Progress,
    Ready,
    Request,
    Shutdown,
    StepStats,
    ToEngine,
    TokenDelta,
)
from engine.worker import DEFAULT_FACTORY, run

ClientState = Literal["starting", "ready", "draining", "dead"]
StatsSink = Callable[[StepStats], None]
DeathSink = Callable[[str], None]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class TokenStream:
    """The deltas of one request, in order; ends after the delta that has a ``finish_reason``.

    Leaving it early aborts the request: ``aclose()`` (use ``contextlib.aclosing``), or cancelling the task
    that waits in it.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self._request_id = request_id
        self._abort = abort
        self._items: asyncio.Queue[TokenDelta | EngineDeadError] = asyncio.Queue()
        self._ended = False

    def put(self, item: TokenDelta | EngineDeadError) -> None:
        """Append what the engine said (called by the client only)."""
        self._items.put_nowait(item)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        """The next delta.

        Raises:
            EngineDeadError: The engine died or was stopped before the request ended.
            StopAsyncIteration: The request ended.
        """
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._items.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, EngineDeadError):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    async def aclose(self) -> None:
        """Abort the request unless its end was read; further reads see the end."""
        if not self._ended:
            self._ended = True
            self._abort(self._request_id)


class EngineClient(Protocol):
    """How the service uses an engine."""

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved at start. Raises ``EngineDeadError`` before it was ready."""
        ...

    @property
    def state(self) -> ClientState:
        """``starting`` until ``Ready`` came; ``draining`` during ``stop``; ``dead`` after it or a death."""
        ...

    @property
    def progress(self) -> Progress | None:
        """The last report of the start; ``None`` before the first."""
        ...

    async def start(self) -> None:
        """Start the engine and wait until it can take requests. Raises ``EngineDeadError`` if it cannot."""
        ...

    def submit(self, request: Request) -> TokenStream:
        """Send a request at once and return its deltas.

        A request that the engine refuses yields one delta with ``finish_reason="error"``.

        Raises:
            EngineDeadError: The state is not ``ready``.
            RequestError: A live request has the same id. (Nor may an aborted one's be used again: what it
                gave last can still be on its way.)
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request; its stream yields a last delta, ``finish_reason="abort"``. Unknown ids are fine."""
        ...

    async def stop(self) -> None:
        """End the engine. Streams still open raise ``EngineDeadError``. Can be called again."""
        ...


class BaseClient:
    """Routing of messages to streams, and the state, for any transport."""

    def __init__(self, on_stats: StatsSink | None = None, on_death: DeathSink | None = None) -> None:
        """
        Args:
            on_stats: Called with the statistics of every reported iteration; must be quick.
            on_death: Called once with the reason when the engine dies without ``stop``.
        """
        self._on_stats = on_stats
        self._on_death = on_death
        self._state: ClientState = "starting"
        self._progress: Progress | None = None
        self._info: EngineInfo | None = None
        self._streams: dict[str, TokenStream] = {}
        self._ready = asyncio.Event()
        self._death_reason = ""

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine is not ready")
        return self._info

    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def progress(self) -> Progress | None:
        return self._progress

    def submit(self, request: Request) -> TokenStream:
        if self._state != "ready":
            raise EngineDeadError(self._death_reason or f"the engine is {self._state}")
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        stream = TokenStream(request.request_id, self.abort)
        self._send(AddRequest(request))  # first: what cannot be encoded leaves no stream behind
        self._streams[request.request_id] = stream
        return stream

    def abort(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.put(TokenDelta(request_id=request_id, token_ids=[], finish_reason="abort"))
            self._send(AbortRequest(request_id))

    def _send(self, message: ToEngine) -> None:
        raise NotImplementedError

    def _receive(self, message: FromEngine) -> None:
        """Act on one message of the engine."""
        if isinstance(message, Outputs):
            for delta in message.deltas:
                self._deliver(delta)
            if self._on_stats is not None:
                _call_sink(self._on_stats, message.stats)
        elif isinstance(message, Progress):
            self._progress = message
        elif isinstance(message, Ready):
            self._info = message.info
            if self._state == "starting":
                self._state = "ready"
            self._ready.set()
        elif isinstance(message, Fatal):
            self._die(message.message)
        else:
            assert isinstance(message, Heartbeat), f"unknown message {message!r}"

    def _deliver(self, delta: TokenDelta) -> None:
        ended = delta.finish_reason is not None
        streams = self._streams
        stream = streams.pop(delta.request_id, None) if ended else streams.get(delta.request_id)
        # None: aborted here while the delta was on its way.
        if stream is not None:
            stream.put(delta)

    async def _until_ready(self) -> None:
        await self._ready.wait()
        if self._state != "ready":
            raise EngineDeadError(self._death_reason)

    def _die(self, reason: str) -> None:
        """Answer every waiting request; the first reason counts."""
        if self._state == "dead":
            return
        stopping = self._state == "draining"
        self._state = "dead"
        self._death_reason = reason
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(EngineDeadError(reason))
        self._ready.set()
        if not stopping and self._on_death is not None:
            _call_sink(self._on_death, reason)


def _call_sink(sink: Callable[[_T], None], value: _T) -> None:
    """A sink's fault is the sink's own: it must not stop the delivery of tokens."""
    try:
        sink(value)
    except Exception:
        logger.exception("a callback of the engine client failed")


class _ThreadLink:
    """The engine thread's `Link` to a client in ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[FromEngine], None]) -> None:
        self._loop = loop
        self._receive = receive
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def receive(self, timeout: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        with contextlib.suppress(queue.Empty):
            messages.append(self.inbox.get(timeout=timeout) if timeout else self.inbox.get_nowait())
            while True:
                messages.append(self.inbox.get_nowait())
        return messages

    def send(self, message: FromEngine) -> None:
        # The loop may be gone when a test or a command ends without `stop`.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._receive, message)


class InProcessEngineClient(BaseClient):
    """The engine in a thread of this process: for tests, ``eyas generate`` and ``eyas bench``.

    A crash of the interpreter takes both, and a stuck engine is not noticed.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        on_stats: StatsSink | None = None,
        on_death: DeathSink | None = None,
        factory: str = DEFAULT_FACTORY,
    ) -> None:
        """
        Args:
            options: Options of the engine.
            on_stats: See `BaseClient`.
            on_death: See `BaseClient`.
            factory: ``module:class`` whose ``load`` makes the engine.
        """
        super().__init__(on_stats, on_death)
        self._options = options
        self._factory = factory
        self._link: _ThreadLink | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        assert self._thread is None, "start() was called twice"
        self._link = link = _ThreadLink(asyncio.get_running_loop(), self._receive)
        self._thread = threading.Thread(
            target=run, args=(self._factory, self._options, link), name="engine", daemon=True
        )
        self._thread.start()
        await self._until_ready()

    async def stop(self) -> None:
        if self._state != "dead":
            self._state = "draining"
        if self._link is not None and self._thread is not None:
            self._link.inbox.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
        self._die("the engine was stopped")

    def _send(self, message: ToEngine) -> None:
        assert self._link is not None, "send before start()"
        self._link.inbox.put(message)
