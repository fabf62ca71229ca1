"""Parts of a chat request: messages and tools, as they come and as the chat template sees them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SkipValidation

from service.chat_template import RESERVED
from service.errors import bad_request
from service.schema_fields import Body, bounded, invalid, missing

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_ALL_PARTS = 8192
MAX_ALL_TOOL_CALLS = 2048
"""Most parts and tool calls of all messages: each is validated and rendered by itself."""
MAX_TOOLS = 128


def _content_text(value: object) -> str:
    """Message content as text: a string, or text parts, which are joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        invalid("Content should be a string or a list of text parts", "invalid_type")
    if len(value) > MAX_PARTS:
        invalid(f"At most {MAX_PARTS} parts are possible")
    texts = [part.get("text") if isinstance(part, dict) else None for part in value]
    for part, text in zip(value, texts, strict=True):
        given = {key for key, item in part.items() if item is not None} if isinstance(text, str) else None
        if given != {"type", "text"} or part["type"] != "text":
            invalid('Only parts {"type": "text", "text": "..."} are supported')
    return "\n".join(text for text in texts if text is not None)


def _bounded_in_all(value: object) -> object:
    """Refuse a conversation of very many parts or tool calls before any of them is validated."""
    if not isinstance(value, list):
        return value
    for field, limit, what in (
        ("content", MAX_ALL_PARTS, "content parts"),
        ("tool_calls", MAX_ALL_TOOL_CALLS, "tool calls"),
    ):
        given = (message.get(field) for message in value if isinstance(message, dict))
        if sum(len(entries) for entries in given if isinstance(entries, list)) > limit:
            invalid(f"At most {limit} {what} are possible in all messages")
    return value


def _only_null(value: object) -> object:
    if value is not None:
        invalid("It is not supported", "unsupported_parameter")
    return value


def _only_empty(value: object) -> object:
    return _only_null(None if value == [] else value)


_Null = Annotated[None, BeforeValidator(_only_null)]
"""A field of OpenAI's answers, which come back as history, that is off."""


class CalledFunction(Body):
    """The function of a tool call, as the model called it."""

    name: str
    arguments: str


class MessageToolCall(Body):
    """A tool call that the model made in an earlier turn."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = Field(None, exclude=True, description="Of a streamed answer: the call's place.")


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[dict[str, str]], SkipValidation, BeforeValidator(_content_text)] | None = (
        None
    )
    name: str | None = None
    reasoning_content: str | None = Field(None, description="Of an assistant's turn; for the template.")
    tool_calls: Annotated[list[MessageToolCall], bounded(MAX_TOOLS)] = Field(default_factory=list)
    tool_call_id: str | None = Field(None, description="Of a tool's turn: the call that it answers.")
    refusal: _Null = None
    audio: _Null = None
    function_call: _Null = None
    annotations: Annotated[None, BeforeValidator(_only_empty)] = Field(None, description="Empty, or absent.")

    def check_role(self, param: str) -> None:
        """Refuse what the role cannot have, or needs and has not. Raises ``ApiError``."""
        if self.content is None and not self.tool_calls:
            raise missing(f"{param}.content")
        for place, call in enumerate(self.tool_calls):
            if call.index not in (None, place):
                field = f"{param}.tool_calls[{place}].index"
                raise bad_request(f"{field}: must be the call's place, {place}.", field)
        for field in ("tool_calls", "reasoning_content"):
            if getattr(self, field) and self.role != "assistant":
                raise bad_request(f"{param}.{field}: only an assistant's message has it.", f"{param}.{field}")
        if (self.tool_call_id is None) == (self.role == "tool"):
            if self.role == "tool":
                raise missing(f"{param}.tool_call_id")
            raise bad_request(f"{param}.tool_call_id: only a tool's message has it.", f"{param}.tool_call_id")

    @property
    def num_chars(self) -> int:
        """Characters of all its texts, those of tool calls included."""
        texts = [self.content, self.name, self.reasoning_content, self.tool_call_id]
        for call in self.tool_calls:
            texts += [call.id, call.function.name, call.function.arguments]
        return sum(len(text) for text in texts if text is not None)

    def as_variables(self) -> dict[str, Any]:
        """The message as the chat template sees it; templates know ``developer`` as ``system``."""
        given = self.model_dump(exclude_defaults=True)
        return {**given, "role": "system" if self.role == "developer" else self.role, "content": self.content}


class Function(Body):
    """What a tool is called by, and with what."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] = False


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    def as_variables(self) -> dict[str, Any]:
        """The tool as the chat template sees it."""
        return self.model_dump(exclude_unset=True)


def _free_of_reserved(value: dict[str, Any]) -> dict[str, Any]:
    for key in sorted(RESERVED & value.keys()):
        invalid(f"{key} cannot be set")
    return value


def _known_choice(value: object) -> object:
    if value == "required" or isinstance(value, dict):
        # A model can only be made to call by a grammar for its call format.
        invalid("Only none and auto are supported", "unsupported_parameter")
    return value


class Conversation(Body):
    """What the chat template makes a prompt of."""

    messages: Annotated[
        list[Message], Field(min_length=1), BeforeValidator(_bounded_in_all), bounded(MAX_MESSAGES)
    ]
    tools: Annotated[list[Tool], bounded(MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[
        Literal["none", "auto"] | None,
        BeforeValidator(_known_choice),
        Field(description="Default: auto if there are tools."),
    ] = None
    add_special_tokens: bool = Field(False, description="Templates write the special tokens themselves.")
    add_generation_prompt: bool = True
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_free_of_reserved), bounded(64)] = Field(
        default_factory=dict
    )

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            message.check_role(f"messages[{index}]")
        if self.tool_choice == "auto" and not self.tools:
            raise bad_request("tool_choice: auto needs tools.", "tool_choice")

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools
