"""The engine process: load an engine, then serve messages until told to stop.

Started by ``ProcessEngineClient`` as ``python -m engine.worker LAUNCH``, with LAUNCH a JSON-encoded
``Launch``. Standard input is a lifeline: the starter holds its other end and never writes, so its end means
that the starter is gone. The loop itself (`run`) knows only a `Link`, and serves the in-process client too.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from engine.errors import EngineError, RequestError
from engine.logs import LogFormat, LogLevel, configure_logs
from engine.options import EngineOptions
from engine.types import (
    AbortRequest,
    AddRequest,
    EngineInfo,
    ErrorInfo,
    Fatal,
    FromEngine,
    Heartbeat,
    Outputs,
    Progress,
    Ready,
    Request,
    StepStats,
    ToEngine,
    TokenDelta,
)

DEFAULT_FACTORY = "engine.engine:Engine"
HEARTBEAT_SECONDS = 0.5
"""Longest wait of an idle loop, and least distance of two heartbeats of a busy one."""

EXIT_CRASHED = 1
EXIT_REFUSED = 2
"""The options or the checkpoint cannot be served: a restart would not help."""
EXIT_ORPHANED = 3
LINGER_MILLISECONDS = 2000

logger = logging.getLogger("engine.worker")  # __name__ is __main__ in a process of its own


class EngineCore(Protocol):
    """What the loop drives; ``engine.engine.Engine`` in production."""

    info: EngineInfo

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    def iterate(self) -> Outputs: ...
    def close(self) -> None: ...


EngineLoader = Callable[[EngineOptions, Callable[[Progress], None]], EngineCore]


class Link(Protocol):
    """The engine's end of the connection to its client."""

    def receive(self, timeout: float) -> list[ToEngine]:
        """Every message at hand; when there is none, wait up to ``timeout`` seconds for one."""
        ...

    def send(self, message: FromEngine) -> None: ...


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is started with."""

    inbox: str
    """ZeroMQ endpoint from which the worker pulls ``ToEngine`` messages."""
    outbox: str
    """ZeroMQ endpoint to which it pushes ``FromEngine`` messages."""
    factory: str
    """``module:class`` whose ``load`` makes the engine."""
    options: EngineOptions
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


def find_loader(factory: str) -> EngineLoader:
    """Import ``module:class`` and return the class's ``load``."""
    module, _, name = factory.partition(":")
    loader: EngineLoader = getattr(importlib.import_module(module), name).load
    return loader


def run(factory: str, options: EngineOptions, link: Link) -> int:
    """Load the engine and serve ``link`` until ``Shutdown``. Never raises.

    Returns:
        The exit code: 0 after ``Shutdown``, ``EXIT_REFUSED`` for an ``EngineError`` while loading,
        ``EXIT_CRASHED`` for anything else. In both last cases ``Fatal`` was sent.
    """
    try:
        engine = find_loader(factory)(options, link.send)
    except EngineError as error:
        link.send(Fatal(message=str(error)))
        return EXIT_REFUSED
    except Exception as error:
        return _crash(link, "loading the engine", error)
    try:
        link.send(Ready(info=engine.info))
        _serve(engine, link)
        engine.close()
    except Exception as error:
        return _crash(link, "running the engine", error)
    return 0


def _crash(link: Link, doing: str, error: Exception) -> int:
    logger.critical("%s failed:\n%s", doing, traceback.format_exc())
    link.send(Fatal(message=f"{doing} failed: {type(error).__name__}: {error}"))
    return EXIT_CRASHED


def _serve(engine: EngineCore, link: Link) -> None:
    reporter = _Reporter(link)
    while True:
        reporter.beat()
        messages = link.receive(0.0 if engine.has_work() else HEARTBEAT_SECONDS)
        for message in messages:
            if isinstance(message, AddRequest):
                _add(engine, reporter, message.request)
            elif isinstance(message, AbortRequest):
                engine.abort(message.request_id)
            else:
                return
        # An abort can leave nothing to do and yet free pages: one more iteration reports that.
        if messages or engine.has_work():
            reporter.report(engine.iterate())


def _add(engine: EngineCore, reporter: _Reporter, request: Request) -> None:
    try:
        engine.add(request)
    except RequestError as error:
        reason = ErrorInfo(code="invalid_request", message=str(error), param=error.param)
        reporter.refuse(
            TokenDelta(request_id=request.request_id, token_ids=[], finish_reason="error", error=reason)
        )


class _Reporter:
    """Sends outputs that say something new, and heartbeats at their interval."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._refusals: list[TokenDelta] = []
        self._last_state: StepStats | None = None
        self._last_beat = float("-inf")

    def beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_SECONDS:
            self._link.send(Heartbeat(time=now))
            self._last_beat = now

    def refuse(self, delta: TokenDelta) -> None:
        """Keep ``delta`` for the next report."""
        self._refusals.append(delta)

    def report(self, outputs: Outputs) -> None:
        if self._refusals:
            outputs = Outputs(deltas=self._refusals + outputs.deltas, stats=outputs.stats)
            self._refusals = []
        state = _without_counts(outputs.stats)
        if outputs.deltas or state != outputs.stats or state != self._last_state:
            self._link.send(outputs)
            self._last_state = state


def _without_counts(stats: StepStats) -> StepStats:
    return StepStats(
        requests_running=stats.requests_running,
        requests_waiting=stats.requests_waiting,
        pages_used=stats.pages_used,
        pages_cached=stats.pages_cached,
        pages_free=stats.pages_free,
        forwards=[],
        graphs_disabled=stats.graphs_disabled,
    )


class _ZmqLink:
    """A `Link` over two ZeroMQ sockets."""

    def __init__(self, launch: Launch) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            # The client bounds what is in flight; a full queue must not stall a step.
            socket.set_hwm(0)
        self._outbox.linger = LINGER_MILLISECONDS
        self._inbox.connect(launch.inbox)
        self._outbox.connect(launch.outbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, timeout: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        if timeout > 0 and not self._inbox.poll(int(timeout * 1000)):
            return messages
        while True:
            try:
                messages.append(self._decoder.decode(self._inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))

    def close(self) -> None:
        """Send what is queued (for at most the linger time) and close."""
        self._inbox.close(linger=0)
        self._outbox.close()
        self._context.term()


def _end_with_starter(launch: Launch) -> None:
    """End this process when the lifeline does, whatever the main thread is doing, and remove the sockets."""
    os.read(sys.stdin.fileno(), 1)
    sockets = [endpoint.removeprefix("ipc://") for endpoint in (launch.inbox, launch.outbox)]
    with contextlib.suppress(OSError):
        for socket in sockets:
            os.unlink(socket)
        os.rmdir(os.path.dirname(sockets[0]))
    os._exit(EXIT_ORPHANED)


def main(launch_json: str) -> int:
    """Run a worker process.

    Returns:
        Its exit code, as `run`.
    """
    # Who started the engine decides when it ends: a signal sent to the whole process group (Ctrl-C, a service
    # manager's stop) must not cut what the service is still draining.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    launch = msgspec.json.decode(launch_json, type=Launch)
    threading.Thread(target=_end_with_starter, args=(launch,), name="lifeline", daemon=True).start()
    configure_logs(launch.log_level, launch.log_format)
    logging.captureWarnings(True)  # libraries' warnings are log lines too, so that each line can be parsed
    link = _ZmqLink(launch)
    try:
        return run(launch.factory, launch.options, link)
    finally:
        link.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
