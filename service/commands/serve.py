"""``eyas serve``: the HTTP server in this process, the engine in another, and how both end together."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from rich.console import Console
from rich.table import Table

from engine.client import DeathSink
from engine.errors import ConfigError
from engine.logs import configure_logs
from engine.process_client import ProcessEngineClient
from engine.types import EngineInfo
from engine.worker import DEFAULT_FACTORY
from service.app import create_app
from service.commands.start_progress import log_graphs, show_capturing
from service.connections import (
    ACCEPTS_PER_ROUND,
    Connection,
    ConnectionBound,
    allow_many_connections,
    warn_seldom_of_lacking_descriptors,
)
from service.lifecycle import Lifecycle
from service.metrics import ServiceMetrics
from service.settings import Settings, name_options, option_name
from service.supervisor import SupervisedClient
from service.targets import make_writable_directory
from service.text import Tokenizer
from service.tracing import Tracer
from service.version import VERSION

EXIT_ENGINE_DIED = 1
CLOSING_SECONDS = 5
"""How long clients that do not read their answers can hold up the end."""
BACKLOG = 8192
"""Connections that may wait to be accepted; the kernel has a limit of its own (``net.core.somaxconn``)."""
SAME_SIGNAL_SECONDS = 0.5
"""Signals closer than this are one: a process group and a parent that forwards deliver the same one twice."""
DEATH_NOTICE_SECONDS = 2.0
"""How long the port stays open after the engine's death: probes and retries see 503, not a refusal."""

_log = structlog.get_logger(__name__)


class Server(uvicorn.Server):
    """Ends in order: readiness drops, running requests finish, then the port closes and the engine stops.

    The first SIGTERM or SIGINT begins that, a second one ends what still runs at once. The death of the
    engine begins it too, and makes the exit code non-zero.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        lifecycle: Lifecycle,
        drain_timeout: float,
        on_start: Callable[[], Coroutine[Any, Any, None]],
        on_ready: Callable[[], None],
    ) -> None:
        """
        Args:
            config: How to serve the application.
            lifecycle: The application's.
            drain_timeout: Seconds that running requests have after a signal.
            on_start: Runs beside the engine's start.
            on_ready: Called once the engine can take requests.
        """
        super().__init__(config)
        self._lifecycle = lifecycle
        self._drain_timeout = drain_timeout
        self._on_start = on_start
        self._on_ready = on_ready
        self._was_ready = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._first_signal_time: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        warn_seldom_of_lacking_descriptors(self._loop)
        if self._first_signal_time is not None:
            self.should_exit = True
            return
        try:
            await super().startup(sockets)
        except SystemExit as error:
            if not isinstance(error.__context__, OSError):
                raise
            # uvicorn has ended the lifespan, and with it the engine, since it cannot listen
            address = f"--host {self.config.host} --port {self.config.port}"
            raise ConfigError(f"{address}: {error.__context__.strerror}") from None
        for server in self.servers:
            for listener in server.sockets:
                with listener.dup() as own:
                    own.listen(BACKLOG)  # asyncio's ``backlog`` is also how many it accepts in a round
        self._spawn(self._on_start())
        self._spawn(self._tell_ready())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own handling: it closes the port first, and dies of the signal in the end.
        now = time.monotonic()
        first = self._first_signal_time
        if first is None:
            self._first_signal_time = now
        elif now - first < SAME_SIGNAL_SECONDS:
            return
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._signalled, signal.Signals(sig).name, first is not None)

    def engine_died(self, reason: str) -> None:
        """End because there is nothing left to serve with."""
        _log.critical("engine_died", reason=name_options(reason))
        self.exit_code = EXIT_ENGINE_DIED
        self._spawn(self._end(0.0, notice=DEATH_NOTICE_SECONDS if self._was_ready else 0.0))

    def _signalled(self, name: str, again: bool) -> None:
        _log.info("shutting_down", signal=name, at_once=again)
        self._spawn(self._end(0.0 if again else self._drain_timeout))

    async def _end(self, timeout: float, notice: float = 0.0) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout + CLOSING_SECONDS):
                await self._lifecycle.drain(timeout)
        await asyncio.sleep(notice)
        self.should_exit = True

    async def _tell_ready(self) -> None:
        await self._lifecycle.started()
        if self._lifecycle.state == "ready":
            self._was_ready = True
            self._on_ready()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("server_task_failed", exc_info=error)


def serve(settings: Settings, factory: str = DEFAULT_FACTORY) -> int:
    """Serve until a signal or the engine's death.

    Args:
        settings: The server's options.
        factory: ``module:class`` whose ``load`` makes the engine.

    Returns:
        The exit code: 0 after a signal, ``EXIT_ENGINE_DIED`` if the engine died or could not start.

    Raises:
        ConfigError: The tokenizer, the certificate, the OpenTelemetry SDK, the directory for bundles or the port
            cannot be used.
    """
    configure_logs(settings.log_level, settings.log_format)
    tokenizer = Tokenizer.from_directory(settings.tokenizer_dir)
    metrics = ServiceMetrics()
    tracer = None
    if settings.otlp_endpoint is not None:
        tracer = Tracer.to_endpoint(settings.otlp_endpoint, settings.model_name)
    client = _engine_client(settings, metrics, factory, lambda reason: server.engine_died(reason))
    app = create_app(settings, client, metrics, tokenizer, tracer)
    server = Server(
        _server_config(app, settings, allow_many_connections()),
        app.state.service.lifecycle,
        settings.drain_timeout,
        on_start=lambda: show_capturing(client),
        on_ready=lambda: show_resolved(settings, client.info),
    )
    # Last, so that a start that something else refuses leaves no directory; the engine would look only once it has
    # loaded the model
    make_writable_directory("--nan-bundle-dir", settings.nan_bundle_dir)
    server.run()
    return server.exit_code


def _engine_client(
    settings: Settings, metrics: ServiceMetrics, factory: str, on_death: DeathSink
) -> SupervisedClient:
    def new_engine(on_death: DeathSink) -> ProcessEngineClient:
        return ProcessEngineClient(
            settings.engine_options(),
            on_stats=metrics.engine_step,
            on_death=on_death,
            stall_timeout=settings.engine_timeout,
            factory=factory,
            log_level=settings.log_level,
            log_format=settings.log_format,
        )

    def ready() -> None:
        metrics.engine_ready(settings.model_name, VERSION, client.info)
        log_graphs(client.info)

    client = SupervisedClient(
        new_engine,
        max_restarts=settings.max_engine_restarts,
        on_ready=ready,
        on_down=metrics.engine_down,
        on_restart=metrics.engine_restart,
        on_death=on_death,
    )
    return client


def _server_config(app: FastAPI, settings: Settings, max_connections: int) -> uvicorn.Config:
    def path(file: Path | None) -> str | None:
        return None if file is None else str(file)

    if settings.ssl_certfile is not None:
        try:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"--ssl-certfile {settings.ssl_certfile}: {error}") from None
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        http=partial(Connection, ConnectionBound(max_connections)),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        backlog=ACCEPTS_PER_ROUND,
        timeout_graceful_shutdown=CLOSING_SECONDS,
        ssl_certfile=path(settings.ssl_certfile),
        ssl_keyfile=path(settings.ssl_keyfile),
        ssl_ca_certs=path(settings.ssl_ca_certs),
        ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )


def show_resolved(settings: Settings, info: EngineInfo) -> None:
    """Print every option as it came out, what the engine resolved included."""
    resolved = resolved_options(settings, info)
    if settings.log_format == "json":
        _log.info("ready", **resolved)
        return
    table = Table(title=f"{settings.model_name} is ready", title_justify="left", show_header=False)
    for name, value in resolved.items():
        table.add_row(option_name(name), value)
    Console(stderr=True).print(table)


def resolved_options(settings: Settings, info: EngineInfo) -> dict[str, str]:
    """Options by field name as text: the engine's word where it has one, else the given value; no keys."""
    given = {name: str(getattr(settings, name)) for name in type(settings).model_fields}
    given["api_key"] = f"{len(settings.api_key)} keys"
    given["served_model_name"] = settings.model_name
    given["tokenizer"] = str(settings.tokenizer_dir)
    told = {name: value for name, value in info.resolved.items() if name != "prefix_cache"}
    return given | told
