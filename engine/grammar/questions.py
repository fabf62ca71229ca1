"""What the engine asks the walking process."""

from __future__ import annotations

from typing import NamedTuple


class Opening(NamedTuple):
    """A request that this process does not know yet."""

    grammar: str
    """Serialised by the library."""
    stop_ids: tuple[int, ...]


class Question(NamedTuple):
    """What one row may choose in the next step."""

    request: int
    opening: Opening | None
    token_ids: list[int]
    """Tokens kept since the last question."""
    drafts: list[int]
    stride: int
    ended: list[int]
    """Requests to forget."""
    seconds: float
    """Most processor time that the answer may take."""


class Answer(NamedTuple):
    """What a ``Question`` has for an answer."""

    end: int | None
    is_complete: bool
    """Both as ``Matcher.fill`` returns them."""
    mask: bytes
    """``[stride, ceil(V / 32)]`` of int32."""
    seconds: float
    """Processor time that it took, reading the grammar aside."""
