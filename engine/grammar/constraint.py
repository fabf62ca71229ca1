"""What a request with a grammar may choose next: the matcher walks the output on the host, ahead of each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import xgrammar


class Constraint:
    """One request's place in its grammar. It has consumed the tokens that the request kept, and no others.

    Args:
        matcher: Over a vocabulary of ``vocab_size`` ids and one more, the end (``job.vocabulary``).
        silent_ids: Ids without text.
        stop_ids: The request's; the silent ones among them may follow a complete match.
    """

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        vocab_size: int,
        silent_ids: frozenset[int],
        stop_ids: Iterable[int],
    ) -> None:
        self._matcher = matcher
        self._silent_ids = silent_ids
        self._end_ids = silent_ids.intersection(stop_ids)
        self._end_bits = _bits(self._end_ids, vocab_size + 1)
        self._vocabulary = _bits(range(vocab_size), vocab_size + 1)
        self._end = _bits([vocab_size], vocab_size + 1)
        self._words = np.zeros((1, self._end.size), dtype=np.int32)

    def keep(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """Consume emitted tokens, without an id that stopped the request.

        Returns:
            How many of them belong to the output (fewer only after its end), and whether it ends there, since
            nothing can follow.
        """
        for index, token in enumerate(token_ids):
            if not self._accept(token):
                return index, True
        return len(token_ids), not self._find_allowed()

    @property
    def is_complete(self) -> bool:
        """Whether the output so far matches the grammar."""
        return self._matcher.is_completed()

    def fill(self, drafts: Sequence[int], out: NDArray[np.int32]) -> None:
        """Write what each position of the next step may choose.

        Positions that cannot be reached, behind a draft that the grammar refuses or behind the end, are left as
        they are, and so is a position where nothing can follow: its token is cut off by ``keep``.

        Args:
            drafts: The drafts that the step verifies: at most W - 1.
            out: ``[W, ceil(V / 32)]``, all ones.
        """
        walked = 0
        for position in range(len(drafts) + 1):
            if not self._find_allowed():
                break
            out[position] = self._words[0, : out.shape[1]]
            if position == len(drafts) or not self._accept(drafts[position]):
                break
            walked += 1
        if walked:
            self._matcher.rollback(walked)

    def _accept(self, token: int) -> bool:
        # The matcher refuses silent ids too, but with a line in the log
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
