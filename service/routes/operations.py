"""What operators and their tools poll: liveness, readiness, version, metrics; and the list of models."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from service.context import Service, service_of
from service.errors import ApiError, error_response
from service.routes.head import answer_head
from service.version import VERSION

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether the process should be left alone: 503 only once the engine is dead. Needs no forward pass."""
    service = service_of(request)
    if service.lifecycle.state == "dead":
        return _not_ready(service)
    return JSONResponse({"status": "alive"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether requests are taken now; while starting, how far the start is."""
    service = service_of(request)
    if service.lifecycle.state != "ready":
        return _not_ready(service)
    return JSONResponse({"status": "ready"})


def _not_ready(service: Service) -> Response:
    try:
        service.lifecycle.check_accepting()
    except ApiError as exc:
        body: dict[str, Any] = {"status": service.lifecycle.state, **exc.body()}
        if service.lifecycle.state == "starting":
            body["progress"] = _progress(service)
        return Response(msgspec.json.encode(body), exc.status, exc.headers, "application/json")
    raise AssertionError("not ready, yet accepting")


def _progress(service: Service) -> dict[str, Any] | None:
    progress = service.client.progress
    if progress is None:
        return None
    return {"stage": progress.stage, "done": progress.done, "total": progress.total}


@router.get("/version")
async def version() -> Response:
    """The version of the installed distribution."""
    return JSONResponse({"version": VERSION})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text format, or OpenMetrics where ``Accept`` names it; see docs/metrics.md."""
    content, media_type = service_of(request).metrics.exposition(request.headers.get("accept", ""))
    return Response(content, media_type=media_type)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(service_of(request))]})


@router.get("/v1/models/{model:path}")
async def model(request: Request) -> Response:
    """The served model, by name."""
    service = service_of(request)
    try:
        service.check_model(request.path_params["model"])
    except ApiError as exc:
        return error_response(exc)
    return JSONResponse(_model(service))


answer_head(router)


def _model(service: Service) -> dict[str, Any]:
    max_model_len = service.client.info.max_model_len if service.lifecycle.state == "ready" else None
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "eyas",
        "max_model_len": max_model_len,
    }
