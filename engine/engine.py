"""The engine: schedule, launch, collect. One per process, synchronous, token ids only."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from engine.build import Parts, build
from engine.errors import RequestError
from engine.grammar.walker import WALK_SECONDS, Constraint
from engine.guard import HALTING, Flag, events
from engine.options import EngineOptions
from engine.pending import PendingStep
from engine.prompt_logprobs import PendingPrefill
from engine.sampler import mask_words
from engine.scheduler import Scheduler
from engine.sequence import PrefillResult, RowResult, Sequence
from engine.types import EngineInfo, ErrorInfo, Outputs, Progress, Request, StepStats, SyncReason, TokenDelta

_COMPILE_WAIT_SECONDS = 0.01
"""How long an otherwise idle iteration waits for a grammar."""
_WALK_ALL_SECONDS = 2.0
"""From when on a step asks no more of its rows' grammars: an engine that is silent for too long counts as stuck."""


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

    def __init__(self, parts: Parts, seed: int | None) -> None:
        self.info: EngineInfo = parts.info
        self._runner = parts.runner
        self._scheduler: Scheduler = parts.scheduler
        self._overlap = parts.info.schedule == "overlap"
        self._pending: _Launched | None = None
        self._grammars = parts.grammars
        self._overdue: list[Sequence] = []
        self._sync_steps = 0
        self._draw_seed = _seed_source(seed)

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
        return cls(build(Path(options.model), options, progress), options.seed)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: It can never be served as asked; nothing was queued.
        """
        vocab = self.info.vocab_size
        params = request.params
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
            self._scheduler.add(request)
        else:
            self._grammars.submit(request)

    def abort(self, request_id: str) -> None:
        """Stop a request and free what it holds; unknown ids are ignored."""
        self._grammars.abort(request_id)
        self._scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self._pending is not None or self._scheduler.has_work() or self._grammars.num_waiting > 0

    def iterate(self) -> Outputs:
        """One iteration: at most one step and one prefill are launched, at most one step's results read."""
        deltas = self._add_compiled()
        if self._pending is not None and self._pending.constrained:
            # What such a row may choose next depends on what it chose last
            deltas += self._process(self._pending)
            self._pending = None
        plan = self._scheduler.schedule()
        for sequence in plan.bind:
            seed = sequence.request.params.seed
            assert seed is not None, "add() gives each request a seed"
            self._runner.bind(sequence, seed)
        self._runner.set_pages(plan.pages)
        allowed = self._find_allowed(plan.rows)
        step = self._runner.launch(plan.rows, allowed) if plan.rows else None
        prefill = self._runner.prefill(plan.prefill) if plan.prefill else None
        # Of one known token there is nothing to prefill
        empty = [one for one in plan.bind if one.only_prefills and not one.prefill_end]
        deltas += self._scheduler.process_prefills([PrefillResult(one, one.epoch, 0, True) for one in empty])
        deltas += self._fail_overdue()
        launched = _Launched(step, prefill, allowed is not None)
        deltas += self._collect(launched if step is not None or prefill is not None else None)
        return Outputs(deltas=deltas, stats=self._stats())

    def _add_compiled(self) -> list[TokenDelta]:
        """Queue the requests whose grammar is compiled; the ends of those whose grammar is refused."""
        if not self._grammars.num_waiting:
            return []
        if self._pending is None and not self._scheduler.has_work():
            self._grammars.wait(_COMPILE_WAIT_SECONDS)
        ended = []
        for request, outcome in self._grammars.take():
            if isinstance(outcome, Constraint):
                self._scheduler.add(request, outcome)
            else:
                ended.append(
                    TokenDelta(
                        request_id=request.request_id, token_ids=[], finish_reason="error", error=outcome
                    )
                )
        return ended

    def _find_allowed(self, rows: list[Sequence]) -> Tensor | None:
        """The step's mask of allowed tokens ``[B, W, ceil(V / 32)]``, on the host; ``None`` without a grammar.

        It waits for everything that was launched.
        """
        constrained = [(place, row) for place, row in enumerate(rows) if row.constraint is not None]
        if not constrained:
            return None
        words = mask_words(self.info.vocab_size)
        allowed = torch.full((len(rows), self.info.num_speculative_tokens + 1, words), -1, dtype=torch.int32)
        drafts = self._runner.read_drafts([row for _, row in constrained])
        deadline = time.monotonic() + _WALK_ALL_SECONDS
        for (place, row), row_drafts in zip(constrained, drafts, strict=True):
            assert row.constraint is not None, "a constrained row has a constraint"
            output = row.tokens[row.num_prompt :]
            mask = allowed[place].numpy()
            if time.monotonic() > deadline or not self._grammars.walker.walk(
                row.constraint, output, row_drafts, mask
            ):
                self._overdue.append(row)
        self._sync_steps += self._overlap
        return allowed

    def _fail_overdue(self) -> list[TokenDelta]:
        """End the requests whose grammar cannot be followed; their step, which had no mask, is void."""
        overdue, self._overdue = self._overdue, []
        return [self._scheduler.fail(sequence, _overdue(sequence))[0] for sequence in overdue]

    def _collect(self, launched: _Launched | None) -> list[TokenDelta]:
        """Process the results of this iteration (sync), or of the one before it (overlap)."""
        if self._overlap:
            launched, self._pending = self._pending, launched
        return [] if launched is None else self._process(launched)

    def _process(self, launched: _Launched) -> list[TokenDelta]:
        """Wait for what was launched; what it gave each request."""
        prefills = [] if launched.prefill is None else launched.prefill.results()
        rows = [] if launched.step is None else launched.step.results()
        told: list[RowResult | PrefillResult] = [*prefills, *rows]
        for result in told:
            self._runner.counts.update(events(result.flags) if result.flags else ())
        deltas = [self._fail(result) for result in told if _is_fault(result)]
        deltas += self._scheduler.process_prefills(prefills)
        return deltas + self._scheduler.process(rows)

    def _fail(self, result: RowResult | PrefillResult) -> TokenDelta:
        """End a request whose logits were not finite; its epoch moves on, so nothing of it is kept."""
        position, found = len(result.sequence.tokens), Flag(result.flags & HALTING).name
        error = ErrorInfo("numerical_error", f"the model's output for token {position} is not finite ({found})")
        delta, tainted = self._scheduler.fail(result.sequence, error)
        if tainted:
            self._runner.scrub(tainted)
            self._runner.counts["nan_guard_pages_scrubbed", ()] += len(tainted)
        return delta

    def _stats(self) -> StepStats:
        stats = self._scheduler.stats(self._runner.take_forwards())
        waiting = stats.requests_waiting + self._grammars.num_waiting
        sync_steps: dict[SyncReason, int] = {"grammar": self._sync_steps} if self._sync_steps else {}
        self._sync_steps = 0
        counts = self._runner.take_counts()
        return msgspec.structs.replace(stats, requests_waiting=waiting, sync_steps=sync_steps, counts=counts)

    def close(self) -> None:
        """Wait for the device and drop what is in flight."""
        self._pending = None
        self._grammars.close()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _is_fault(result: RowResult | PrefillResult) -> bool:
    """A halted row of a request that is still live as it was launched."""
    return bool(result.flags & HALTING) and result.epoch == result.sequence.epoch


def _overdue(sequence: Sequence) -> ErrorInfo:
    spec = sequence.request.params.grammar
    message = f"the grammar takes more than {WALK_SECONDS:g} s, or too much memory, to follow in one step"
    return ErrorInfo("invalid_request", message, spec.param if spec is not None else None)


def _seed_source(seed: int | None) -> Callable[[], int]:
    """Seeds for requests without one: from the system's entropy, or repeatable from ``seed``."""
    if seed is None:
        return lambda: secrets.randbits(63)
    generator = random.Random(seed)
    return lambda: generator.getrandbits(63)
