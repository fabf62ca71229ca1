"""Request bodies: every field that is honoured, its type and its bounds. Everything else is refused by name.

Bounds that depend on the model (vocabulary, context length) are checked in ``service/prompts.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, SkipValidation, ValidationError
from pydantic_core import ErrorDetails

from engine.types import GrammarSpec
from service.errors import ApiError, bad_request
from service.messages import Conversation
from service.schema_fields import SHOWN, Body, bounded, missing, stop_list, token_id_keys
from service.structured import ResponseFormat, StructuredOutputs
from service.unsupported import drop_neutral

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_SCORES = 1 << 18
"""Most log-probabilities of prompt tokens in an answer, each token's own included, and as many of generated ones:
some 17 MB."""
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
DEFAULT_COMPLETION_TOKENS = 16

_INT32 = 2**31
_INT64 = 2**63


class StreamOptions(Body):
    """What a stream tells besides the deltas."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class GenerationBody(Body):
    """Fields that both generating endpoints share."""

    model: str | None = Field(None, description="A served name; absent means the served model.")
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="Same as max_tokens.")
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[str | list[str], SkipValidation, BeforeValidator(stop_list)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], bounded(MAX_STOP_TOKEN_IDS)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=_INT32, description="-1 and 0 are off.")] = 0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = 1.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]],
        AfterValidator(token_id_keys),
        bounded(MAX_LOGIT_BIAS),
    ] = Field(default_factory=dict, description="Token id (as text) to a number that is added to its logit.")
    user: str | None = Field(None, description="Accepted; changes nothing.")
    priority: Annotated[int, Field(ge=-_INT32, lt=_INT32, description="Lower is served first.")] = 0
    return_token_ids: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @cached_property
    def grammar(self) -> GrammarSpec | None:
        """What the output must match."""
        if self.structured_outputs is not None:
            return self.structured_outputs.grammar("structured_outputs")
        return None if self.response_format is None else self.response_format.grammar("response_format")

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Top alternatives wanted for each prompt token; ``None``: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def scores_per_token(self) -> int:
        """Log-probabilities wanted for each generated token, its own included."""
        return 0 if self.num_logprobs is None else 1 + self.num_logprobs

    @property
    def token_limit(self) -> int | None:
        """The explicit limit of tokens to generate."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Top alternatives wanted for each token; ``None``: no log-probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether each choice's text begins with its prompt."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true.", "stream_options")
        if self.token_limit == 0 and self.prompt_logprobs is None and not self.echoes:
            field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise bad_request(f"{field}: 0 needs echo or prompt_logprobs.", field)
        if self.max_tokens is not None and self.max_tokens != self.token_limit:
            raise bad_request("max_tokens and max_completion_tokens differ.", "max_tokens")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise bad_request("min_tokens is larger than the limit of tokens to generate.", "min_tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs cannot be streamed.", "prompt_logprobs")
        self._check_grammar()

    def _check_grammar(self) -> None:
        if self.response_format is not None and self.structured_outputs is not None:
            raise bad_request(
                "response_format and structured_outputs exclude each other.", "structured_outputs"
            )
        if self.grammar is not None and self.min_tokens:
            raise bad_request("min_tokens cannot be combined with structured output.", "min_tokens")


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], SkipValidation]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def num_prompt_logprobs(self) -> int | None:
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)


class ChatBody(GenerationBody, Conversation):
    """Body of ``POST /v1/chat/completions``."""

    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        if self.offered_tools and self.grammar is not None:
            raise bad_request("tools cannot be combined with structured output.", "tools")


class TokenizeBody(Body):
    """Body of ``POST /tokenize`` for a text, as vLLM's."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(Conversation):
    """Body of ``POST /tokenize`` for a conversation, as vLLM's."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``, as vLLM's."""

    model: str | None = None
    tokens: Annotated[list[int], SkipValidation]


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], value: Mapping[str, Any]) -> AnyBody:
    """Validate a decoded JSON object.

    Raises:
        ApiError: 400 that names the first field at fault.
    """
    supported = drop_neutral(value, kind.model_fields.keys())
    try:
        body = kind.model_validate(supported)
    except ValidationError as exc:
        raise _to_api_error(exc.errors(include_url=False, include_input=False)[0]) from None
    body.check()
    return body


def _to_api_error(error: ErrorDetails) -> ApiError:
    param = _param(error["loc"])
    kind = error["type"]
    if kind == "extra_forbidden":
        return bad_request(f"Unknown field: {param}.", param, "unknown_parameter")
    if kind == "missing":
        return missing(param)
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    if kind == "unsupported_parameter":
        code = kind
    return bad_request(f"{param}: {error['msg']}.", param, code)


def _param(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``; keys of free-form objects are left out."""
    if loc[0] in ("logit_bias", "chat_template_kwargs", "tool_choice"):
        loc = loc[:1]
    if loc[0] in ("response_format", "structured_outputs"):
        loc = loc[:2]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:SHOWN]}" for part in loc)
    return text.removeprefix(".")
