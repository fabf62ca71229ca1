"""Request bodies: every field that is honoured, its type and its bounds. Everything else is refused by name.

Bounds that depend on the model (vocabulary, context length) are checked in ``service/prompts.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from service.chat_template import RESERVED
from service.errors import ApiError, bad_request
from service.unsupported import drop_neutral

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024
DEFAULT_COMPLETION_TOKENS = 16

_INT32 = 2**31
_INT64 = 2**63
_SHOWN = 100
"""Most characters of a client's own text in an error message."""


def _invalid(message: str, kind: Literal["invalid_value", "invalid_type"] = "invalid_value") -> NoReturn:
    raise PydanticCustomError(kind, "{reason}", {"reason": message})


def _stop_list(value: object) -> list[str]:
    """``stop`` as a list, its length checked before its items are looked at."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        _invalid("Input should be a string or a list of strings", "invalid_type")
    if len(stops) > MAX_STOPS:
        _invalid(f"At most {MAX_STOPS} stop strings are possible")
    for stop in stops:
        if not isinstance(stop, str):
            _invalid("Every stop must be a string", "invalid_type")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            _invalid(f"A stop string must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _bounded(limit: int) -> BeforeValidator:
    """Refuse a container before its items are validated, so that a huge one costs nothing."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            _invalid(f"At most {limit} entries are possible")
        return value

    return BeforeValidator(check)


def _token_id_keys(value: dict[str, float]) -> dict[str, float]:
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            _invalid(f"Keys must be token ids, not {key[:_SHOWN]!r}")
    return value


def _free_of_reserved(value: dict[str, Any]) -> dict[str, Any]:
    for key in sorted(RESERVED & value.keys()):
        _invalid(f"{key} cannot be set")
    return value


def _content_text(value: object) -> str:
    """Message content as text: a string, or text parts, which are joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _invalid("Content should be a string or a list of text parts", "invalid_type")
    if len(value) > MAX_PARTS:
        _invalid(f"At most {MAX_PARTS} parts are possible")
    texts = [part.get("text") if isinstance(part, dict) else None for part in value]
    for part, text in zip(value, texts, strict=True):
        if not isinstance(text, str) or part.keys() != {"type", "text"} or part["type"] != "text":
            _invalid('Only parts {"type": "text", "text": "..."} are supported')
    return "\n".join(text for text in texts if text is not None)


class Body(BaseModel):
    """Strict types, no unknown fields, and an explicit null is the same as an absent field."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


class StreamOptions(Body):
    """What a stream tells besides the deltas."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class GenerationBody(Body):
    """Fields that both generating endpoints share."""

    model: str | None = Field(None, description="A served name; absent means the served model.")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="Same as max_tokens.")
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[str | list[str], SkipValidation, BeforeValidator(_stop_list)] = []
    stop_token_ids: Annotated[list[int], _bounded(MAX_STOP_TOKEN_IDS)] = []
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
        AfterValidator(_token_id_keys),
        _bounded(MAX_LOGIT_BIAS),
        Field(description="Token id (as text) to a number that is added to its logit."),
    ] = {}
    user: str | None = Field(None, description="Accepted; changes nothing.")
    priority: Annotated[int, Field(ge=-_INT32, lt=_INT32, description="Lower is served first.")] = 0
    return_token_ids: bool = False

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
        """Refuse fields that contradict each other. Raises ``ApiError``."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true.", "stream_options")
        if self.max_tokens is not None and self.max_tokens != self.token_limit:
            raise bad_request("max_tokens and max_completion_tokens differ.", "max_tokens")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise bad_request("min_tokens is larger than the limit of tokens to generate.", "min_tokens")


AnyBody = TypeVar("AnyBody", bound=GenerationBody)


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

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            raise bad_request("echo with logprobs is not supported.", "echo", "unsupported_parameter")


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[dict[str, str]], SkipValidation, BeforeValidator(_content_text)]
    name: str | None = None

    def as_variables(self) -> dict[str, str]:
        """The message as the chat template sees it; templates know ``developer`` as ``system``."""
        assert isinstance(self.content, str), "content is text once validated"
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **named}


class ChatBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1), _bounded(MAX_MESSAGES)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    add_special_tokens: bool = Field(False, description="Templates write the special tokens themselves.")
    add_generation_prompt: bool = True
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_free_of_reserved), _bounded(64)] = {}

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")


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
        return bad_request(f"Missing required field: {param}.", param, "missing_required_parameter")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return bad_request(f"{param}: {error['msg']}.", param, code)


def _param(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``; keys of free-form objects are left out."""
    if loc[0] in ("logit_bias", "chat_template_kwargs"):
        loc = loc[:1]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:_SHOWN]}" for part in loc)
    return text.removeprefix(".")
