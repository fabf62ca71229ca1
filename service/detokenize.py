"""From token ids to text, a step at a time: whole characters, nothing that may become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from engine.token_bytes import TokenBytes


class Detokenizer:
    """Incremental decoding: bytes of an unfinished character wait for the rest.

    Since the text is the UTF-8 decoding of the concatenated token bytes, it does not depend on how the ids
    are grouped. A byte that belongs to no character becomes U+FFFD, and so does what is left at the end.
    """

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._table = token_bytes.table
        self._skip = token_bytes.special if skip_special_tokens else frozenset[int]()
        self._drop_space = token_bytes.separated
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters completed by ``token_ids``."""
        table, skip, size = self._table, self._skip, len(self._table)
        data = b"".join([table[i] for i in token_ids if i not in skip and i < size])
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decode(data)

    def finish(self) -> str:
        """U+FFFD if the text ended inside a character, else nothing."""
        return self._decode(b"", True)


class StopMatcher:
    """Finds the first stop string to be completed, and holds back exactly what could still become one.

    Of several matches the one that ends first wins, and of those the one that begins first; so the result
    is what reading the text one character at a time gives, however it is grouped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """
        Args:
            stops: Non-empty strings.
            include: Keep the stop string itself in the text.
        """
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that can be released now; ``matched`` is set when a stop string was completed.

        Nothing may be pushed after a match.

        Args:
            text: The next characters.
            armed: Whether a stop string that is completed by ``text`` counts.
        """
        before = len(self._held)
        text = self._held + text
        if armed and (found := self._find(text, before)) is not None:
            start, end, self.matched = found
            self._held = ""
            return text[: end if self._include else start]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _find(self, text: str, before: int) -> tuple[int, int, str] | None:
        """The first match that ends after ``text[:before]`` (earlier ones were seen already)."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if best is None or (end, start) < (best[1], best[0]):
                    best = (start, end, stop)
        return best

    def finish(self) -> str:
        """What was held back: nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


class Piece(NamedTuple):
    """What some tokens gave."""

    text: str
    """Characters to release."""
    num_tokens: int
    """How many of the tokens are kept: all, or those up to the one that completed a stop string."""
    offsets: list[int] | None
    """Where each kept token's text begins, in characters of the whole output; only if asked for."""


class ChoiceText:
    """The text of one choice: detokenising, stop strings, and where each token begins.

    A token is kept, and counted, up to and including the one whose bytes complete a stop string. A stop
    string counts only if it is completed after the first ``min_tokens`` tokens.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        offset: int | None = None,
    ) -> None:
        """
        Args:
            token_bytes: The tokenizer's table.
            stops: Stop strings.
            include_stop: Keep the stop string, or the stopping token's text, in the text.
            skip_special_tokens: Leave special tokens out of the text.
            min_tokens: See above.
            offset: Characters before the first token, if ``Piece.offsets`` is wanted.
        """
        self._detokenizer = Detokenizer(token_bytes, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None
        self._include_stop = include_stop
        self._unarmed = min_tokens
        self._offset = offset

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.matched if self._matcher is not None else None

    def push(self, token_ids: Sequence[int], *, stopped: bool, final: bool) -> Piece:
        """Take the next tokens.

        Args:
            token_ids: The ids of one delta.
            stopped: The last id stopped the request: its text is left out unless ``include_stop``.
            final: No token follows.
        """
        silent = stopped and not self._include_stop
        shown = token_ids[:-1] if silent else token_ids
        if self._matcher is None and self._offset is None:
            text = self._detokenizer.push(shown)
            return Piece(text + self._detokenizer.finish() if final else text, len(token_ids), None)
        parts: list[str] = []
        offsets: list[int] = []
        for i, token_id in enumerate(shown):
            parts.append(self._push_one(token_id, offsets))
            if self.matched_stop is not None:
                return Piece("".join(parts), i + 1, self._kept(offsets))
        if silent:
            offsets.append(self._offset or 0)
        if final:
            parts.append(self._finish())
        return Piece("".join(parts), len(token_ids), self._kept(offsets))

    def _push_one(self, token_id: int, offsets: list[int]) -> str:
        text = self._detokenizer.push((token_id,))
        if self._offset is not None:
            offsets.append(self._offset)
            self._offset += len(text)
        armed = self._unarmed <= 0
        self._unarmed -= 1
        return text if self._matcher is None else self._matcher.push(text, armed=armed)

    def _finish(self) -> str:
        text = self._detokenizer.finish()
        if self._matcher is None:
            return text
        released = self._matcher.push(text, armed=False) if text else ""
        return released + self._matcher.finish()

    def _kept(self, offsets: list[int]) -> list[int] | None:
        return None if self._offset is None else offsets
