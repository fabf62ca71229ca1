"""One HTTP request as ``prompts x n`` requests of the engine, and their deltas merged into one stream.

Calls made on the metrics (`ServiceMetrics`), all per choice: ``request_started()`` when it is handed to the
engine; ``queue_time(s)`` with its first delta; ``first_token(s)`` and ``inter_token(gap, n)`` as tokens come;
``tokens(n)`` and, for each kept step with drafts, ``spec_step(num_drafts=, num_accepted=)``;
``request_finished(outcome, s)`` exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple

import structlog

from engine.client import EngineClient, TokenStream
from engine.errors import EngineDeadError
from engine.types import FinishReason, Request, TokenDelta, TokenLogprobs
from service.detokenize import ChoiceText
from service.errors import ApiError, engine_dead, from_engine, internal_error, unavailable
from service.metrics import ServiceMetrics
from service.responses import Timing
from service.spec_stats import SpecStats

KeptReason = Literal["stop", "length"]

_log = structlog.get_logger(__name__)


class ChoicePlan(NamedTuple):
    """One choice to generate."""

    request: Request
    text: ChoiceText
    prompt_index: int
    stop_token_ids: frozenset[int]
    """Those that the client named, without the model's end of sequence."""


class ChoiceDelta(NamedTuple):
    """What is new in one choice."""

    choice: int
    """Index of the choice in the response."""
    text: str
    token_ids: Sequence[int]
    """Kept ids."""
    logprobs: Sequence[TokenLogprobs] | None
    offsets: Sequence[int] | None
    finish_reason: KeptReason | None
    stop_reason: str | int | None
    """The stop string, or the id of the client's ``stop_token_ids``, that ended the choice."""
    num_accepted: int = 0
    """How many of the kept ids were accepted drafts, always the first."""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """In the first delta, where asked for: of the prompt's tokens but the first."""


class Choice:
    """State of one choice: what was kept of it so far."""

    def __init__(self, index: int, plan: ChoicePlan, stats: SpecStats, metrics: ServiceMetrics) -> None:
        self.index = index
        self.prompt_index = plan.prompt_index
        self.request = plan.request
        self.trace_id: str | None = None
        """Of the trace that the request belongs to and that is recorded."""
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.started = False
        self.outcome: FinishReason | None = None
        """How the choice ended."""
        self.scheduled_time: float | None = None
        self.first_time: float | None = None
        self.last_time = 0.0
        """Times of the first and the last token (monotonic)."""
        self._text = plan.text
        self._stop_token_ids = plan.stop_token_ids
        self._stats = stats
        self._metrics = metrics

    @property
    def finished(self) -> bool:
        return self.outcome is not None

    def start(self) -> None:
        """Count the choice: it was handed to the engine."""
        self.started = True
        self._metrics.request_started()

    def take(self, delta: TokenDelta) -> ChoiceDelta:
        """What to keep of ``delta``. Raises ``ApiError`` if the engine ended the request with an error."""
        now = time.monotonic()
        arrival = self.request.arrival_time
        if delta.scheduled_time is not None:
            self.num_cached_tokens = delta.num_cached_tokens
            self.scheduled_time = delta.scheduled_time
            self._metrics.queue_time(delta.scheduled_time - arrival)
        reason = _kept_reason(delta)
        piece = self._text.push(
            delta.token_ids, stopped=delta.stop_token_id is not None, final=reason is not None
        )
        kept = piece.num_tokens
        self._count(delta, kept, now)
        stop_reason: str | int | None = self._text.matched_stop
        if stop_reason is not None:
            reason = "stop"
        elif delta.stop_token_id in self._stop_token_ids:
            stop_reason = delta.stop_token_id
        if reason is not None:
            self.end(reason)
        whole = kept == len(delta.token_ids)
        return ChoiceDelta(
            self.index,
            piece.text,
            delta.token_ids if whole else delta.token_ids[:kept],
            delta.logprobs if whole or delta.logprobs is None else delta.logprobs[:kept],
            piece.offsets,
            reason,
            stop_reason,
            min(delta.num_accepted, kept),
            delta.prompt_logprobs,
        )

    def end(self, outcome: FinishReason) -> None:
        """Count the end of the choice; only the first call does."""
        if not self.finished:
            self.outcome = outcome
            self._metrics.request_finished(
                outcome, time.monotonic() - self.request.arrival_time, self.trace_id
            )

    def _count(self, delta: TokenDelta, kept: int, now: float) -> None:
        if not kept:
            return
        metrics = self._metrics
        metrics.tokens(kept)
        if self.num_tokens:
            metrics.inter_token(now - self.last_time, kept)
        else:
            self.first_time = now
            metrics.first_token(now - self.request.arrival_time, self.trace_id)
            if kept > 1:
                metrics.inter_token(0.0, kept - 1)
        self.num_tokens += kept
        self.last_time = now
        if delta.num_drafts:
            num_accepted = min(delta.num_accepted, kept)
            self._stats.add(delta.num_drafts, num_accepted)
            metrics.spec_step(num_drafts=delta.num_drafts, num_accepted=num_accepted)


def _kept_reason(delta: TokenDelta) -> KeptReason | None:
    reason = delta.finish_reason
    if reason == "error":
        raise from_engine(delta.error)
    if reason == "abort":
        raise unavailable("The request was aborted by the server.", "aborted")
    return reason


class Generation:
    """The choices of one HTTP request, from submission to their end.

    Iterate ``batches()`` once, inside ``aclosing``: leaving it, in whatever way, aborts what still runs.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: ServiceMetrics,
        plans: Sequence[ChoicePlan],
        num_speculative_tokens: int,
    ) -> None:
        """
        Args:
            client: A started client.
            metrics: See the module.
            plans: The choices, prompt-major: the ``n`` choices of the first prompt, then those of the next.
            num_speculative_tokens: K of the engine.
        """
        self._client = client
        self.spec_stats = SpecStats(num_speculative_tokens)
        self.choices = [Choice(i, plan, self.spec_stats, metrics) for i, plan in enumerate(plans)]
        self._queue: asyncio.Queue[ChoiceDelta | ApiError] = asyncio.Queue()
        self.error: ApiError | None = None
        """Why it failed."""

    @property
    def num_completion_tokens(self) -> int:
        """Tokens kept so far, over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache: of each prompt, those of its first choice."""
        first_of = {choice.prompt_index: choice for choice in reversed(self.choices)}
        return sum(choice.num_cached_tokens for choice in first_of.values())

    def timing(self) -> Timing:
        """Where the time went so far."""
        arrival = self.choices[0].request.arrival_time
        scheduled = [c.scheduled_time for c in self.choices if c.scheduled_time is not None]
        spans = [(c.first_time, c.last_time) for c in self.choices if c.first_time is not None]
        num_later = sum(max(0, choice.num_tokens - 1) for choice in self.choices)
        return Timing(
            queue_time=max(0.0, max(scheduled) - arrival) if scheduled else None,
            time_to_first_token=min(first for first, _ in spans) - arrival if spans else None,
            inter_token_latency=sum(last - first for first, last in spans) / num_later if num_later else None,
            e2e_latency=max(last for _, last in spans) - arrival if spans else None,
        )

    def fail(self, error: ApiError) -> None:
        """End the generation with an error, as far as its reader is concerned."""
        self._queue.put_nowait(error)

    async def batches(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """What is new, in batches of whatever has come since the last; each choice's deltas in order.

        Raises:
            ApiError: The engine refused a request, failed, died, or ``fail`` was called.
        """
        tasks: list[asyncio.Task[None]] = []
        try:
            streams = self._submit()
            pairs = zip(self.choices, streams, strict=True)
            tasks = [asyncio.create_task(self._pump(choice, stream)) for choice, stream in pairs]
            unfinished = len(tasks)
            while unfinished:
                batch, error = await self._next_batch()
                unfinished -= sum(delta.finish_reason is not None for delta in batch)
                if batch:
                    yield batch
                if error is not None:
                    raise error
        except EngineDeadError:
            self.error = engine_dead()
            self._end_all("error")
            raise self.error from None
        except ApiError as exc:
            self.error = exc
            self._end_all("error")
            raise
        finally:
            # Ended first: a cancelled pump must not be taken for a failed one.
            self._end_all("abort")
            for task in tasks:
                task.cancel()

    def _submit(self) -> list[TokenStream]:
        streams: list[TokenStream] = []
        for choice in self.choices:
            streams.append(self._client.submit(choice.request))
            choice.start()
        return streams

    async def _next_batch(self) -> tuple[list[ChoiceDelta], ApiError | None]:
        batch: list[ChoiceDelta] = []
        item = await self._queue.get()
        while isinstance(item, ChoiceDelta):
            batch.append(item)
            if self._queue.empty():
                return batch, None
            item = self._queue.get_nowait()
        return batch, item

    async def _pump(self, choice: Choice, stream: TokenStream) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    self._queue.put_nowait(choice.take(delta))
                    if choice.finished:
                        return
            raise internal_error()
        except ApiError as exc:
            self._queue.put_nowait(exc)
        except EngineDeadError:
            self._queue.put_nowait(engine_dead())
        except Exception:
            _log.exception("generation_failed", request_id=choice.request.request_id)
            self._queue.put_nowait(internal_error())

    def _end_all(self, outcome: FinishReason) -> None:
        for choice in self.choices:
            if choice.started and not choice.finished:
                choice.end(outcome)
                self._client.abort(choice.request.request_id)
