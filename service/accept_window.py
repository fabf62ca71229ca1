"""The accept length of the recent past, for the gauge that people look at."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 60
"""Span of the window."""


class AcceptLengthWindow:
    """Mean accept length of the speculative steps of the last `WINDOW_SECONDS`, in one-second slots."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slots: deque[list[int]] = deque()  # [second, steps, accepted]

    def add(self, num_accepted: int) -> None:
        second = int(self._clock())
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append([second, 0, 0])
            self._drop_old(second)
        self._slots[-1][1] += 1
        self._slots[-1][2] += num_accepted

    def mean(self) -> float:
        """Emitted tokens per speculative step, 1..K+1; NaN without a step in the window."""
        self._drop_old(int(self._clock()))
        steps = sum(slot[1] for slot in self._slots)
        return 1.0 + sum(slot[2] for slot in self._slots) / steps if steps else float("nan")

    def _drop_old(self, now: int) -> None:
        while self._slots and self._slots[0][0] <= now - WINDOW_SECONDS:
            self._slots.popleft()
