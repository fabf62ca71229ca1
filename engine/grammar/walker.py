"""What requests with a grammar may choose next: asked of a process that is ended when it takes too long."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from engine.grammar import children
from engine.grammar.questions import Opening, Question

WALK_SECONDS = 1.0
"""Longest time that one request's grammar may take in one step."""


class Constraint:
    """One request's grammar, and where the last step's tokens can end it.

    Args:
        grammar: Serialised.
        stop_ids: The request's.
    """

    def __init__(self, grammar: str, stop_ids: tuple[int, ...]) -> None:
        self.opening = Opening(grammar, stop_ids)
        self.end: int | None = None
        """Position of the last step where nothing can follow."""
        self.is_complete = False
        """Whether the output matches there."""

    def keep(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """How many of a step's tokens belong to the output, and whether it ends before the others."""
        if self.end is None or len(token_ids) <= self.end:
            return len(token_ids), False
        return self.end, True


class GrammarWalker:
    """Walks the grammars of all requests in one process, which is replaced when a grammar makes it fail.

    Args:
        table: The text of each id, empty where no grammar can match it.
        time_limit: Most seconds of one row in one step.
    """

    def __init__(self, table: list[bytes], time_limit: float = WALK_SECONDS) -> None:
        self._table = table
        self._time_limit = time_limit
        self._child: children.Child | None = None
        self._names = count()
        self._known: weakref.WeakKeyDictionary[Constraint, tuple[int, int]] = weakref.WeakKeyDictionary()
        """Name in the process, and tokens that it was told of."""
        self._ended: list[int] = []

    def walk(
        self, constraint: Constraint, output: Sequence[int], drafts: list[int], out: NDArray[np.int32]
    ) -> bool:
        """Write what each position of the next step may choose, as ``Matcher.fill``.

        Args:
            output: The tokens that the request has kept.
            drafts: Those that the step verifies.
            out: ``[W, ceil(V / 32)]``, all ones.

        Returns:
            False if the grammar took too long or too much memory; ``out`` is as it was then.
        """
        try:
            answer = self._ask(constraint, output, drafts, len(out))
        except (EOFError, OSError):
            answer = None
        if answer is None:
            self.close()
            return False
        (constraint.end, constraint.is_complete), mask = answer
        out[:] = np.frombuffer(mask, dtype=np.int32).reshape(out.shape)
        return True

    def close(self) -> None:
        """End the process. The next question starts another one, which is told everything anew."""
        if self._child is not None:
            self._child.close()
            self._child = None
        self._known.clear()
        self._ended.clear()

    def _ask(
        self, constraint: Constraint, output: Sequence[int], drafts: list[int], stride: int
    ) -> tuple[tuple[int | None, bool], bytes] | None:
        """The process's answer; ``None`` if it does not come in time. Raises ``EOFError`` or ``OSError``."""
        if self._child is None:
            self._child = children.Child(children.follow_all, self._table)
        connection = self._child.connection
        name, told = self._known.get(constraint, (-1, 0))
        opening = None
        if name < 0:
            opening, name = constraint.opening, next(self._names)
            weakref.finalize(constraint, self._ended.append, name)
        self._known[constraint] = name, len(output)
        ended, self._ended[:] = list(self._ended), []
        connection.send(Question(name, opening, list(output[told:]), drafts, stride, ended))
        if not connection.poll(self._time_limit):
            return None
        return connection.recv(), connection.recv_bytes()
