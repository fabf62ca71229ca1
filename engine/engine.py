"""The engine: schedule, launch, collect. One per process, synchronous, token ids only."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from engine.build import Parts, build
from engine.errors import RequestError
from engine.guard import HALTING, Flag
from engine.options import EngineOptions
from engine.runner import PendingStep
from engine.scheduler import Scheduler
from engine.sequence import RowResult
from engine.types import EngineInfo, ErrorInfo, Outputs, Progress, Request, StepStats, TokenDelta


class Engine:
    """Continuous batching over one model. Make it with ``load``.

    ``add`` and ``abort`` may be called between any two ``iterate`` calls.
    """

    def __init__(self, parts: Parts, seed: int | None) -> None:
        self.info: EngineInfo = parts.info
        self._runner = parts.runner
        self._scheduler: Scheduler = parts.scheduler
        self._overlap = parts.info.schedule == "overlap"
        self._pending: PendingStep | None = None
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
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Stop a request and free what it holds; unknown ids are ignored."""
        self._scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self._pending is not None or self._scheduler.has_work()

    def iterate(self) -> Outputs:
        """One iteration: at most one step and one prefill are launched, at most one step's results read."""
        plan = self._scheduler.schedule()
        for sequence in plan.bind:
            seed = sequence.request.params.seed
            assert seed is not None, "add() gives each request a seed"
            self._runner.bind(sequence, seed)
        self._runner.set_pages(plan.pages)
        launched = self._runner.launch(plan.rows) if plan.rows else None
        if plan.prefill:
            self._runner.prefill(plan.prefill)
        results = self._collect(launched)
        deltas = [self._fail(result) for result in results if _is_fault(result)]
        deltas += self._scheduler.process(results)
        return Outputs(deltas=deltas, stats=self._stats())

    def _fail(self, result: RowResult) -> TokenDelta:
        """End a request whose logits were not finite; its epoch moves on, so nothing of it is kept."""
        flags = Flag(result.flags)
        position = len(result.sequence.tokens)
        error = ErrorInfo("numerical_error", f"the model's output for token {position} is not finite ({flags!r})")
        delta, tainted = self._scheduler.fail(result.sequence, error)
        if tainted:
            self._runner.scrub(tainted)
        return delta

    def _collect(self, launched: PendingStep | None) -> list[RowResult]:
        """Results to process now: this step's (sync), or the one's before it (overlap)."""
        if self._overlap:
            launched, self._pending = self._pending, launched
        return launched.results() if launched is not None else []

    def _stats(self) -> StepStats:
        return self._scheduler.stats(self._runner.take_forwards())

    def close(self) -> None:
        """Wait for the device and drop what is in flight."""
        self._pending = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _is_fault(result: RowResult) -> bool:
    """A halted row of a request that is still live as it was launched."""
    return bool(result.flags & HALTING) and result.epoch == result.sequence.epoch


def _seed_source(seed: int | None) -> Callable[[], int]:
    """Seeds for requests without one: from the system's entropy, or repeatable from ``seed``."""
    if seed is None:
        return lambda: secrets.randbits(63)
    generator = random.Random(seed)
    return lambda: generator.getrandbits(63)
