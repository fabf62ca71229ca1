"""When requests step alone after a fault: one at a time, and seldom enough for the others not to notice."""

from __future__ import annotations

from typing import Final

from engine.sequence import Sequence

TURN_EVERY: Final = 8
"""Iterations from one turn to the next while other requests step. An eager step of one row takes several times as
long as a replay of all: more often, it would be most of what the engine does."""


class Turns:
    """Holds back every request that must step alone, but for the one whose turn it is.

    So an iteration lasts no longer when many requests trip at once than when one does, and whoever watches the
    engine's loop sees it go on.
    """

    def __init__(self) -> None:
        self._members: dict[Sequence, None] = {}
        """In order of their turns."""
        self._pause = 0

    def join(self, row: Sequence) -> None:
        """From now on ``row`` steps in its turns only; if it does already, it is the last in line again."""
        self._members.pop(row, None)
        self._members[row] = None
        row.held = True

    def leave(self, row: Sequence) -> None:
        """``row`` steps with the others again."""
        self._members.pop(row, None)
        row.held = False

    def take(self) -> Sequence | None:
        """The request that may step alone now: the first in line that is prefilled, if a turn is due.

        Call it once an iteration, before that is planned.
        """
        self._pause = max(0, self._pause - 1)
        if not self._members:
            return None
        self._members = {row: None for row in self._members if not row.finished}
        ready = (row for row in self._members if row.slot is not None and not row.left_to_prefill)
        chosen = None if self._pause else next(ready, None)
        for row in self._members:
            row.held = row is not chosen
        return chosen

    def planned(self, *, taken: bool, others: bool) -> None:
        """What this iteration's plan has: a step alone, and rows of other requests."""
        if not others:
            self._pause = 0
        elif taken:
            self._pause = TURN_EVERY
