"""Makes the application out of its parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from engine.client import EngineClient
from service import responses
from service.auth import ApiKeys, AuthMiddleware
from service.context import Service
from service.errors import install_error_handlers
from service.lifecycle import Lifecycle
from service.metrics import ServiceMetrics
from service.middleware import RequestContext
from service.routes import generate, operations
from service.schemas import ChatBody, CompletionBody
from service.settings import Settings
from service.text import Tokenizer

_REF_TEMPLATE = "#/components/schemas/{model}"


def create_app(
    settings: Settings, client: EngineClient, metrics: ServiceMetrics, tokenizer: Tokenizer
) -> FastAPI:
    """The service as an ASGI application.

    Its lifespan begins to start ``client`` and lets the server open its port at once; at the end it waits for
    running requests (``settings.drain_timeout``) and stops the client. ``app.state.service.lifecycle`` lets a
    signal handler drain earlier.
    """
    lifecycle = Lifecycle(client)
    metrics.watch_ready(lambda: lifecycle.state == "ready")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        lifecycle.start()
        try:
            yield
            await lifecycle.drain(settings.drain_timeout)
        finally:
            await lifecycle.stop()

    app = FastAPI(title="Eyas", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = Service(settings, client, metrics, tokenizer, lifecycle)
    app.include_router(generate.router)
    app.include_router(operations.router)
    install_error_handlers(app)
    keys = ApiKeys(settings.api_key)
    if keys:
        app.add_middleware(AuthMiddleware, keys=keys)
    app.add_middleware(RequestContext, metrics=metrics)  # added last: the outermost
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Complete the OpenAPI document with the bodies that the service reads and writes by itself."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for body in (CompletionBody, ChatBody):
                schema = body.model_json_schema(ref_template=_REF_TEMPLATE)
                schemas.update(schema.pop("$defs", {}))
                schemas[body.__name__] = schema
            schemas.update(responses.component_schemas())
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
