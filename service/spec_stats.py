"""Statistics of speculation for one HTTP request, over the steps whose tokens were kept."""

from __future__ import annotations

import msgspec


class SpeculativeDecoding(msgspec.Struct, frozen=True):
    """``metrics.speculative_decoding`` of a response, summed over its choices.

    The sum of the histogram is ``num_spec_steps``; the sum of ``j * acceptance_histogram[j]`` is
    ``num_accepted_draft_tokens``.
    """

    mean_acceptance_length: float
    """Tokens emitted per step: 1 + accepted / steps (1.0 without a step)."""
    draft_acceptance_rate: float
    """Accepted of the drafted tokens (0.0 without a draft)."""
    acceptance_histogram: list[int]
    """Steps by the number of accepted drafts, 0..K."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """K, the drafts of a full step."""

    def describe(self) -> str:
        """The numbers in a line for people."""
        return (
            f"accept length {self.mean_acceptance_length:.2f} of {self.num_spec_tokens + 1}: "
            f"{self.num_accepted_draft_tokens} of {self.num_draft_tokens} drafts accepted "
            f"in {self.num_spec_steps} steps; steps by accepted drafts: {self.acceptance_histogram}"
        )


class SpecStats:
    """Counts kept speculative steps."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._histogram = [0] * (num_speculative_tokens + 1)
        self._num_drafts = 0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """One kept step that verified ``num_drafts`` >= 1 drafts, of which ``num_accepted`` were emitted."""
        self._histogram[num_accepted] += 1
        self._num_drafts += num_drafts

    def merge(self, other: SpecStats) -> None:
        """Add the counts of another request at the same engine."""
        self._num_drafts += other._num_drafts
        for num_accepted, count in enumerate(other._histogram):
            self._histogram[num_accepted] += count

    def summary(self) -> SpeculativeDecoding | None:
        """The statistics so far; ``None`` for K = 0."""
        num_speculative_tokens = len(self._histogram) - 1
        if num_speculative_tokens == 0:
            return None
        steps = sum(self._histogram)
        accepted = sum(j * count for j, count in enumerate(self._histogram))
        return SpeculativeDecoding(
            mean_acceptance_length=1.0 + (accepted / steps if steps else 0.0),
            draft_acceptance_rate=accepted / self._num_drafts if self._num_drafts else 0.0,
            acceptance_histogram=list(self._histogram),
            num_spec_steps=steps,
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=self._num_drafts,
            num_spec_tokens=num_speculative_tokens,
        )
