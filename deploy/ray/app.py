"""Replicas of Eyas as a Ray Serve application: ``serve run deploy.ray.app:build model=DIR replicas=2``.

A gateway takes HTTP and hands each request to a replica, which is the whole service around an engine of its own
and answers as ``eyas serve`` does. Ray's parts do the rest: health checks, autoscaling on ongoing requests,
replacement of what died, and routing of prompts that begin alike to the replica that has seen them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from engine.logs import configure_logs
from engine.process_client import ProcessEngineClient
from service.app import create_app
from service.metrics import ServiceMetrics
from service.settings import load_settings
from service.text import Tokenizer

PREFIX_ROUTER = (
    # Its public name, in ray.serve.llm.request_router, can only be imported where vLLM or SGLang is installed.
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
)
ATTEMPTS = 3
"""How many replicas are tried for a request of which nothing was answered yet."""
OVERLOAD_DIFFERENCE = 8
"""Ongoing requests by which one replica may exceed another before affinity gives way to balance."""


@dataclass(frozen=True)
class Call:
    """One HTTP request on its way to a replica."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: str
    """What the router compares; never empty, which it could not route."""


@serve.deployment
class Replica:
    """The service with its engine."""

    async def __init__(self, options: dict[str, Any]) -> None:
        """
        Args:
            options: Options of ``eyas serve`` by field name.

        Raises:
            EngineError: The options, the checkpoint or the device cannot be used.
        """
        settings = load_settings(options)
        configure_logs(settings.log_level, settings.log_format)
        metrics = ServiceMetrics()
        # No restarts of the engine alone: Ray replaces a replica that is not healthy.
        client = ProcessEngineClient(
            settings.engine_options(),
            on_stats=metrics.engine_step,
            on_death=lambda reason: metrics.engine_down(),
            stall_timeout=settings.engine_timeout,
            log_level=settings.log_level,
            log_format=settings.log_format,
        )
        self._app = create_app(settings, client, metrics, Tokenizer.from_directory(settings.tokenizer_dir))
        self._lifecycle = self._app.state.service.lifecycle
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        await self._lifecycle.started()
        if self._lifecycle.failure is not None:
            raise self._lifecycle.failure
        metrics.engine_ready(settings.model_name, "ray", client.info)

    async def __del__(self) -> None:
        # Ray's graceful end of a replica: running requests are over by now.
        await self._lifespan.__aexit__(None, None, None)

    async def check_health(self) -> None:
        """Raises once the engine is dead, upon which Ray replaces the replica."""
        if self._lifecycle.state == "dead":
            raise RuntimeError("the engine is dead")

    async def handle(self, call: Call) -> AsyncGenerator[Any, None]:
        """Answer ``call``: first (status, headers), then pieces of the body."""
        sent: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
        gone = asyncio.Event()
        body = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(_scope(call), receive, sent.put)
            finally:
                await sent.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], message["headers"]
                elif piece := message.get("body"):
                    yield piece
            await task
        finally:
            # Also when the client left: the service then aborts the request.
            gone.set()
            await asyncio.wait((task,))


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": call.headers,
        "client": ("127.0.0.1", 0),
        "server": ("ray", 80),
    }


@serve.deployment
class Gateway:
    """Takes HTTP. Has no state, so any number of them is equal."""

    def __init__(self, replica: Any) -> None:
        self._handle = replica.options(method_name="handle", stream=True)

    async def __call__(self, request: Request) -> Response:
        if request.url.path == "/metrics":
            # Of which replica? Their requests are in Ray's own metrics.
            return _error(404, "Replicas in Ray have no /metrics of their own.", "not_found")
        body = await request.body()
        call = Call(
            request.method,
            request.url.path,
            request.scope["query_string"],
            list(request.scope["headers"]),
            body,
            prompt_of(body) or request.url.path,
        )
        for attempt in range(ATTEMPTS):
            answer = aiter(self._handle.remote(call))
            try:
                status, headers = await anext(answer)
            except BackPressureError:
                return _error(429, "Too many requests.", "rate_limit_exceeded")
            except RayActorError:
                # The replica died before it answered, so another one can do the same.
                if attempt + 1 < ATTEMPTS:
                    continue
                return _error(503, "The engine is dead.", "engine_dead")
            response = StreamingResponse(_pieces(answer), status)
            response.raw_headers = headers
            return response
        raise AssertionError("every attempt returns or goes on")


async def _pieces(answer: Any) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in answer:
            yield piece
    except RayActorError:
        # As the service itself does: an error event and no [DONE].
        yield b"data: " + _error_body("The engine is dead.", "engine_dead") + b"\n\n"


def prompt_of(body: bytes) -> str:
    """The text whose beginning decides on the replica; empty if there is none. Never raises."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    prompt = fields.get("prompt", fields.get("messages", ""))
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def _error_body(message: str, code: str) -> bytes:
    kind = "rate_limit_error" if code == "rate_limit_exceeded" else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}).encode()


def _error(status: int, message: str, code: str) -> Response:
    content = json.loads(_error_body(message, code))
    return JSONResponse(content, status, headers={"Retry-After": "5"} if status in (429, 503) else None)


def build(args: dict[str, str]) -> serve.Application:
    """The application.

    Args:
        args: ``replicas`` (fewest, default 1), ``max_replicas`` (default ``replicas``), ``gpus`` and ``cpus`` of
            one replica (default 1 and 1), ``ongoing`` (requests one replica is meant to have, default 32), and
            any option of ``eyas serve`` by field name.
    """
    options = dict(args)
    fewest = int(options.pop("replicas", "1"))
    most = int(options.pop("max_replicas", fewest))
    ongoing = int(options.pop("ongoing", "32"))
    actor = {"num_gpus": float(options.pop("gpus", "1")), "num_cpus": float(options.pop("cpus", "1"))}
    drain = float(options.get("drain_timeout", "30"))
    replica = Replica.options(
        ray_actor_options=actor,
        autoscaling_config=AutoscalingConfig(
            min_replicas=fewest, max_replicas=most, target_ongoing_requests=ongoing, downscale_delay_s=900
        ),
        max_ongoing_requests=4 * ongoing,
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=drain + 10,
        request_router_config=RequestRouterConfig(
            request_router_class=PREFIX_ROUTER,
            request_router_kwargs={"imbalanced_threshold": OVERLOAD_DIFFERENCE, "do_eviction": True},
        ),
    ).bind(options)
    gateway = Gateway.options(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=1000)
    return gateway.bind(replica)
