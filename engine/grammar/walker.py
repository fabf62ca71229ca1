"""What requests with a grammar may choose next: asked of a process for which nobody waits long."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.grammar import children
from engine.grammar.limits import OUT_OF_TIME
from engine.grammar.questions import Answer, Opening, Question
from engine.types import ErrorInfo

WALK_SECONDS = 1.0
"""Most processor time that one request's grammar may take in one step."""
FREE_SECONDS = 0.01
"""Processor time that a request's grammar has for each token of the output, as long as it lives."""
EXCESS_SECONDS = 2.0
"""Most that it may take beyond that."""
SLOW_SECONDS = 0.1
"""From this excess on a grammar is followed apart from the others, as long as it lives."""
PATIENCE = 0.05
"""How long rows that can step wait for one question, and for all those of an iteration."""


class Constraint:
    """One request's grammar, and where the last step's tokens can end it.

    Args:
        grammar: Serialised.
        stop_ids: The request's.
        param: The request's field that has the grammar, for errors.
    """

    def __init__(self, grammar: str, stop_ids: tuple[int, ...], param: str | None = None) -> None:
        self.opening = Opening(grammar, stop_ids)
        self.end: int | None = None
        """Position of the last step where nothing can follow."""
        self.is_complete = False
        """Whether the output matches there."""
        self.error: ErrorInfo | None = None
        """Why it is not followed any further."""
        self.excess = 0.0
        """Processor time that it has taken beyond its tokens' share, in seconds."""
        self.is_slow = False
        """It took so much that others should not wait for it."""
        self.answered_at = 0.0
        """When the last answer came, monotonic seconds."""
        self.walked = 0.0
        """All processor time that it has taken, but for what a new process had to do again."""
        self._param = param
        self._answer: tuple[int, list[int], Answer] | None = None
        self._deaths = 0

    def keep(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """How many of a step's tokens belong to the output, and whether it ends before the others."""
        if self.end is None or len(token_ids) <= self.end:
            return len(token_ids), False
        return self.end, True

    def take(self, asked: _Asked, answer: Answer) -> None:
        """Keep an answer until the row steps, and account for it."""
        self._deaths = 0
        self._answer = asked.num_tokens, asked.drafts, answer
        self.answered_at = time.monotonic()
        self.walked += answer.seconds if asked.is_charged else 0.0
        self.excess = max(0.0, self.walked - FREE_SECONDS * asked.num_tokens)
        self.is_slow |= self.excess > SLOW_SECONDS
        if self.excess > EXCESS_SECONDS:
            share = f"{EXCESS_SECONDS:g} s and {1000 * FREE_SECONDS:g} ms a token"
            self._refuse(f"the grammar takes more than {share} to follow")

    def give(self, num_tokens: int, drafts: list[int]) -> Answer | None:
        """The answer for an output of so many tokens and these drafts, if there is one: once."""
        known, self._answer = self._answer, None
        return known[2] if known is not None and known[:2] == (num_tokens, drafts) else None

    def blame(self, asked: _Asked, exit_code: int | None, seconds: float) -> None:
        """The process ended while it worked for this request. A first time can be a fault of something else."""
        self._deaths += 1
        if exit_code == OUT_OF_TIME:
            self._refuse(f"the grammar takes more than {seconds:g} s to follow in one step")
        elif self._deaths > 1 and asked.is_start:
            message = "no process can be started to follow the grammar; try again"
            self.error = ErrorInfo("unavailable", message)
        elif self._deaths > 1:
            self._refuse("the grammar takes too much memory to follow")

    def _refuse(self, message: str) -> None:
        self.error = ErrorInfo("invalid_request", message, self._param)


class _Asked(NamedTuple):
    """What the process has not answered yet: a question, or whether it has started."""

    constraint: Constraint
    num_tokens: int
    drafts: list[int]
    is_start: bool
    is_charged: bool
    since: float


class GrammarWalker:
    """Walks the grammars of all requests in one process, which is replaced when a grammar makes it fail.

    It has one question at a time; an answer that nobody waits for any longer is kept with its constraint.

    Args:
        table: The text of each id, empty where no grammar can match it.
        time_limit: Most seconds of processor time of one row in one step.
    """

    def __init__(self, table: list[bytes], time_limit: float = WALK_SECONDS) -> None:
        self._table = table
        self._time_limit = time_limit
        self._child: children.Child | None = None
        self._asked: _Asked | None = None
        self._names = count()
        self._known: weakref.WeakKeyDictionary[Constraint, tuple[int, int]] = weakref.WeakKeyDictionary()
        """Name in the process, and tokens that it was told of."""
        self._ended: list[int] = []

    def walk(
        self,
        constraint: Constraint,
        output: Sequence[int],
        drafts: list[int],
        out: NDArray[np.int32],
        *,
        until: float,
        alone: bool,
    ) -> bool:
        """Write what each position of the next step may choose, as ``Matcher.fill``.

        Args:
            output: The tokens that the request has kept.
            drafts: Those that the step verifies.
            out: ``[W, ceil(V / 32)]``, all ones.
            until: When to return at the latest, monotonic seconds.
            alone: Nobody else could step meanwhile, so what was asked in earlier iterations is waited for too.

        Returns:
            False if there is no answer, and ``out`` is as it was. Unless the constraint has an error, ask again.
        """
        while constraint.error is None:
            answer = constraint.give(len(output), drafts)
            if answer is not None:
                constraint.end, constraint.is_complete = answer.end, answer.is_complete
                out[:] = np.frombuffer(answer.mask, dtype=np.int32).reshape(out.shape)
                return True
            try:
                if self._asked is None:
                    self._ask(constraint, output, drafts, len(out))
                if not self._is_settled(until, alone):
                    return False
            except (EOFError, OSError):
                asked = self._asked
                exit_code = self.close()
                if asked is not None:
                    asked.constraint.blame(asked, exit_code, self._time_limit)
        return False

    def close(self) -> int | None:
        """End the process; its exit code. The next question starts another one, which is told everything anew."""
        exit_code = self._child.close() if self._child is not None else None
        self._child = self._asked = None
        self._known.clear()
        self._ended.clear()
        return exit_code

    def _ask(self, constraint: Constraint, output: Sequence[int], drafts: list[int], stride: int) -> None:
        """Send a question; if there is no process, start one. Raises ``EOFError`` or ``OSError``."""
        asked = _Asked(constraint, len(output), drafts, self._child is None, True, time.monotonic())
        self._asked = asked
        if self._child is None:
            self._child = children.Child(children.follow_all, self._table)
            return
        name, told = self._known.get(constraint, (-1, 0))
        opening, seconds = None, self._time_limit
        if name < 0:
            opening, name = constraint.opening, next(self._names)
            weakref.finalize(constraint, self._ended.append, name)
            # One more limit to read the grammar, and what it has had to follow its output up to here
            seconds += self._time_limit + constraint.walked
            self._asked = asked._replace(is_charged=constraint.answered_at == 0)
        self._known[constraint] = name, len(output)
        ended, self._ended[:] = list(self._ended), []
        question = Question(name, opening, list(output[told:]), drafts, stride, ended, seconds)
        self._child.connection.send(question)

    def _is_settled(self, until: float, alone: bool) -> bool:
        """Take the answer to what was asked, if it comes in time. Raises ``EOFError`` or ``OSError``."""
        asked, child = self._asked, self._child
        assert asked is not None and child is not None, "something was asked of a process"
        now = time.monotonic()
        patience = until if alone else min(until, asked.since + PATIENCE)
        if not child.connection.poll(max(0.0, patience - now)):
            if now > asked.since + children.START_SECONDS:
                raise TimeoutError("the process neither computes nor answers")
            return False
        answer = child.connection.recv()
        self._asked = None
        if not asked.is_start:
            asked.constraint.take(asked, answer)
        return True
