"""What a chat model's text is made of: reasoning, content and tool calls, told apart as the text comes.

The marks are those of DeepSeek's models. Reasoning stands between ``<think>`` and ``</think>``; the chat
template may have written the opening mark itself. Tool calls, in the form of V3 and R1::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    ARGUMENTS
    ```<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>

and in that of V3.1, where a call is ``NAME<｜tool▁sep｜>ARGUMENTS``. Nothing but marks, the white space around
calls and the fences is left out, and the result does not depend on how the text is cut into pieces.
"""  # noqa: RUF002  (the bars of the marks are full-width)

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

THINK, THINK_END = "<think>", "</think>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
REASONING_MARKS = (THINK, THINK_END)
TOOL_MARKS = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)

_FENCE, _FENCE_END = "```json", "```"
_V3_KIND = "function"


ParserChoice = Literal["auto", "deepseek", "none"]


class ChatMarks(NamedTuple):
    """Which marks are looked for in the chat answers of the served model."""

    reasoning: bool
    tools: bool

    @classmethod
    def choose(
        cls, reasoning: ParserChoice, tools: ParserChoice, has_token: Callable[[str], bool]
    ) -> ChatMarks:
        """Resolve the options: ``auto`` is on if each mark is a token of the model."""

        def wanted(choice: ParserChoice, marks: tuple[str, ...]) -> bool:
            return choice == "deepseek" or (choice == "auto" and all(map(has_token, marks)))

        return cls(wanted(reasoning, REASONING_MARKS), wanted(tools, TOOL_MARKS))

    def for_prompt(self, prompt: str, *, with_tools: bool) -> Callable[[], ChatOutput] | None:
        """What makes the `ChatOutput` of each choice; ``None`` if there is nothing to look for.

        Args:
            prompt: What the chat template wrote.
            with_tools: Tools were offered to the model.
        """
        tools = self.tools and with_tools
        if not (self.reasoning or tools):
            return None
        thinking = prompt.rstrip().endswith(THINK)
        return partial(ChatOutput, reasoning=self.reasoning, tools=tools, thinking=thinking)


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """A tool call begins, the ``call``-th of the choice (from 0)."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of that call: JSON, if the model wrote it well."""

    call: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments


class ChatOutput:
    """Takes a choice's text piece by piece. Push, then ``finish`` once."""

    def __init__(self, *, reasoning: bool, tools: bool, thinking: bool = False) -> None:
        """
        Args:
            reasoning: Look for reasoning.
            tools: Look for tool calls.
            thinking: The prompt ended with the opening mark of the reasoning.
        """
        self.num_calls = 0
        self._tools = tools
        self._buffer = ""
        self._parts: list[Part] = []
        self._fenced = False
        self._state: Callable[[], bool] = self._content
        if reasoning:
            self._state = self._thinking if thinking else self._opening

    def push(self, text: str) -> list[Part]:
        """The parts that ``text`` completes."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """What was held back, as what it was taken for so far; a call without a name is content."""
        state, text, self._buffer = self._state, self._buffer, ""
        if state == self._thinking:
            self._emit(Reasoning(text))
        elif state == self._arguments:
            self._emit_arguments(text)
        elif state == self._header:
            self._emit(Content(CALL + text))
        elif state in (self._opening, self._content):
            self._emit(Content(text))
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _emit(self, part: Reasoning | Content | CallArguments) -> None:
        if part.text:
            self._parts.append(part)

    # Each state looks at the buffer and says whether there is more to do with it.

    def _opening(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer = text.removeprefix(THINK)
            self._state = self._thinking
            return True
        if THINK.startswith(text):
            return False
        self._state = self._content
        return True

    def _thinking(self) -> bool:
        text, found = self._until(THINK_END)
        self._emit(Reasoning(text))
        if found:
            self._state = self._content
        return found

    def _content(self) -> bool:
        if not self._tools:
            self._emit(Content(self._buffer))
            self._buffer = ""
            return False
        text, found = self._until(CALLS)
        self._emit(Content(text))
        if found:
            self._state = self._between
        return found

    def _between(self) -> bool:
        self._buffer = text = self._buffer.lstrip()
        if text.startswith(CALL):
            self._buffer = text.removeprefix(CALL)
            self._state = self._header
            return True
        if text.startswith(CALLS_END):
            self._buffer = text.removeprefix(CALLS_END)
            self._state = self._content
            return True
        if CALL.startswith(text) or CALLS_END.startswith(text):
            return False
        self._state = self._content
        return True

    def _header(self) -> bool:
        """The name of a call; V3's has a kind before the separator and the name on the line after it."""
        head, mark, rest = self._buffer.partition(SEPARATOR)
        if not mark or not rest.strip():
            return False
        name = head.strip()
        self._fenced = name == _V3_KIND and not rest.lstrip().startswith("{")
        if self._fenced:
            opened = _after_fence(rest)
            if opened is None:
                return False
            name, rest = opened
        self._buffer = rest
        self._parts.append(CallStart(self.num_calls, name))
        self.num_calls += 1
        self._state = self._arguments_opening
        return True

    def _arguments_opening(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._arguments
        return bool(self._buffer)

    def _arguments(self) -> bool:
        end = self._buffer.find(CALL_END)
        if end >= 0:
            text, self._buffer = self._buffer[:end], self._buffer[end + len(CALL_END) :]
            self._emit_arguments(text)
            self._state = self._between
            return True
        # White space and a fence before the mark are no part of the arguments.
        shown = self._buffer[: len(self._buffer) - overlap(self._buffer, CALL_END)].rstrip("` \t\r\n")
        self._buffer = self._buffer[len(shown) :]
        self._emit(CallArguments(self.num_calls - 1, shown))
        return False

    def _emit_arguments(self, text: str) -> None:
        text = text.rstrip()
        if self._fenced:
            text = text.removesuffix(_FENCE_END).rstrip()
        self._emit(CallArguments(self.num_calls - 1, text))

    def _until(self, mark: str) -> tuple[str, bool]:
        """The text before ``mark``, without what could still become it; and whether it was found."""
        text, found, rest = self._buffer.partition(mark)
        if found:
            self._buffer = rest
            return text, True
        held = overlap(text, mark)
        self._buffer = text[len(text) - held :]
        return text[: len(text) - held], False


def _after_fence(text: str) -> tuple[str, str] | None:
    """Name and arguments of V3's ``NAME``, line end, fence, arguments; ``None`` if more is needed to tell."""
    name, line_end, rest = text.lstrip().partition("\n")
    body = rest.lstrip()
    if not line_end or _FENCE.startswith(body):
        return None
    return name.strip(), body.removeprefix(_FENCE)


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``mark``, but not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
