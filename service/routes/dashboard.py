"""``/dashboard``: a page that shows what one server does, made of files beside it and nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.errors import ApiError, error_response
from service.routes.head import answer_head

router = APIRouter(tags=["operations"])

_DIRECTORY = Path(__file__).parents[1] / "dashboard"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = {
    path.name: (path.read_bytes(), _TYPES[path.suffix])
    for path in sorted(_DIRECTORY.iterdir())
    if path.suffix in _TYPES
}
_HEADERS = {
    "Cache-Control": "no-cache",
    # Nothing from other places is ever loaded, so nothing from them need be allowed.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/dashboard", include_in_schema=False)
async def page() -> Response:
    """The page itself; its data come from ``/metrics``."""
    return _file("index.html")


@router.get("/dashboard/{name}", include_in_schema=False)
async def part(request: Request) -> Response:
    """A script or style sheet of the page."""
    name = request.path_params["name"]
    if name not in _FILES:
        return error_response(ApiError(404, "No such file.", code="not_found"))
    return _file(name)


answer_head(router)


def _file(name: str) -> Response:
    content, media_type = _FILES[name]
    return Response(content, media_type=media_type, headers=_HEADERS)
