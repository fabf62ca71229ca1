"""``/tokenize`` and ``/detokenize``: the served model's tokenizer, as vLLM offers it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from service import responses
from service.context import Service, service_of
from service.errors import bad_request
from service.json_body import read_json_object
from service.prompts import ModelLimits, render_chat, run
from service.routes.openapi import json_exchange
from service.schemas import DetokenizeBody, TokenizeBody, TokenizeChatBody, parse_body

router = APIRouter(tags=["tokenizer"])


@router.post("/tokenize", openapi_extra=json_exchange("Tokenized", "TokenizeBody", "TokenizeChatBody"))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    service = service_of(request)
    limits = service.limits()
    value = await read_json_object(request, service.settings.max_body_bytes)
    body: TokenizeBody | TokenizeChatBody
    if "messages" in value:
        body = parse_body(TokenizeChatBody, value)
        service.check_model(body.model)
        text = await render_chat(body, service.tokenizer)
    else:
        body = parse_body(TokenizeBody, value)
        service.check_model(body.model)
        text = body.prompt

    def answer() -> bytes:
        tokens = service.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
        strings = (
            [service.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        )
        return responses.encode(responses.Tokenized(len(tokens), limits.info.max_model_len, tokens, strings))

    return Response(await run(answer, len(text)), media_type="application/json")


@router.post("/detokenize", openapi_extra=json_exchange("Detokenized", "DetokenizeBody"))
async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    service = service_of(request)
    limits = service.limits()
    value = await read_json_object(request, service.settings.max_body_bytes)
    body = parse_body(DetokenizeBody, value)
    service.check_model(body.model)
    return Response(
        await run(lambda: _text(service, limits, body.tokens), len(body.tokens)),
        media_type="application/json",
    )


def _text(service: Service, limits: ModelLimits, tokens: object) -> bytes:
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise bad_request("tokens: must be a list of token ids.", "tokens", "invalid_type")
    limits.check_token_ids(tokens, "tokens")
    text = service.tokenizer.decode(tokens, skip_special_tokens=False)
    return responses.encode(responses.Detokenized(text))
