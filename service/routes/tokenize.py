"""``/tokenize`` and ``/detokenize``: the served model's tokenizer, as vLLM offers it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.context import service_of
from service.json_body import read_json_object
from service.routes.openapi import json_exchange
from service.schemas import DetokenizeBody, TokenizeBody, TokenizeChatBody, parse_body
from service.tokenizing import detokenized, size_of, tokenized

router = APIRouter(tags=["tokenizer"])


@router.post("/tokenize", openapi_extra=json_exchange("Tokenized", "TokenizeBody", "TokenizeChatBody"))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    service = service_of(request)
    limits = service.limits()
    value = await read_json_object(request, service.bodies)
    size = size_of(value)
    body: TokenizeBody | TokenizeChatBody
    if value.get("messages") is not None:
        body = parse_body(TokenizeChatBody, value)
        service.check_model(body.model)
    else:
        body = parse_body(TokenizeBody, value)
        service.check_model(body.model)
    content = await service.tokenizer_queue.run(lambda: tokenized(body, limits), size)
    return Response(content, media_type="application/json")


@router.post("/detokenize", openapi_extra=json_exchange("Detokenized", "DetokenizeBody"))
async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    service = service_of(request)
    limits = service.limits()
    value = await read_json_object(request, service.bodies)
    size = size_of(value)
    body = parse_body(DetokenizeBody, value)
    service.check_model(body.model)
    content = await service.tokenizer_queue.run(lambda: detokenized(body, limits), size)
    return Response(content, media_type="application/json")
