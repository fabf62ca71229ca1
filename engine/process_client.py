"""The client of an engine in a process of its own, which it starts, watches and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import deque

import msgspec
import zmq

from engine.client import BaseClient, DeathSink, StatsSink
from engine.errors import ConfigError
from engine.logs import LogFormat, LogLevel
from engine.options import EngineOptions
from engine.types import Fatal, FromEngine, Shutdown, ToEngine
from engine.worker import DEFAULT_FACTORY, Launch

STALL_SECONDS = 5.0
"""Default for ``stall_timeout``."""
EXIT_SECONDS = 5.0
"""How long a process may take to end after it was told to, or said that it would."""
LAST_WORDS_SECONDS = 0.1
"""How long messages sent before an exit may still be on their way."""
RESEND_SECONDS = 0.01
"""How soon a message that found no peer is sent again."""
MESSAGES_AT_ONCE = 64
"""Most messages read before other tasks of the event loop have their turn."""
MAX_ENDPOINT_BYTES = 107
"""Longest path of a Unix socket on Linux."""


class ProcessEngineClient(BaseClient):
    """An engine in a child process, joined by ZeroMQ over sockets in a private directory.

    Its death is noticed by its exit, its hanging (also when stopped by a signal) by missing messages. Either
    way the process is ended and every stream raises ``EngineDeadError``. It is not started again. Call
    ``stop`` after a death or a failed ``start`` too: it frees the sockets.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        on_stats: StatsSink | None = None,
        on_death: DeathSink | None = None,
        stall_timeout: float = STALL_SECONDS,
        factory: str = DEFAULT_FACTORY,
        log_level: LogLevel = "info",
        log_format: LogFormat = "text",
    ) -> None:
        """
        Args:
            options: Options of the engine.
            on_stats: See `BaseClient`.
            on_death: See `BaseClient`.
            stall_timeout: Seconds without any message after which a ready engine is killed: more than its
                longest iteration takes. The start, which only reports progress, is not bounded.
            factory: ``module:class`` whose ``load`` makes the engine.
            log_level: Least severe messages that the process logs, on this one's standard error.
            log_format: Of its lines.
        """
        super().__init__(on_stats, on_death)
        self._options = options
        self._stall_timeout = stall_timeout
        self._factory = factory
        self._logs = log_level, log_format
        self._spawning = asyncio.Lock()
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._unsent: deque[bytes] = deque()
        self._silence = 0.0
        self._directory = ""
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._inbox: zmq.Socket[bytes] | None = None
        self._outbox: zmq.Socket[bytes] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    @property
    def pid(self) -> int | None:
        """Process id of the engine, once started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        async with self._spawning:
            assert self._process is None, "start() was called twice"
            if self._state == "starting":
                try:
                    await self._spawn(self._open_sockets())
                except (ConfigError, OSError) as error:
                    self._die(f"cannot start the engine process: {error}")
        await self._until_ready()

    async def stop(self) -> None:
        was_ready = self._state == "ready"
        if self._state != "dead":
            self._state = "draining"
        async with self._spawning:
            if self._process is not None:
                if was_ready:
                    self._send(Shutdown())
                else:
                    # A loading engine reads no messages.
                    self._kill()
                await self._wait_or_kill(self._process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._die("the engine was stopped")
        self._close_sockets()

    async def _spawn(self, launch: Launch) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "engine.worker",
            msgspec.json.encode(launch).decode(),
            stdin=PIPE,
            env={
                # Threads that spin while they wait starve whatever shares their cores: the service, for one
                "GOMP_SPINCOUNT": "20000",
                **os.environ,
                # The child imports what this process would, and nothing from the current directory.
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
            # Signals to the terminal's process group are the service's to handle.
            start_new_session=True,
        )
        self._tasks = [
            asyncio.create_task(self._watch_silence(), name="engine-silence"),
            asyncio.create_task(self._watch_exit(self._process), name="engine-exit"),
        ]

    def _open_sockets(self) -> Launch:
        self._directory = tempfile.mkdtemp(prefix="eyas-")
        endpoints = [f"ipc://{self._directory}/{name}" for name in ("to-engine", "from-engine")]
        longest = max(len(os.fsencode(endpoint)) for endpoint in endpoints) - len("ipc://")
        if longest > MAX_ENDPOINT_BYTES:
            raise ConfigError(f"TMPDIR={tempfile.gettempdir()!r}: too long for the path of a Unix socket")
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        for socket, endpoint in zip((self._outbox, self._inbox), endpoints, strict=True):
            # What is in flight is bounded by the requests that the service admits.
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(endpoint)
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._read)
        log_level, log_format = self._logs
        return Launch(
            inbox=endpoints[0],
            outbox=endpoints[1],
            factory=self._factory,
            options=self._options,
            log_level=log_level,
            log_format=log_format,
        )

    def _close_sockets(self) -> None:
        if self._inbox is not None:
            asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        for socket in (self._inbox, self._outbox):
            if socket is not None:
                socket.close()
        self._inbox = self._outbox = None
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, message: ToEngine) -> None:
        assert self._outbox is not None, "send before start()"
        self._unsent.append(self._encoder.encode(message))
        if len(self._unsent) == 1:
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what waits, in order; again soon if there is no peer.

        A process may have said that it is ready over one socket before the other is connected. Or it has just
        ended: then its exit answers every request.
        """
        while self._unsent and self._outbox is not None and self._state != "dead":
            try:
                self._outbox.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                asyncio.get_running_loop().call_later(RESEND_SECONDS, self._send_waiting)
                return
            self._unsent.popleft()
        self._unsent.clear()

    def _read(self) -> None:
        """Take what has arrived: ZeroMQ signals its descriptor on *changes*, so until nothing is left."""
        if self._inbox is None:
            return
        for _ in range(MESSAGES_AT_ONCE):
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._silence = 0.0
            message = self._decoder.decode(data)
            self._receive(message)
            if isinstance(message, Fatal):
                asyncio.get_running_loop().call_later(EXIT_SECONDS, self._kill)
        asyncio.get_running_loop().call_soon(self._read)

    async def _watch_silence(self) -> None:
        tick = min(0.25, self._stall_timeout / 4)
        while self._state != "dead":
            before = time.monotonic()
            await asyncio.sleep(tick)
            # A late wake-up means that this process did not run, which says nothing about the engine.
            self._silence += min(time.monotonic() - before, 2 * tick)
            self._read()
            if self._state == "ready" and self._silence > self._stall_timeout:
                self._kill()
                self._die(
                    f"the engine was stuck: no sign of life for {self._stall_timeout:g} s "
                    "(--engine-timeout; it must exceed the longest iteration)"
                )

    async def _watch_exit(self, process: Process) -> None:
        code = await process.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        self._read()
        self._die(f"the engine process ended: {_describe_exit(code)}")

    async def _wait_or_kill(self, process: Process) -> None:
        try:
            await asyncio.wait_for(process.wait(), EXIT_SECONDS)
        except TimeoutError:
            self._kill()
            await process.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
