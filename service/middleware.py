"""What surrounds every request: its id, its arrival time, the last line against exceptions, log and count."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import ExitStack

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import error_response, internal_error
from service.metrics import ServiceMetrics
from service.streaming import ClientGone

CLIENT_CLOSED = 499
"""Status in logs and metrics of a request whose client left before the answer began; never sent."""

PROBES = frozenset({"/health", "/ready", "/metrics"})

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_log = structlog.get_logger(__name__)


class RequestContext:
    """Outermost middleware. Sets ``request_id``, ``arrival_time`` (monotonic) and ``closing`` of ``request.state``.

    ``closing`` is an ``ExitStack`` that is closed once the answer is sent or the client is gone, whatever
    happened in between.
    """

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival_time = time.monotonic()
        request_id = _request_id(scope)
        closing = ExitStack()
        scope.setdefault("state", {}).update(
            request_id=request_id, arrival_time=arrival_time, closing=closing
        )
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except (ClientGone, ClientDisconnect):
            status = status or CLIENT_CLOSED
        except Exception:
            _log.exception("request_failed", request_id=request_id)
            if status:
                raise  # too late for an answer: the server closes the connection
            await error_response(internal_error())(scope, receive, send_with_id)
        finally:
            closing.close()
            self._record(scope, status, time.monotonic() - arrival_time, request_id)

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.http_request(route, scope["method"], status or CLIENT_CLOSED)
        # Probes come every few seconds for ever.
        log = _log.debug if route in PROBES else _log.info
        log(
            "request",
            request_id=request_id,
            method=scope["method"],
            route=route,
            status=status or CLIENT_CLOSED,
            seconds=round(seconds, 6),
        )


def _request_id(scope: Scope) -> str:
    """The client's ``X-Request-Id`` if it is one that headers and logs can carry, else a new one."""
    for name, value in scope["headers"]:
        if name.lower() == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex
