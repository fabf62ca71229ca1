"""From a validated body to what the engine takes: prompts as ids, sampling parameters, model limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from engine.types import GREEDY_BELOW, EngineInfo, SamplingParams
from service.chat_template import ChatTemplateError
from service.errors import ApiError, bad_request
from service.messages import Conversation
from service.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    MAX_SCORES,
    CompletionBody,
    GenerationBody,
)
from service.text import Tokenizer

INLINE_CHARS = 8192
"""Longer texts are tokenised in a thread, so that the event loop keeps its pace."""
_ITEM_CHARS = 64
"""What a message or a tool call without any text costs, in characters."""

# One conversation at a time: a template is Python, and each thread more that runs it holds the event loop up longer
_TEMPLATES = ThreadPoolExecutor(1, "templates")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt, known to fit the model with at least one token to generate."""

    token_ids: list[int]
    text: str | None
    """The prompt as text where it was given so."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against: the engine's numbers, and the tokenizer's end of sequence."""

    info: EngineInfo
    tokenizer: Tokenizer

    @property
    def eos_token_ids(self) -> set[int]:
        """Every id that ends a sequence, of the checkpoint's configuration or its tokenizer."""
        eos = self.tokenizer.eos_token_id
        return {*self.info.eos_token_ids, *(() if eos is None else (eos,))}

    @property
    def max_tokens(self) -> int:
        """Longest prompt + output of a request."""
        return min(self.info.max_model_len, self.info.max_request_tokens)

    def check_prompt_length(self, num_tokens: int, param: str, *, at_least: bool = False) -> None:
        """Refuse a prompt that leaves no room for a token. Raises ``ApiError``."""
        if num_tokens >= self.max_tokens:
            count = f"at least {num_tokens}" if at_least else f"{num_tokens}"
            raise _too_long(f"{self._limit()}, but the prompt has {count} tokens.", param)

    def check_total(self, num_prompt: int, limit: int, param: str) -> None:
        """Refuse a limit of tokens to generate that cannot be reached. Raises ``ApiError``."""
        total = num_prompt + limit
        if total > self.max_tokens:
            asked = f"{total} tokens ({num_prompt} in the prompt, {limit} to generate)"
            raise _too_long(f"{self._limit()}, but the request asks for {asked}.", param)

    def check_token_ids(self, token_ids: list[int], param: str) -> None:
        """Refuse ids outside the vocabulary. Raises ``ApiError``."""
        vocab_size = self.info.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            raise bad_request(f"{param}: token ids must be in [0, {vocab_size}).", param)

    def _limit(self) -> str:
        if self.info.max_request_tokens < self.info.max_model_len:
            return f"The KV cache holds {self.info.max_request_tokens} tokens of a request"
        return f"The model's context length is {self.info.max_model_len} tokens"


def _too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param, "context_length_exceeded")


async def encode_completion(body: CompletionBody, limits: ModelLimits) -> list[EncodedPrompt]:
    """The prompts of a completion request, in order; one that is not valid refuses them all.

    Raises:
        ApiError: 400 naming ``prompt`` (or ``n``, for too many choices in all).
    """
    prompts = _prompt_list(body.prompt)
    if len(prompts) * body.n > MAX_CHOICES:
        param = "prompt" if len(prompts) > MAX_CHOICES else "n"
        raise bad_request(f"At most {MAX_CHOICES} choices (prompts times n) are possible.", param)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        token_ids = await _encode_texts(texts, limits, "prompt", add_special_tokens=body.add_special_tokens)
        encoded = [EncodedPrompt(ids, text) for ids, text in zip(token_ids, texts, strict=True)]
    else:
        ids_given = [prompt for prompt in prompts if isinstance(prompt, list)]
        encoded = [EncodedPrompt(_checked_ids(ids, limits), None) for ids in ids_given]
    for prompt in encoded:
        _check_length(prompt.token_ids, limits, "prompt")
    return encoded


async def encode_chat(body: Conversation, limits: ModelLimits) -> list[EncodedPrompt]:
    """The prompt of a conversation, as the checkpoint's chat template writes it.

    Raises:
        ApiError: 400 naming ``messages`` or ``tools``.
    """
    text = await run(lambda: render_chat(body, limits.tokenizer), _render_cost(body), _TEMPLATES)
    (token_ids,) = await _encode_texts([text], limits, "messages", add_special_tokens=body.add_special_tokens)
    _check_length(token_ids, limits, "messages")
    return [EncodedPrompt(token_ids, text)]


def render_chat(body: Conversation, tokenizer: Tokenizer) -> str:
    """The prompt's text. Raises ``ApiError`` as `encode_chat`."""
    messages = [message.as_variables() for message in body.messages]
    variables = dict(body.chat_template_kwargs)
    if tools := body.offered_tools:
        if tokenizer.chat_template.is_valid and not tokenizer.chat_template.takes_tools:
            message = "tools: the model's chat template has no place for them."
            raise bad_request(message, "tools", "unsupported_parameter")
        variables["tools"] = [tool.as_variables() for tool in tools]
    try:
        return tokenizer.render_chat(
            messages, add_generation_prompt=body.add_generation_prompt, variables=variables
        )
    except ChatTemplateError as exc:
        raise bad_request(str(exc), "messages", "chat_template_error") from exc


def _render_cost(body: Conversation) -> int:
    """Characters that `render_chat` goes through, about. Tools are not measured: they count as many."""
    if body.offered_tools:
        return INLINE_CHARS + 1
    items = sum(1 + len(message.tool_calls) for message in body.messages)
    return _ITEM_CHARS * items + sum(message.num_chars for message in body.messages)


def sampling_params(body: GenerationBody, num_prompt: int, limits: ModelLimits) -> SamplingParams:
    """The engine's parameters for a prompt of ``num_prompt`` tokens (without the seed of a later choice).

    Raises:
        ApiError: 400 naming the field.
    """
    bias = {int(key): float(value) for key, value in body.logit_bias.items()}
    limits.check_token_ids(list(bias), "logit_bias")
    limits.check_token_ids(body.stop_token_ids, "stop_token_ids")
    max_tokens = _max_tokens(body, num_prompt, limits)
    if body.min_tokens > max_tokens:
        raise bad_request(f"min_tokens is larger than the {max_tokens} tokens possible.", "min_tokens")
    stops = {*body.stop_token_ids, *(() if body.ignore_eos else limits.eos_token_ids)}
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=0.0 if body.temperature < GREEDY_BELOW else float(body.temperature),
        top_k=body.top_k if 0 < body.top_k < limits.info.vocab_size else 0,
        top_p=float(body.top_p),
        min_p=float(body.min_p),
        seed=body.seed,
        presence_penalty=float(body.presence_penalty),
        frequency_penalty=float(body.frequency_penalty),
        repetition_penalty=float(body.repetition_penalty),
        logit_bias=bias,
        stop_token_ids=tuple(sorted(stops)),
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        grammar=body.grammar,
    )


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of a prompt's ``choice``-th completion: the request's own for the first, then derived ones.

    The derivation is the output function of SplitMix64 (Steele et al., 2014) at ``seed + choice * gamma``.
    """
    if seed is None or choice == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + choice * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def _max_tokens(body: GenerationBody, num_prompt: int, limits: ModelLimits) -> int:
    room = limits.max_tokens - num_prompt
    if body.token_limit is not None:
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        limits.check_total(num_prompt, body.token_limit, param)
        return body.token_limit
    if isinstance(body, CompletionBody):
        return min(room, DEFAULT_COMPLETION_TOKENS)
    # Nobody asked for so many tokens: what bounds the answer's log-probabilities shortens it, and refuses nothing
    scores = body.n * body.scores_per_token
    return min(room, MAX_SCORES // scores) if scores else room


def _prompt_list(value: object) -> list[str] | list[list[int]]:
    """A prompt in any of its four forms as a list of prompts; ids are not looked at yet."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) for item in value):
            return value
        if type(value[0]) is int:
            return [value]
    elif value == []:
        raise bad_request("prompt: an empty list.", "prompt")
    raise bad_request(
        "prompt: must be a string, a list of strings, a list of token ids, or a list of those.",
        "prompt",
        "invalid_type",
    )


def _checked_ids(prompt: list[int], limits: ModelLimits) -> list[int]:
    limits.check_prompt_length(len(prompt), "prompt")  # before each id of a huge list is looked at
    if any(type(token_id) is not int for token_id in prompt):
        raise bad_request("prompt: token ids must be integers.", "prompt", "invalid_type")
    limits.check_token_ids(prompt, "prompt")
    return prompt


async def _encode_texts(
    texts: list[str], limits: ModelLimits, param: str, *, add_special_tokens: bool
) -> list[list[int]]:
    tokenizer = limits.tokenizer
    for text in texts:
        limits.check_prompt_length(tokenizer.min_tokens(text), param, at_least=True)

    def encode() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return await run(encode, sum(map(len, texts)))


async def run(work: Callable[[], _Result], num_chars: int, pool: ThreadPoolExecutor | None = None) -> _Result:
    """``work()`` on ``num_chars`` characters: if that takes long in a thread, one of ``pool`` if it is given."""
    if num_chars <= INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _check_length(token_ids: list[int], limits: ModelLimits, param: str) -> None:
    if not token_ids:
        raise bad_request("The prompt is empty: it has no token.", param)
    limits.check_prompt_length(len(token_ids), param)
    # A tokenizer may know more ids than the model has embeddings.
    limits.check_token_ids(token_ids, param)
