"""HEAD beside GET, as load balancers and link checkers ask: FastAPI makes no such routes by itself."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.routing import APIRoute


def answer_head(router: APIRouter) -> None:
    """Let every GET route of ``router`` answer HEAD too; the server leaves the body out."""
    for route in list(router.routes):
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            router.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
