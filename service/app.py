"""Makes the application out of its parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from engine.client import EngineClient
from service import responses
from service.auth import OPEN_PATHS, ApiKeys, AuthMiddleware
from service.context import Service
from service.errors import install_error_handlers
from service.lifecycle import Lifecycle
from service.metrics import ServiceMetrics
from service.middleware import RequestContext
from service.routes import dashboard, generate, operations, tokenize
from service.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokenizeChatBody
from service.settings import Settings
from service.text import Tokenizer
from service.tracing import Tracer

_REF_TEMPLATE = "#/components/schemas/{model}"


def create_app(
    settings: Settings,
    client: EngineClient,
    metrics: ServiceMetrics,
    tokenizer: Tokenizer,
    tracer: Tracer | None = None,
) -> FastAPI:
    """The service as an ASGI application.

    Its lifespan begins to start ``client`` and lets the server open its port at once; at the end it waits for
    running requests (``settings.drain_timeout``) and stops the client. ``app.state.service.lifecycle`` lets a
    signal handler drain earlier.
    """
    lifecycle = Lifecycle(client)
    metrics.watch_ready(lambda: lifecycle.state == "ready")
    if settings.metrics_compat == "vllm":
        metrics.export_vllm_names(settings.model_name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        lifecycle.start()
        try:
            yield
            await lifecycle.drain(settings.drain_timeout)
        finally:
            await lifecycle.stop()
            if tracer is not None:
                await tracer.close()

    app = FastAPI(title="Eyas", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = Service(settings, client, metrics, tokenizer, lifecycle, tracer)
    for routes in (generate, tokenize, operations, dashboard):
        app.include_router(routes.router)
    install_error_handlers(app)
    keys = ApiKeys(settings.all_api_keys())
    if keys:
        open_paths = OPEN_PATHS | {"/metrics"} if settings.open_metrics else OPEN_PATHS
        app.add_middleware(AuthMiddleware, keys=keys, open_paths=open_paths)
    app.add_middleware(RequestContext, metrics=metrics)  # added last: the outermost
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Complete the OpenAPI document with the bodies that the service reads and writes by itself."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for body in (CompletionBody, ChatBody, TokenizeBody, TokenizeChatBody, DetokenizeBody):
                schema = body.model_json_schema(ref_template=_REF_TEMPLATE)
                schemas.update(schema.pop("$defs", {}))
                schemas[body.__name__] = schema
            schemas.update(responses.component_schemas())
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
