"""Continuous batching over a paged pool: who runs, who prefills, who gives way. Knows nothing of the device.

Device work is ordered: what a plan asks for runs after everything that earlier plans asked for. Pages and
slot of a request can therefore go back at once, though a step launched for it may still be in flight: it
touches its pages before any later owner does, and its results are void, since the request's epoch moved on.

Nothing here changes what a request's tokens are; it only changes when they come.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from engine.audit import is_audit
from engine.deltas import make_delta
from engine.errors import RequestError
from engine.kv.manager import KvManager
from engine.kv.prefix import Digest, sha256
from engine.queues import Queues, order_of
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Plan, PrefillChunk, PrefillResult, RowResult, Sequence
from engine.types import ErrorInfo, ForwardCount, Request, StepStats, TokenDelta

if TYPE_CHECKING:
    from engine.grammar.walker import Constraint
    from engine.ladder import Suspicion

__all__ = ["Plan", "PrefillChunk", "RowResult", "Scheduler", "SchedulerConfig", "Sequence"]


class Scheduler:
    """Requests in, plans out; results in, deltas out.

    Args:
        page_order: Order in which pages are first used; ``None``: ascending.
        digest: Hash of the prefix cache's keys.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        page_order: Seq[int] | None = None,
        digest: Digest = sha256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._clock = clock
        self._room = config.room
        self._kv = KvManager(
            num_pages=config.num_pages,
            page_size=config.page_size,
            prefix_cache=config.prefix_cache,
            cache_salt=config.cache_salt,
            page_order=page_order,
            digest=digest,
        )
        self._live: dict[str, Sequence] = {}
        self._queues = Queues(config, self._kv)
        # To look at: only ``Queues`` changes them
        self._waiting, self._running = self._queues.waiting, self._queues.running
        self._serial = 0
        self._prompt_tokens = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._preemptions = 0

    # --- requests in and out --------------------------------------------------------------------------------

    def check_request(self, request: Request) -> int:
        """The most tokens of ``request``, prompt included.

        Raises:
            RequestError: It can never be served, or its id is that of a live request.
        """
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        return self.config.token_limit(request)

    def add(self, request: Request, constraint: Constraint | None = None) -> None:
        """Queue a request.

        Raises:
            RequestError: See ``check_request``.
        """
        limit = self.check_request(request)
        self._serial += 1
        order = (request.priority, request.arrival_time, self._serial)
        sequence = Sequence(request, order, limit, self.config.stride, constraint)
        self._live[request.request_id] = sequence
        self._queues.add(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request without a delta. False if no such request is live."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        self.release(sequence)
        return True

    def release(self, sequence: Sequence, *, publish: bool = True) -> None:
        """End a request, whatever its state: slot and pages go back, later results are void. Idempotent.

        Args:
            publish: False after a fault: the blocks that it published leave the prefix cache.
        """
        if sequence.finished:
            return
        if not publish:
            self._kv.withdraw(sequence)
        self._queues.vacate(sequence)
        sequence.finished = True
        del self._live[sequence.request.request_id]

    def fail(self, sequence: Sequence, error: ErrorInfo) -> tuple[TokenDelta, list[int]]:
        """End a live request after a fault of its own.

        Returns:
            Its last delta, and the pages that only it held and wrote: their content must be zeroed before reuse.
        """
        tainted = self._kv.own_pages(sequence)
        request_id = sequence.request.request_id
        self.release(sequence, publish=False)
        return TokenDelta(request_id=request_id, token_ids=[], finish_reason="error", error=error), tainted

    def rebuild(self, sequence: Sequence, suspicion: Suspicion) -> list[int]:
        """Put a live request back to the queue after a fault: all its KV is computed anew, into other pages.

        Returns:
            The pages that only it held and wrote: their content must be zeroed before reuse.
        """
        tainted = self._kv.own_pages(sequence)
        self._kv.withdraw(sequence)
        self._queues.requeue(sequence)
        sequence.matched = []
        sequence.rebuilt = True
        sequence.suspicion = suspicion
        return tainted

    def has_work(self) -> bool:
        return bool(self._live)

    # --- one iteration --------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Plan one iteration. The caller launches its rows exactly once and later processes their results."""
        rows = self._grow_rows()
        bound = self._admit()
        for sequence in bound:
            if sequence.may_step:  # one known token: nothing to prefill
                insort(rows, sequence, key=order_of)
        for sequence in rows:
            sequence.steps_in_flight += 1
        return Plan(bound, self._queues.page_updates(), rows, self._share_prefill())

    def leave_out(self, rows: list[Sequence]) -> None:
        """Take rows out of the plan just made: they are not launched, and a later plan has them again."""
        for row in rows:
            row.steps_in_flight -= 1

    def process(self, results: list[RowResult]) -> list[TokenDelta]:
        """Take the results of a launched step: keep tokens, end requests, publish blocks.

        Results of an older epoch (aborted, preempted or finished since the launch) are dropped whole; a
        preempted request emits the same tokens again, since its draws are keyed by position.
        """
        deltas = []
        for result in results:
            if result.epoch == result.sequence.epoch:
                result.sequence.steps_in_flight -= 1
                deltas.append(self._keep(result))
        return deltas

    def process_prefills(self, results: Seq[PrefillResult]) -> list[TokenDelta]:
        """Take what prefills told of their prompts, and end the requests that asked for no more.

        Results of an older epoch are dropped whole, as in ``process``.
        """
        deltas = []
        for result in results:
            sequence = result.sequence
            if result.epoch != sequence.epoch:
                continue
            if result.logprobs is not None:
                known = [] if result.start == 0 else sequence.prompt_logprobs or []
                sequence.prompt_logprobs = known + result.logprobs
            if result.is_last and sequence.only_prefills:
                self._kv.publish(sequence)
                deltas.append(make_delta(sequence, [], "length"))
                self.release(sequence)
        return deltas

    def stats(self, forwards: list[ForwardCount] | None = None) -> StepStats:
        """State now and counts since the last call; ``forwards`` is the runner's part."""
        stats = StepStats(
            requests_running=self._queues.num_running,
            requests_waiting=self._queues.num_waiting,
            pages_used=self._kv.pages.num_used,
            pages_cached=self._kv.pages.num_cached,
            pages_free=self._kv.pages.num_free,
            forwards=forwards or [],
            prompt_tokens=self._prompt_tokens,
            prefix_cache_queried_tokens=self._queried_tokens,
            prefix_cache_hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
        )
        self._prompt_tokens = self._queried_tokens = self._hit_tokens = self._preemptions = 0
        return stats

    def check(self) -> None:
        """Every invariant of the accounting, for tests and debugging. Raises ``AssertionError``."""
        self._queues.check(self._live.keys())

    # --- rows and their pages -------------------------------------------------------------------------------

    def _grow_rows(self) -> list[Sequence]:
        """The bound sequences that can step, each owning pages for one more step."""
        # Oldest first; whoever gives way is the last of the list, so what was already passed stays.
        return [sequence for sequence in self._running if sequence.may_step and self._grow(sequence)]

    def _grow(self, sequence: Sequence) -> bool:
        """Own pages for one more step, taking them from the youngest if need be.

        False if ``sequence`` cannot step now: it gave way itself, or waits for its step in flight, whose
        result lowers the upper bound. The oldest without a step in flight always can: alone, it fits.
        """
        missing = self._kv.num_missing(sequence, self._reach(sequence))
        if not missing:
            return True
        while missing > self._kv.pages.num_available:
            if sequence.steps_in_flight:
                return False
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._kv.grow(sequence, missing)
        return True

    def _reach(self, sequence: Sequence) -> int:
        """Positions that must have a page before one more step is launched; later ones are never kept."""
        return min(sequence.written_upper_bound + self._room, self.config.max_model_len)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue with the tokens it has; it resumes by prefill."""
        self._queues.requeue(sequence)
        self._preemptions += not is_audit(sequence.request.request_id)

    # --- admission ------------------------------------------------------------------------------------------

    def _admit(self) -> list[Sequence]:
        """Bind waiting sequences in order while slots and pages last. Nobody passes one that lacks pages."""
        bound: list[Sequence] = []
        held_slots = held_pages = 0
        # What the running ones need for their next step stays: they would take it back by preemption.
        per_row = self._kv.pages_for(self.config.stride)
        for sequence in self._waiting[: self.config.max_num_seqs]:
            if self._queues.num_free_slots <= held_slots:
                break
            self._kv.match(sequence)
            reach = self._reach(sequence)
            if self._should_wait(sequence):
                # Those who pass it leave it a slot and pages.
                held_slots += 1
                held_pages += self._kv.pages_for(reach) - len(sequence.matched)
            elif self._kv.claim(sequence, reach, len(self._running) * per_row + held_pages):
                self._bind(sequence)
                bound.append(sequence)
            else:
                break
        return bound

    def _should_wait(self, sequence: Sequence) -> bool:
        """Whether a running sequence computes the next block that this one lacks, and is done sooner than it.

        So ``n`` choices of one prompt prefill it once, and nobody waits for a prefill longer than its own, nor for
        one that is held: it publishes by its first result, and its turn may be far off.
        """
        left = len(sequence.tokens) - 1 - len(sequence.matched) * self.config.page_size
        return any(
            not other.held
            and other.left_to_prefill <= left
            and self._kv.is_computing_next_block(other, sequence)
            for other in self._running
        )

    def _bind(self, sequence: Sequence) -> None:
        self._queues.bind(sequence)
        if sequence.scheduled_time is None:
            sequence.scheduled_time = self._clock()
            sequence.num_cached_tokens = sequence.prefilled
            if not is_audit(sequence.request.request_id):
                self._prompt_tokens += sequence.num_prompt
            if self.config.prefix_cache and not sequence.needs_prompt_logits:
                self._queried_tokens += sequence.num_prompt
                self._hit_tokens += sequence.prefilled

    # --- prefill --------------------------------------------------------------------------------------------

    def _share_prefill(self) -> list[PrefillChunk]:
        """Divide the iteration's budget evenly; what a short one does not need goes to the longer ones.

        The oldest always advance: a long prompt is slowed by short ones and never stopped.
        """
        budget = self.config.prefill_chunk_size
        pending = [sequence for sequence in self._running if sequence.left_to_prefill][:budget]
        shares: dict[tuple[int, float, int], int] = {}
        for index, sequence in enumerate(sorted(pending, key=lambda sequence: sequence.left_to_prefill)):
            share = min(sequence.left_to_prefill, budget // (len(pending) - index))
            shares[sequence.order] = share
            budget -= share
        return [sequence.next_chunk(shares[sequence.order]) for sequence in pending]

    # --- results --------------------------------------------------------------------------------------------

    def _keep(self, result: RowResult) -> TokenDelta:
        sequence = result.sequence
        assert len(result.token_ids) == result.num_accepted + 1, "a step emits one more than it accepted"
        kept, reason = sequence.cut(result.token_ids)
        sequence.tokens += kept
        self._kv.publish(sequence)
        delta = make_delta(sequence, kept, reason, result)
        if reason is not None:
            self.release(sequence)
        return delta
