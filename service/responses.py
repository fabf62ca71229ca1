"""Response bodies and stream chunks, in OpenAI's shapes; fields that vLLM adds are marked so.

Encoded by msgspec: a chunk costs about a microsecond. Optional fields are left out rather than null, except
where OpenAI's clients expect null.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from service.spec_stats import SpeculativeDecoding

Reason = Literal["stop", "length", "tool_calls"]
encode = msgspec.json.Encoder().encode


_Part = TypeVar("_Part")


def encoded(part: _Part) -> _Part:
    """``part`` as JSON, which `encode` copies. Encoding holds the GIL: by parts, a long answer does so shortly."""
    return cast(_Part, msgspec.Raw(encode(part)))


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""


class Usage(msgspec.Struct):
    """Token counts of a request. ``prompt_tokens`` counts each prompt once, whatever ``n``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timing(msgspec.Struct, frozen=True):
    """Where the time of a request went, in seconds; null where nothing was measured."""

    queue_time: float | None
    """From arrival until the last of its choices was first scheduled."""
    time_to_first_token: float | None
    """From arrival to the first token of any choice."""
    inter_token_latency: float | None
    """Mean over all tokens after the first of their choice."""
    e2e_latency: float | None
    """From arrival to the last token."""


class Metrics(msgspec.Struct):
    """As vLLM: ``speculative_decoding`` is null when the server does not speculate."""

    speculative_decoding: SpeculativeDecoding | None
    timing: Timing


class CompletionLogprobs(msgspec.Struct):
    """One entry a token in every list."""

    text_offset: list[int]
    """Where the token's text begins, in characters of the whole choice."""
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, which nothing comes before."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """As vLLM's: one token that could have been at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt: by token id, the token itself and the most probable ones; null for the first."""


class CompletionChoice(msgspec.Struct):
    """A choice of ``/v1/completions``, whole or a piece of a stream. The last three fields are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    num_accepted_tokens: int | UnsetType = UNSET
    """Eyas's own: how many of a chunk's ``token_ids``, always the first, were accepted drafts."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """vLLM's."""


class Completion(msgspec.Struct):
    """Response, or chunk, of ``/v1/completions``."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """``content`` is null where there are only tool calls; ``reasoning_content`` is DeepSeek's field."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """A choice of ``/v1/chat/completions``. The last two fields are vLLM's."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """Response of ``/v1/chat/completions``; the last two fields are vLLM's."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """A piece of tool call ``index``; the first one has its id and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """Chunk of a ``/v1/chat/completions`` stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Tokenized(msgspec.Struct):
    """Response of ``/tokenize``, as vLLM's."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """Response of ``/detokenize``, as vLLM's."""

    prompt: str


def component_schemas() -> dict[str, Any]:
    """JSON schemas of the response bodies and of what they hold, by name, for the OpenAPI document."""
    _, components = msgspec.json.schema_components(
        (Completion, ChatCompletion, Tokenized, Detokenized), ref_template="#/components/schemas/{name}"
    )
    return components
