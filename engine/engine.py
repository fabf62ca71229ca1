"""The engine: schedule, launch, collect. One per process, synchronous, token ids only."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from engine.audit import Auditor, is_audit
from engine.build import Parts, build
from engine.bundle_writer import BundleWriter, TripBundles
from engine.errors import RequestError
from engine.grammar.masks import StepMasks
from engine.grammar.walker import Constraint
from engine.guard import DRAFT, HALTING, events
from engine.ladder import Ladder
from engine.options import EngineOptions
from engine.pending import PendingStep, StepTiming
from engine.prompt_logprobs import PendingPrefill
from engine.scheduler import Scheduler
from engine.sequence import PrefillResult, RowResult, Sequence
from engine.types import EngineInfo, Outputs, Progress, Request, StepStats, SyncReason, TokenDelta

_COMPILE_WAIT_SECONDS = 0.01
"""How long an otherwise idle iteration waits for a grammar."""


class _Launched(NamedTuple):
    """What one iteration launched."""

    step: PendingStep | None
    prefill: PendingPrefill | None
    constrained: bool
    """A row of the step has a grammar."""


class Engine:
    """Continuous batching over one model. Make it with ``load``.

    ``add`` and ``abort`` may be called between any two ``iterate`` calls.
    """

    def __init__(self, parts: Parts, options: EngineOptions) -> None:
        self.info: EngineInfo = parts.info
        self._runner = parts.runner
        self._scheduler: Scheduler = parts.scheduler
        self._overlap = parts.info.schedule == "overlap"
        self._pending: _Launched | None = None
        self._grammars = parts.grammars
        stride = parts.info.num_speculative_tokens + 1
        self._masks = StepMasks(parts.runner, parts.grammars, parts.info.vocab_size, stride)
        self._overdue: list[Sequence] = []
        self._sync_steps: Counter[SyncReason] = Counter()
        self._timings: list[StepTiming] = []
        self._ladder = Ladder(parts.runner, parts.scheduler, self._mask, _bundles(parts, options))
        draw = random.Random(options.seed).random
        self._auditor = Auditor(options.audit_rate, parts.info.dtype, draw, parts.runner.counts)
        self._draw_seed = _seed_source(options.seed)

    @classmethod
    def load(cls, options: EngineOptions, progress: Callable[[Progress], None]) -> Engine:
        """Load a checkpoint and get ready to serve it.

        Raises:
            ConfigError: An option or configuration value that cannot be honoured.
            CheckpointError: A damaged or incomplete checkpoint.
        """
        options.validate()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        return cls(build(Path(options.model), options, progress), options)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: It can never be served as asked; nothing was queued.
        """
        vocab = self.info.vocab_size
        params = request.params
        if is_audit(request.request_id):
            raise RequestError(f"request id {request.request_id!r} is one of the engine's own", "request_id")
        named = [("prompt_token_ids", request.prompt_token_ids), ("stop_token_ids", params.stop_token_ids)]
        for field, ids in [*named, ("logit_bias", params.logit_bias)]:
            if any(not 0 <= token < vocab for token in ids):
                raise RequestError(f"{field} holds an id outside of [0, {vocab})", field)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._draw_seed())
            request = msgspec.structs.replace(request, params=params)
        self._scheduler.check_request(request)
        if request.request_id in self._grammars:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        if params.grammar is None:
            self._queue(request)
        else:
            self._grammars.submit(request)
        self._auditor.admit(request)

    def _queue(self, request: Request, constraint: Constraint | None = None) -> None:
        """Hand a user's request to the scheduler; an audit gives way to it."""
        if (audit := self._auditor.withdraw()) is not None:
            self._scheduler.abort(audit)
        self._scheduler.add(request, constraint)

    def abort(self, request_id: str) -> None:
        """Stop a request and free what it holds; unknown ids are ignored."""
        self._grammars.abort(request_id)
        self._scheduler.abort(request_id)
        self._auditor.end(request_id)

    def has_work(self) -> bool:
        users = self._pending is not None or self._scheduler.has_work() or self._grammars.num_waiting > 0
        return users or self._auditor.has_work()

    def iterate(self) -> Outputs:
        """One iteration: at most one step of the batch, one of a row alone and one prefill; what is due is read."""
        deltas = self._add_compiled()
        alone = self._ladder.begin()
        if self._pending is not None and (self._pending.constrained or alone is not None):
            # What a constrained row may choose next depends on what it chose last; a row that steps alone, which is
            # read at once, must not overtake what its own prefill told
            deltas += self._process(self._pending)
            self._pending = None
        plan = self._scheduler.schedule()
        for sequence in plan.bind:
            seed = sequence.request.params.seed
            assert seed is not None, "add() gives each request a seed"
            self._runner.bind(sequence, seed)
        self._runner.state.set_pages(plan.pages)
        together = plan.rows if alone is None else [row for row in plan.rows if row is not alone]
        taken = len(together) < len(plan.rows)
        rows, allowed = self._mask(together)
        step = self._runner.launch(rows, allowed) if rows else None
        self._ladder.turns.planned(taken=taken, others=bool(rows))
        if alone is not None and taken:
            deltas += self._step_alone(alone)
        prefill = self._runner.prefill(plan.prefill) if plan.prefill else None
        # Of one known token there is nothing to prefill
        empty = [one for one in plan.bind if one.only_prefills and not one.prefill_end]
        deltas += self._scheduler.process_prefills([PrefillResult(one, one.epoch, 0, True) for one in empty])
        deltas += self._fail_overdue()
        launched = _Launched(step, prefill, allowed is not None)
        deltas += self._collect(launched if step is not None or prefill is not None else None)
        deltas = self._tell_auditor(deltas)
        stats = self._stats()
        if not plan.prefill and not stats.requests_waiting:
            self._audit_one(stats)
        return Outputs(deltas=deltas, stats=stats)

    def _audit_one(self, stats: StepStats) -> None:
        """Queue an audit, if a slot is free and one is due."""
        if stats.requests_running < self.info.max_num_seqs and (audit := self._auditor.due()) is not None:
            self._scheduler.add(audit)

    def _tell_auditor(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Let the auditor see every delta; those of users' requests."""
        if not self._auditor.is_watching:
            return deltas
        users = []
        for delta in deltas:
            if is_audit(delta.request_id):
                self._auditor.conclude(delta)
            else:
                self._auditor.observe(delta)
                users.append(delta)
        return users

    def _add_compiled(self) -> list[TokenDelta]:
        """Queue the requests whose grammar is compiled; the ends of those whose grammar is refused."""
        if not self._grammars.num_waiting:
            return []
        if self._pending is None and not self._scheduler.has_work():
            self._grammars.wait(_COMPILE_WAIT_SECONDS)
        ended = []
        for request, outcome in self._grammars.take():
            if isinstance(outcome, Constraint):
                self._queue(request, outcome)
            else:
                ended.append(
                    TokenDelta(
                        request_id=request.request_id, token_ids=[], finish_reason="error", error=outcome
                    )
                )
        return ended

    def _mask(self, rows: list[Sequence]) -> tuple[list[Sequence], Tensor | None]:
        """The planned rows that can step, and their mask, as ``StepMasks.find``; the plan is without the others."""
        ready, allowed = self._masks.find(rows)
        self._sync_steps["grammar"] += self._overlap and allowed is not None
        if len(ready) < len(rows):
            stepping = set(ready)
            left_out = [row for row in rows if row not in stepping]
            self._scheduler.leave_out(left_out)
            self._overdue += [row for row in left_out if row.constraint is not None and row.constraint.error]
        return ready, allowed

    def _step_alone(self, row: Sequence) -> list[TokenDelta]:
        """The planned step of a row that faults keep apart from the others; waits for it."""
        self._sync_steps["retry"] += self._overlap
        if row.suspicion is not None:
            return self._ladder.climb(row)
        step = self._ladder.step_isolated(row)
        return [] if step is None else self._process(_Launched(step, None, constrained=False))

    def _fail_overdue(self) -> list[TokenDelta]:
        """End the requests whose grammar cannot be followed."""
        overdue, self._overdue = self._overdue, []
        ended = []
        for row in overdue:
            assert row.constraint is not None and row.constraint.error is not None, "a grammar was refused"
            ended.append(self._scheduler.fail(row, row.constraint.error)[0])
        return ended

    def _collect(self, launched: _Launched | None) -> list[TokenDelta]:
        """Process the results of this iteration (sync), or of the one before it (overlap)."""
        if self._overlap:
            launched, self._pending = self._pending, launched
        return [] if launched is None else self._process(launched)

    def _process(self, launched: _Launched) -> list[TokenDelta]:
        """Wait for what was launched; what it gave each request."""
        prefills = [] if launched.prefill is None else launched.prefill.results()
        rows = [] if launched.step is None else launched.step.results()
        if launched.step is not None:
            self._timings.append(launched.step.timing)
        told: list[RowResult | PrefillResult] = [*prefills, *rows]
        flagged = [result for result in told if result.flags and result.epoch == result.sequence.epoch]
        for result in flagged:
            self._runner.counts.update(dict.fromkeys(events(result.flags), 1))
            if result.flags & DRAFT:
                result.sequence.publishable = False  # a row of the draft's KV may be zeros, which cost drafts
        deltas = self._ladder.trip([one for one in flagged if one.flags & HALTING], launched.step)
        deltas += self._scheduler.process_prefills(prefills)
        return deltas + self._scheduler.process(rows)

    def _stats(self) -> StepStats:
        stats = self._scheduler.stats(self._runner.take_forwards())
        timings, self._timings = self._timings, []
        sync_steps, self._sync_steps = self._sync_steps, Counter()
        return msgspec.structs.replace(
            stats,
            requests_waiting=stats.requests_waiting + self._grammars.num_waiting,
            sync_steps={reason: count for reason, count in sync_steps.items() if count},
            counts=self._runner.take_counts(),
            graphs_disabled=self._runner.graphs.num_disabled if self._runner.graphs is not None else {},
            step_gpu_seconds=[one.seconds for one in timings],
            step_host_gap_seconds=[one.gap_seconds for one in timings if one.gap_seconds is not None],
        )

    def close(self) -> None:
        """Wait for the device and drop what is in flight."""
        self._pending = None
        self._grammars.close()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _bundles(parts: Parts, options: EngineOptions) -> TripBundles | None:
    """Where trips are written down, if anywhere.

    Raises:
        ConfigError: The directory cannot be written.
    """
    if options.nan_bundle_dir is None:
        return None
    return TripBundles(BundleWriter(Path(options.nan_bundle_dir), options, parts.info), parts.runner)


def _seed_source(seed: int | None) -> Callable[[], int]:
    """Seeds for requests without one: from the system's entropy, or repeatable from ``seed``."""
    if seed is None:
        return lambda: secrets.randbits(63)
    generator = random.Random(seed)
    return lambda: generator.getrandbits(63)
