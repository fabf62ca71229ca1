"""An engine client that starts a new engine when one dies, with back-off, a bounded number of times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from engine.client import ClientState, DeathSink, EngineClient, TokenStream
from engine.errors import EngineError
from engine.types import EngineInfo, Progress, Request

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
STABLE_SECONDS = 300.0
"""An engine that lived this long was no failed attempt: its death is the first of a new series."""

_log = structlog.get_logger(__name__)


class SupervisedClient:
    """One `EngineClient` over a sequence of engines.

    A death is answered by the dead engine's own client: every stream raises ``EngineDeadError``. While the
    next engine starts the state is ``starting``. An engine that was never ready is not tried again: its
    options or its checkpoint are wrong.
    """

    def __init__(
        self,
        make: Callable[[DeathSink], EngineClient],
        *,
        max_restarts: int,
        on_ready: Callable[[], None] = lambda: None,
        on_down: Callable[[], None] = lambda: None,
        on_restart: Callable[[], None] = lambda: None,
        on_death: DeathSink = lambda reason: None,
        first_delay: float = FIRST_DELAY_SECONDS,
    ) -> None:
        """
        Args:
            make: Makes the client of one engine, which calls its argument when that engine dies.
            max_restarts: Most attempts in a series; 0 for none.
            on_ready: Called when an engine can take requests.
            on_down: Called when one died.
            on_restart: Called when an attempt to start another begins.
            on_death: Called once with the reason when no engine is left and none will come.
            first_delay: Seconds before the first attempt; each further one waits twice as long.
        """
        self._make = make
        self._max_restarts = max_restarts
        self._on_ready = on_ready
        self._on_down = on_down
        self._on_restart = on_restart
        self._on_death = on_death
        self._first_delay = first_delay
        self._attempts = 0
        self._ready_time: float | None = None
        self._stopping = False
        self._dead = False
        self._restart: asyncio.Task[None] | None = None
        self._client = make(self._died)

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def state(self) -> ClientState:
        if self._dead or self._stopping or self._restart is None:
            return self._client.state
        return "ready" if self._client.state == "ready" else "starting"

    @property
    def progress(self) -> Progress | None:
        # Until the next engine begins to start there is only what the dead one told
        return None if self._client.state == "dead" else self._client.progress

    async def start(self) -> None:
        await self._client.start()
        self._became_ready()

    def submit(self, request: Request) -> TokenStream:
        return self._client.submit(request)

    def abort(self, request_id: str) -> None:
        self._client.abort(request_id)

    async def stop(self) -> None:
        self._stopping = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait((self._restart,))
        await self._client.stop()

    def _became_ready(self) -> None:
        self._ready_time = time.monotonic()
        self._on_ready()

    def _died(self, reason: str) -> None:
        self._on_down()
        if self._stopping:
            return
        if self._ready_time is None:  # `start` raises the reason
            self._give_up(reason)
            return
        if self._restart is not None and not self._restart.done():
            return  # an attempt failed: its own task goes on
        if time.monotonic() - self._ready_time > STABLE_SECONDS:
            self._attempts = 0
        self._restart = asyncio.get_running_loop().create_task(self._restart_until_ready(reason))

    async def _restart_until_ready(self, reason: str) -> None:
        while self._attempts < self._max_restarts:
            delay = min(self._first_delay * 2**self._attempts, LONGEST_DELAY_SECONDS)
            self._attempts += 1
            _log.error("engine_restarting", reason=reason, attempt=self._attempts, delay_seconds=delay)
            await self._client.stop()
            await asyncio.sleep(delay)
            self._on_restart()
            self._client = self._make(self._died)
            try:
                await self._client.start()
            except (EngineError, OSError) as error:
                reason = str(error)
                continue
            _log.warning("engine_restarted", attempt=self._attempts)
            self._became_ready()
            return
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._dead = True
        self._on_death(reason)
