"""Live audit of losslessness: the output of finished greedy requests, scored again by one ordinary prefill.

Speculation must never change a greedy request's text: each token it emitted is the target's most probable
one behind the tokens before it. An audit asks the target itself. It is a request of the engine's own, prompt and
output as one prompt, that computes every position afresh: no step, draft, captured graph or cached KV is part
of its scores.

Users come first. At most one audit is with the scheduler; it has the lowest priority, starts only while nobody
waits or is prefilled, and gives way as soon as a request arrives. A step waits for one chunk of it at most.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine.types import Request, SamplingParams, TokenDelta

AUDIT_PREFIX: Final = "audit:"
"""Begins the id of every audit; ``Engine.add`` takes no user's request with such an id."""
AUDIT_PRIORITY: Final = 2**63 - 1
"""The last of all priorities that a request can bring with it."""
MARGINS: Final = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""How much more probable (difference of log-probabilities, nats) the target's best token must be for the emitted
one to count as a mismatch, by compute type. A step and a prefill add up in different orders. In bfloat16 logits
of 16 to 32 are 0.125 apart, and each of the two may be off by two such places; float16 has eight times as many.
float32 leaves a few 1e-4. A token from a wrong row or page is off by several nats; in 16 bits so is, now and then,
one where a router found two experts nearly equal: what counts is how many there are."""
MAX_QUEUED: Final = 64
MAX_QUEUED_TOKENS: Final = 1 << 19
"""Prompt and output of all queued audits together: what they hold of the host's memory."""
MAX_ATTEMPTS: Final = 3
"""Starts of an audit that had to give way each time before it is skipped."""

_PLAIN: Final = SamplingParams(max_tokens=0)
_CHANGES_LOGITS: Final = (
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "grammar",
)  # fmt: skip

logger = logging.getLogger(__name__)


def is_audit(request_id: str) -> bool:
    """Whether this is an audit's id."""
    return request_id.startswith(AUDIT_PREFIX)


def is_eligible(params: SamplingParams) -> bool:
    """Whether every token of such a request is the argmax of the target's raw logits, which a prefill computes.

    So: temperature 0, and neither penalties, a bias, ``min_tokens`` nor a grammar, which choose from changed
    logits. Stop ids, top_k, top_p, min_p, seeds and log-probabilities change nothing at temperature 0.
    """
    if params.temperature != 0 or params.max_tokens == 0:
        return False
    return all(getattr(params, name) == getattr(_PLAIN, name) for name in _CHANGES_LOGITS)


@dataclass(slots=True)
class _Record:
    """The output of a sampled request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Of each token: its place in the run that one step emitted, 0..K."""
    attempts: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)


class Auditor:
    """Chooses requests, keeps what they emitted, and judges their scores. Knows nothing of scheduler and device.

    A request counts as finished at a stop id, at a cap, and when it is aborted: that is how the service ends it
    at a stop string, and what it got until then was the user's.

    Args:
        rate: Share of the eligible requests, 0 to 1.
        dtype: Compute type, a key of ``MARGINS``.
        draw: Uniform numbers in [0, 1).
        counts: Where events are counted: ``audit_tokens``, ``audit_mismatches`` by position, ``audits`` by outcome.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        rate: float,
        dtype: str,
        draw: Callable[[], float],
        counts: Counter[tuple[str, tuple[str, ...]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = rate
        self._margin = MARGINS[dtype]
        self._draw = draw
        self._counts = counts
        self._clock = clock
        self._live: dict[str, _Record] = {}
        self._queue: deque[_Record] = deque()
        self._running: _Record | None = None
        self._running_id = ""
        self._serial = 0

    def has_work(self) -> bool:
        """An audit is queued or runs. It ends by itself: each one starts ``MAX_ATTEMPTS`` times at most."""
        return self._running is not None or bool(self._queue)

    @property
    def is_watching(self) -> bool:
        """Some delta may concern it: a chosen request is live, or an audit runs."""
        return bool(self._live) or self._running is not None

    def admit(self, request: Request) -> None:
        """A user's request was queued: draw whether it will be audited."""
        if self._rate > 0 and is_eligible(request.params) and self._draw() < self._rate:
            self._live[request.request_id] = _Record(request)

    def observe(self, delta: TokenDelta) -> None:
        """Take note of what a user's request got."""
        record = self._live.get(delta.request_id)
        if record is None:
            return
        record.token_ids += delta.token_ids
        record.positions += range(len(delta.token_ids))
        if delta.finish_reason == "error":
            del self._live[delta.request_id]
        elif delta.finish_reason is not None:
            self.end(delta.request_id)

    def end(self, request_id: str) -> None:
        """A request ended, or was aborted: queue its audit if it was chosen and emitted anything."""
        record = self._live.pop(request_id, None)
        if record is None or not record.token_ids:
            return
        tokens = record.num_tokens + sum(queued.num_tokens for queued in self._queue)
        if len(self._queue) >= MAX_QUEUED or tokens > MAX_QUEUED_TOKENS:
            self._counts["audits", ("skipped",)] += 1
        else:
            self._queue.append(record)

    def due(self) -> Request | None:
        """The audit to queue now, if none runs. Call it while no user's request waits or is prefilled."""
        if self._running is not None or not self._queue:
            return None
        self._running = record = self._queue.popleft()
        record.attempts += 1
        self._serial += 1
        self._running_id = f"{AUDIT_PREFIX}{self._serial}"
        return Request(
            request_id=self._running_id,
            prompt_token_ids=record.request.prompt_token_ids + record.token_ids,
            params=SamplingParams(max_tokens=0, temperature=0.0, seed=0, prompt_logprobs=1),
            arrival_time=self._clock(),
            priority=AUDIT_PRIORITY,
        )

    def withdraw(self) -> str | None:
        """A user's request is to be queued: the id of the audit that must be aborted for it, if one runs.

        The audit starts anew later, or is skipped if that was its last attempt.
        """
        record, self._running = self._running, None
        if record is None:
            return None
        if record.attempts < MAX_ATTEMPTS:
            self._queue.appendleft(record)
        else:
            self._counts["audits", ("skipped",)] += 1
        return self._running_id

    def conclude(self, delta: TokenDelta) -> None:
        """Judge the scores that the running audit got; one that failed says nothing of its tokens."""
        assert delta.request_id == self._running_id and self._running is not None, "no such audit runs"
        record, self._running = self._running, None
        if delta.prompt_logprobs is None:
            self._counts["audits", ("failed",)] += 1
            reason = "no scores" if delta.error is None else delta.error.message
            logger.warning("audit of %s failed: %s", record.request.request_id, reason)
            return
        scores = delta.prompt_logprobs[len(record.request.prompt_token_ids) - 1 :]
        wrong = []
        for index, score in enumerate(scores):
            best, best_logprob = score.top[0]
            # Not by ">": a score that is no number must not pass
            if best != score.token_id and not best_logprob - score.logprob <= self._margin:
                wrong.append(index)
                self._counts["audit_mismatches", (str(record.positions[index]),)] += 1
        self._counts["audits", ("scored",)] += 1
        self._counts["audit_tokens", ()] += len(scores)
        if wrong:
            first, position = scores[wrong[0]], record.positions[wrong[0]]
            logger.error(
                "audit of %s: %d of %d tokens are not the target's; first output token %d, at position %d of its "
                "run: id %d, %.3g nats behind id %d",
                *(record.request.request_id, len(wrong), len(scores), wrong[0], position, first.token_id),
                *(first.top[0][1] - first.logprob, first.top[0][0]),
            )
