"""Follows one output through its grammar and says what may come next. Runs in the walking process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xgrammar
from numpy.typing import NDArray


class Matcher:
    """The place of one output in its grammar.

    Args:
        compiled: For a vocabulary of ``vocab_size`` ids and one more, the end (``job.vocabulary``).
        silent_ids: Ids without text.
        stop_ids: The request's; the silent ones among them may follow a complete match.
    """

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        vocab_size: int,
        silent_ids: frozenset[int],
        stop_ids: Iterable[int],
    ) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._silent_ids = silent_ids
        self._end_bits = _bits(silent_ids.intersection(stop_ids), vocab_size + 1)
        self._vocabulary = _bits(range(vocab_size), vocab_size + 1)
        self._end = _bits([vocab_size], vocab_size + 1)
        self._words = np.zeros((1, self._end.size), dtype=np.int32)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consume tokens that were kept, all of them allowed before."""
        for token in token_ids:
            accepted = self._accept(token)
            assert accepted, f"token {token} was kept against the grammar"

    def fill(self, drafts: Sequence[int], out: NDArray[np.int32]) -> tuple[int | None, bool]:
        """Write what each position of the next step may choose.

        Positions that cannot be reached, behind a draft that the grammar refuses or behind the end, are left as
        they are, and so is the position where nothing can follow.

        Args:
            drafts: The drafts that the step verifies: at most W - 1.
            out: ``[W, ceil(V / 32)]``, all ones.

        Returns:
            The position where nothing can follow, if it was reached, and whether the output matches there.
        """
        walked = 0
        end: int | None = None
        complete = False
        for position in range(len(drafts) + 1):
            if not self._find_allowed():
                end, complete = position, self._matcher.is_completed()
                break
            out[position] = self._words[0, : out.shape[1]]
            if position == len(drafts) or not self._accept(drafts[position]):
                break
            walked += 1
        if walked:
            self._matcher.rollback(walked)
        return end, complete

    def _accept(self, token: int) -> bool:
        # The library refuses silent ids too, but with a line in the log
        return token not in self._silent_ids and self._matcher.accept_token(token)

    def _find_allowed(self) -> bool:
        """Put the tokens that may come next into ``_words``; False if there are none."""
        if not self._matcher.fill_next_token_bitmask(self._words):
            self._words.fill(-1)  # everything may follow, and then nothing was written
        may_end = bool((self._words & self._end).any())
        self._words &= self._vocabulary
        if may_end:
            self._words |= self._end_bits
        return bool(self._words.any())


def _bits(ids: Iterable[int], size: int) -> NDArray[np.int32]:
    """A mask of ``size`` bits, in whole words, with those of ``ids`` set."""
    flags = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
