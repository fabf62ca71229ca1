"""What becomes of a request whose step was tripped: rebuilt, run again alone, and let go on or ended.

A trip emits nothing. The request gives its pages back, computes all its KV anew, and its next step climbs a ladder
that finds the cause: eager, with its drafts; if that is not finite either, its next token alone; if even that is
not, the model itself has no finite answer. A rung that the tripped step has answered already is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from engine.contract import GraphKey
from engine.guard import CONTRACT, HALTING, Flag, violated_fields
from engine.pending import PendingStep
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.sequence import PrefillResult, RowResult, Sequence
from engine.types import ErrorInfo, ForwardReason, TokenDelta

Cause = Literal["replay", "draft_token", "model"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What a rebuilt request's next step has to find out."""

    graph: GraphKey | None
    """What was replayed when it tripped."""
    capture: object
    """The capture itself: whoever replaced it since has dealt with its fault."""
    contract: bool
    """The contract was violated, rather than a value not finite."""
    rungs: tuple[bool, ...]
    """Eager tries, in order: with drafts (True), or of the next token alone (False)."""


class BundleSink(Protocol):
    """Keeps the evidence of a trip."""

    def write(self, result: RowResult | PrefillResult, graph: GraphKey | None) -> None: ...


class Ladder:
    """Handles trips.

    Args:
        find_allowed: The mask of a constrained row, as the engine finds it for a step.
        is_overdue: Whether it found none in time: the row has no mask, and the engine ends the request.
        bundles: Told of each trip before anything is given back.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        find_allowed: Callable[[list[Sequence]], Tensor | None],
        is_overdue: Callable[[Sequence], bool],
        bundles: BundleSink | None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._find_allowed = find_allowed
        self._is_overdue = is_overdue
        self._bundles = bundles
        self._suspects: set[Sequence] = set()

    def trip(self, results: list[RowResult | PrefillResult], step: PendingStep | None) -> list[TokenDelta]:
        """Take the tripped results of what one iteration launched; the ends of requests that cannot go on."""
        graph = step.graph if step is not None else None
        fields = sorted({name for result in results for name in violated_fields(result.flags)})
        if fields and graph is not None and self._runner.graphs is not None:
            self._runner.graphs.report(graph, fields)
        elif fields:
            self._runner.counts.update(("graph_contract_violations", (name,)) for name in fields)
        return [delta for result in results for delta in self._trip(result, graph)]

    def _trip(self, result: RowResult | PrefillResult, graph: GraphKey | None) -> list[TokenDelta]:
        if isinstance(result, PrefillResult) or result.flags & (Flag.PREFILL_NAN | Flag.PREFILL_INF):
            graph = None  # a prefill runs eager
            rungs: tuple[bool, ...] = ()
        else:
            # A row that was stopped before it ran has answered nothing, eager or not
            with_drafts = graph is not None or bool(result.flags & (CONTRACT | Flag.TARGET_OOV))
            rungs = (True,) * with_drafts + (False,) * (result.sequence.stride > 1)
        if self._bundles is not None:
            self._bundles.write(result, graph)
        if not rungs:
            return [self._fail(result)]
        name, position = result.sequence.request.request_id, len(result.sequence.tokens)
        logger.warning("request %s tripped at token %d (%s)", name, position, _found(result))
        capture = self._runner.graphs.capture_of(graph) if self._runner.graphs and graph else None
        suspicion = Suspicion(graph, capture, bool(result.flags & CONTRACT), rungs)
        self._suspects.add(result.sequence)
        self._scrub(self._scheduler.rebuild(result.sequence, suspicion))
        return []

    @property
    def has_suspects(self) -> bool:
        """Some request is to climb once it is prefilled."""
        if self._suspects:
            self._suspects = {one for one in self._suspects if not one.finished}
        return bool(self._suspects)

    def climb(self, row: Sequence) -> list[TokenDelta]:
        """Run the next step of a rebuilt row, planned but not launched; waits for it."""
        suspicion, row.suspicion = row.suspicion, None
        self._suspects.discard(row)
        assert suspicion is not None, "only a suspect climbs"
        allowed = self._find_allowed([row])
        if self._is_overdue(row):
            return []
        reason: ForwardReason = "contract" if suspicion.contract else "retry"
        for verify_drafts in suspicion.rungs:
            mask = allowed if allowed is None or verify_drafts else allowed[:, :1].contiguous()
            step = self._runner.retry(row, mask, verify_drafts=verify_drafts, reason=reason)
            [result] = step.results()
            if not result.flags & HALTING:
                self._clear(row, suspicion, "replay" if verify_drafts else "draft_token")
                return self._scheduler.process([result])
        return [self._fail(result)]

    def _clear(self, row: Sequence, suspicion: Suspicion, cause: Cause) -> None:
        logger.warning("request %s goes on; cause of its trip: %s", row.request.request_id, cause)
        self._runner.counts["nan_guard_actions", ("retried", cause)] += 1
        if cause == "replay" and suspicion.graph is not None and not suspicion.contract:
            self._runner.capture_again(suspicion.graph, suspicion.capture)

    def _fail(self, result: RowResult | PrefillResult) -> TokenDelta:
        """End a request whose logits are not finite; its epoch moves on, so nothing of it is kept."""
        self._runner.counts["nan_guard_actions", ("failed", "model")] += 1
        name, position = result.sequence.request.request_id, len(result.sequence.tokens)
        logger.error("request %s ends at token %d (%s)", name, position, _found(result))
        message = f"the model's output for token {position} is not finite ({_found(result)})"
        error = ErrorInfo("numerical_error", message)
        delta, tainted = self._scheduler.fail(result.sequence, error)
        self._scrub(tainted)
        return delta

    def _scrub(self, pages: list[int]) -> None:
        if pages:
            self._runner.scrub(pages)
            self._runner.counts["nan_guard_pages_scrubbed", ()] += len(pages)


def _found(result: RowResult | PrefillResult) -> str:
    return str(Flag(result.flags & HALTING).name)
