"""What becomes of a request whose step was tripped: rebuilt, run again alone, and let go on or ended.

A trip emits nothing. The request gives its pages back, computes all its KV anew, and its next step climbs a ladder
that finds the cause: eager, with its drafts; if that is not finite either, its next token alone; if even that is
not, the model itself has no finite answer. A rung that the tripped step has answered already is left out.

What a fault costs is bounded. A request that was rescued ``MAX_RESCUES`` times is isolated: its next token alone,
eager, is all that each further step of it verifies, and the first of them that trips ends it. Whoever has to step
alone does so in its turn (``engine.turns``), and one bundle is written an iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from torch import Tensor

from engine.contract import GraphKey
from engine.graph import DISABLE_AFTER
from engine.guard import CONTRACT, HALTING, NUMERICAL, PREFILL, Flag, violated_fields
from engine.pending import PendingStep
from engine.prefill import PrefillRecord
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.sequence import PrefillResult, RowResult, Sequence
from engine.turns import Turns
from engine.types import ErrorInfo, ForwardReason, TokenDelta

Cause = Literal["replay", "draft_token", "model", "contract"]

MAX_RESCUES: Final = DISABLE_AFTER + 1
"""Rescues of one request, each a prefill of all that it has, after which it is isolated. One more than a graph's
faults: a request that met all of those has no part in them, and goes on as before once the graph is turned off."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What a rebuilt request's next step has to find out."""

    graph: GraphKey | None
    """What was replayed when it tripped: the step, or what ran before its first one if that was at fault."""
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

    Each iteration of the engine calls ``begin``, ``Turns.planned``, and for the row whose turn it is ``climb`` or
    ``step_isolated``.

    Args:
        mask: The rows that can step, and their mask, as the engine finds them; a row without one, whose grammar
            gave no answer yet, is not in the plan any more.
        bundles: Told of an iteration's first trip before anything is given back.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        mask: Callable[[list[Sequence]], tuple[list[Sequence], Tensor | None]],
        bundles: BundleSink | None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._mask = mask
        self._bundles = bundles
        self._has_bundled = False
        self.turns = Turns()

    def begin(self) -> Sequence | None:
        """An iteration begins: the request that may step alone in it, if any."""
        self._has_bundled = False
        return self.turns.take()

    def trip(self, results: list[RowResult | PrefillResult], step: PendingStep | None) -> list[TokenDelta]:
        """Take the tripped results of what one iteration launched; the ends of requests that cannot go on."""
        graph = step.graph if step is not None else None
        violated: dict[GraphKey | None, set[str]] = {}
        found = [(result, self._faulty_prefill(result)) for result in results]
        for result, record in found:
            if record is None:
                violated.setdefault(graph, set()).update(violated_fields(result.flags))
            elif not record.reported:
                record.reported = True
                self._report(record.run.graph, violated_fields(result.flags))
        for key, fields in violated.items():
            self._report(key, sorted(fields))
        return [delta for result, record in found for delta in self._trip(result, record, graph)]

    def _faulty_prefill(self, result: RowResult | PrefillResult) -> PrefillRecord | None:
        """The uniform prefill, or draft phase behind it, that is at fault, if one is. What is told at once was
        ragged."""
        return None if isinstance(result, PrefillResult) else self._runner.faulty_prefill(result.sequence)

    def _report(self, graph: GraphKey | None, fields: list[str]) -> None:
        """Count violations of the contract, against a graph where there is one."""
        if not fields:
            return
        if graph is not None and self._runner.graphs is not None:
            self._runner.graphs.report(graph, fields)
        else:
            self._runner.counts.update(("graph_contract_violations", (name,)) for name in fields)

    def _trip(
        self, result: RowResult | PrefillResult, record: PrefillRecord | None, graph: GraphKey | None
    ) -> list[TokenDelta]:
        ragged = record is None and (isinstance(result, PrefillResult) or bool(result.flags & PREFILL))
        if ragged or result.sequence.isolated:
            rungs: tuple[bool, ...] = ()  # this was the last thing to try
        else:
            # A row that was stopped before it ran, or whose KV was wrong, has answered nothing, eager or not
            stopped = record is not None or bool(result.flags & (CONTRACT | Flag.TARGET_OOV))
            with_drafts = graph is not None or stopped
            rungs = (True,) * with_drafts + (False,) * (result.sequence.stride > 1)
        self._bundle(result, None if ragged or record is not None else graph)
        if not rungs:
            return [self._fail(result)]
        name, position = result.sequence.request.request_id, len(result.sequence.tokens)
        logger.warning("request %s tripped at token %d (%s)", name, position, _found(result))
        if record is None:
            capture = self._runner.graphs.capture_of(graph) if self._runner.graphs and graph else None
        else:
            graph, capture = record.run
        suspicion = Suspicion(graph, capture, bool(result.flags & CONTRACT), rungs)
        self.turns.join(result.sequence)
        self._scrub(self._scheduler.rebuild(result.sequence, suspicion))
        return []

    def _bundle(self, result: RowResult | PrefillResult, graph: GraphKey | None) -> None:
        """Keep the evidence, once an iteration: a bundle may take a good part of a second."""
        if self._bundles is None:
            return
        if self._has_bundled:
            self._runner.counts["nan_bundles", ("skipped",)] += 1
            return
        self._bundles.write(result, graph)
        self._has_bundled = True

    def climb(self, row: Sequence) -> list[TokenDelta]:
        """Run the next step of a rebuilt row, planned but not launched; waits for it."""
        ready, allowed = self._mask([row])
        if not ready:
            return []
        suspicion, row.suspicion = row.suspicion, None
        assert suspicion is not None, "only a suspect climbs"
        reason: ForwardReason = "contract" if suspicion.contract else "retry"
        for verify_drafts in suspicion.rungs:
            step = self._try(row, allowed, verify_drafts, reason)
            [result] = step.results()
            if not result.flags & HALTING:
                self._clear(row, suspicion, "replay" if verify_drafts else "draft_token")
                return self._scheduler.process([result])
            if result.flags & PREFILL:
                break  # its KV was computed eager, so no step has an answer
        return [self._fail(result)]

    def step_isolated(self, row: Sequence) -> PendingStep | None:
        """Launch the next step of an isolated row; ``None`` if its grammar gave no mask."""
        self.turns.join(row)
        ready, allowed = self._mask([row])
        return self._try(row, allowed, False, "retry") if ready else None

    def _try(
        self, row: Sequence, allowed: Tensor | None, verify_drafts: bool, reason: ForwardReason
    ) -> PendingStep:
        if allowed is not None and not verify_drafts:
            allowed = allowed[:, :1].contiguous()
        return self._runner.retry(row, allowed, verify_drafts=verify_drafts, reason=reason)

    def _clear(self, row: Sequence, suspicion: Suspicion, cause: Cause) -> None:
        """Let a row go on: with the others, or alone if it has tripped too often."""
        name = row.request.request_id
        logger.warning("request %s goes on; cause of its trip: %s", name, cause)
        self._runner.counts["nan_guard_actions", ("retried", cause)] += 1
        if cause == "replay" and suspicion.graph is not None and not suspicion.contract:
            self._runner.capture_again(suspicion.graph, suspicion.capture)
        row.num_rescues += 1
        if row.num_rescues < MAX_RESCUES:
            self.turns.leave(row)
            return
        row.isolated = True
        self.turns.join(row)
        logger.warning("request %s tripped %d times: it goes on alone, without drafts", name, MAX_RESCUES)
        self._runner.counts["nan_guard_actions", ("isolated", cause)] += 1

    def _fail(self, result: RowResult | PrefillResult) -> TokenDelta:
        """End a request that no rung could answer; its epoch moves on, so nothing of it is kept."""
        name, position = result.sequence.request.request_id, len(result.sequence.tokens)
        logger.error("request %s ends at token %d (%s)", name, position, _found(result))
        cause: Cause = "model" if result.flags & NUMERICAL else "contract"
        if cause == "model":
            message = f"the model's output for token {position} is not finite ({_found(result)})"
            error = ErrorInfo("numerical_error", message)
        else:
            message = (
                f"the device's state of the request was damaged before token {position} ({_found(result)})"
            )
            error = ErrorInfo("internal_error", message)
        self._runner.counts["nan_guard_actions", ("failed", cause)] += 1
        delta, tainted = self._scheduler.fail(result.sequence, error)
        self._scrub(tainted)
        return delta

    def _scrub(self, pages: list[int]) -> None:
        if pages:
            self._runner.scrub(pages)
            self._runner.counts["nan_guard_pages_scrubbed", ()] += len(pages)


def _found(result: RowResult | PrefillResult) -> str:
    return str(Flag(result.flags & HALTING).name)
