"""The work of ``/tokenize`` and ``/detokenize``: a thread and a queue of their own, and bounds on what is taken.

One call at a time: a prompt of a generation, which is tokenised elsewhere, shares the processor with one of them at
most, and so does the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from service import responses
from service.errors import ApiError, bad_request, queue_full
from service.prompts import INLINE_CHARS, ModelLimits, render_chat
from service.schemas import DetokenizeBody, TokenizeBody, TokenizeChatBody
from service.text import Tokenizer

MAX_CALLS: Final = 16
"""Calls that run or wait; above it 429."""
MAX_TEXT_BYTES: Final = 1 << 20
"""Longest text or conversation. The tokens of one that is as long take some 150 MB and half a second."""
MAX_TOKENS: Final = 1 << 18
"""Most tokens that are told as text, each by itself or all as one."""


class TokenizerQueue:
    """Runs calls one after the other, beside the event loop. Called from the event loop only."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "tokenizer")
        self._turn = asyncio.Lock()  # in the pool's own queue calls would outlive the service
        self._num_calls = 0

    async def run(self, work: Callable[[], bytes], size: int) -> bytes:
        """``work()`` on what has ``size`` (see `size_of`): at once if that is small, else in its turn.

        Raises:
            ApiError: 429: too many calls wait already.
        """
        if size <= INLINE_CHARS:
            return work()
        if self._num_calls >= MAX_CALLS:
            raise queue_full(f"{MAX_CALLS} calls of the tokenizer run or wait already")
        self._num_calls += 1
        try:
            async with self._turn:
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_calls -= 1


def size_of(value: Mapping[str, Any]) -> int:
    """Bytes of text, as JSON, and tokens of a body; one with more than is taken is refused before it waits.

    Raises:
        ApiError: 400 naming the field.
    """
    total = 0
    for field in ("prompt", "messages", "tools"):
        try:
            # Encoding shows the size of a value of any shape, many times faster than a walk over it
            size = len(responses.encode(value.get(field)))
        except RecursionError:
            raise bad_request(f"{field}: nested too deeply.", field) from None
        if size > MAX_TEXT_BYTES:
            raise _too_long(field)
        total += size
    tokens = value.get("tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    if num_tokens > MAX_TOKENS:
        raise bad_request(f"tokens: at most {MAX_TOKENS} token ids are possible.", "tokens")
    return total + num_tokens


def tokenized(body: TokenizeBody | TokenizeChatBody, limits: ModelLimits) -> bytes:
    """The answer of ``/tokenize``. Raises ``ApiError`` (400)."""
    tokenizer = limits.tokenizer
    if isinstance(body, TokenizeChatBody):
        text = render_chat(body, tokenizer)
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise _too_long("messages")
    else:
        text = body.prompt
    tokens = tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
    strings = _token_strs(tokens, tokenizer) if body.return_token_strs else None
    return responses.encode(responses.Tokenized(len(tokens), limits.info.max_model_len, tokens, strings))


def detokenized(body: DetokenizeBody, limits: ModelLimits) -> bytes:
    """The answer of ``/detokenize``. Raises ``ApiError`` (400)."""
    tokens: object = body.tokens
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise bad_request("tokens: must be a list of token ids.", "tokens", "invalid_type")
    limits.check_token_ids(tokens, "tokens")
    text = limits.tokenizer.decode(tokens, skip_special_tokens=False)
    return responses.encode(responses.Detokenized(text))


def _token_strs(tokens: list[int], tokenizer: Tokenizer) -> list[str]:
    if len(tokens) > MAX_TOKENS:
        message = (
            f"return_token_strs: the text has {len(tokens)} tokens, at most {MAX_TOKENS} are told as text."
        )
        raise bad_request(message, "return_token_strs")
    return [tokenizer.token_text(token) for token in tokens]


def _too_long(field: str) -> ApiError:
    return bad_request(f"{field}: longer than the {MAX_TEXT_BYTES} bytes that are tokenised.", field)
