"""From start to drain: whether requests are taken, what is still running, and how it is brought to an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import structlog

from engine.client import EngineClient
from engine.errors import EngineDeadError, EngineError
from service.errors import ApiError, unavailable
from service.generation import Generation

ServiceState = Literal["starting", "ready", "draining", "dead"]

LAST_WORDS_SECONDS = 5.0
"""How long a client that does not read its answer can hold up a drain, once its request was ended."""

_log = structlog.get_logger(__name__)


class Lifecycle:
    """State of the service around its engine. All methods are called from the event loop."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._draining = False
        self._live: dict[int, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._start_task: asyncio.Task[None] | None = None
        self.failure: EngineError | None = None
        """Why the engine did not start."""
        self.on_drain: Callable[[ApiError], None] = lambda error: None
        """Called when a drain begins, with what requests that are not accepted yet are told."""

    @property
    def state(self) -> ServiceState:
        """``dead`` wins over ``draining``, which wins over the engine's own state."""
        if self.failure is not None or self._client.state == "dead":
            return "dead"
        return "draining" if self._draining else self._client.state

    def start(self) -> None:
        """Begin to start the engine; the port is open meanwhile and ``/ready`` tells the progress."""
        self._start_task = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            await self._client.start()
        except EngineError as exc:
            self.failure = exc
            if not isinstance(exc, EngineDeadError):  # which the client's ``on_death`` was told
                _log.error("engine_start_failed", error=str(exc))

    async def started(self) -> None:
        """Wait until the start ended; ``failure`` tells how."""
        if self._start_task is not None:
            await asyncio.wait((self._start_task,))

    def check_accepting(self) -> None:
        """Refuse work while there is no engine to do it. Raises ``ApiError`` (503)."""
        if (refusal := self._refusal()) is not None:
            raise refusal

    def _refusal(self) -> ApiError | None:
        state = self.state
        if state == "starting":
            return unavailable("The engine is starting.", "engine_starting", retry_after=5)
        if state == "draining":
            return unavailable("The server is shutting down.", "shutting_down", retry_after=5)
        if state == "dead":
            return unavailable("The engine is dead.", "engine_dead", retry_after=5)
        return None

    @contextmanager
    def running(self, generation: Generation) -> Iterator[None]:
        """Count ``generation`` as work that a drain waits for."""
        self._live[id(generation)] = generation
        self._idle.clear()
        try:
            yield
        finally:
            del self._live[id(generation)]
            if not self._live:
                self._idle.set()

    async def drain(self, timeout: float) -> bool:
        """Take no more requests and let the running ones finish.

        Args:
            timeout: Seconds after which those that are left end with an error, which their clients see.

        Returns:
            Whether all finished by themselves.
        """
        self._draining = True
        refusal = self._refusal()
        assert refusal is not None, "draining, yet accepting"
        self.on_drain(refusal)
        if await self._idle_within(timeout):
            return True
        _log.warning("drain_timeout", generations_left=len(self._live))
        error = unavailable("The server shut down before the request was complete.", "shutting_down")
        for generation in list(self._live.values()):
            generation.fail(error)
        await self._idle_within(LAST_WORDS_SECONDS)
        return False

    async def _idle_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()

    async def stop(self) -> None:
        """End the engine, whatever still runs."""
        self._draining = True
        if self._start_task is not None:
            self._start_task.cancel()
            await asyncio.wait((self._start_task,))
        await self._client.stop()
