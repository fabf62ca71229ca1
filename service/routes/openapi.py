"""The OpenAPI document's part of routes that read and write their bodies by themselves."""

from __future__ import annotations

from typing import Any

_ERRORS = {
    "4XX": {"description": "The request cannot be served as asked; the error object tells why."},
    "5XX": {"description": "The server cannot serve it, now or at all; the error object tells why."},
}


def json_exchange(response: str, *bodies: str) -> dict[str, Any]:
    """``openapi_extra`` of a route that takes one of ``bodies`` and answers ``response``, by schema name."""
    choices = [{"$ref": f"#/components/schemas/{body}"} for body in bodies]
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": choices[0] if len(choices) == 1 else {"anyOf": choices}}
            },
        },
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{response}"}}},
            },
            **_ERRORS,
        },
    }
