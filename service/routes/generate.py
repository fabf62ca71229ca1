"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.chat_format import ChatFormat
from service.formats import CompletionFormat
from service.prompts import encode_chat, encode_completion
from service.routes.openapi import json_exchange
from service.schemas import ChatBody, CompletionBody
from service.serving import Endpoint

router = APIRouter(tags=["generation"])

COMPLETIONS = Endpoint(CompletionBody, encode_completion, CompletionFormat, "cmpl", "text_completion")
CHAT = Endpoint(ChatBody, encode_chat, ChatFormat, "chatcmpl", "chat")


@router.post("/v1/completions", openapi_extra=json_exchange("Completion", "CompletionBody"))
async def completions(request: Request) -> Response:
    """Continue a prompt: text, token ids, or a list of either."""
    return await COMPLETIONS.serve(request)


@router.post("/v1/chat/completions", openapi_extra=json_exchange("ChatCompletion", "ChatBody"))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, written as a prompt by the model's chat template."""
    return await CHAT.serve(request)
