"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.formats import ChatFormat, CompletionFormat
from service.prompts import encode_chat, encode_completion
from service.schemas import ChatBody, CompletionBody
from service.serving import Endpoint

router = APIRouter(tags=["generation"])

_COMPLETIONS = Endpoint(CompletionBody, encode_completion, CompletionFormat, "cmpl")
_CHAT = Endpoint(ChatBody, encode_chat, ChatFormat, "chatcmpl")


def _openapi(body: str, response: str) -> dict[str, Any]:
    """The service reads bodies itself, so the framework cannot know their schemas."""

    def content(kind: str, name: str) -> dict[str, Any]:
        return {"content": {kind: {"schema": {"$ref": f"#/components/schemas/{name}"}}}}

    return {
        "requestBody": {"required": True, **content("application/json", body)},
        "responses": {
            "200": {"description": "The answer, or its stream.", **content("application/json", response)}
        },
    }


@router.post("/v1/completions", openapi_extra=_openapi("CompletionBody", "Completion"))
async def completions(request: Request) -> Response:
    """Continue a prompt: text, token ids, or a list of either."""
    return await _COMPLETIONS.serve(request)


@router.post("/v1/chat/completions", openapi_extra=_openapi("ChatBody", "ChatCompletion"))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, written as a prompt by the model's chat template."""
    return await _CHAT.serve(request)
