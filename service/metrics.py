"""Every metric of Eyas: names, labels, meaning, and the calls that feed them.

The engine's own numbers come with each iteration (`EngineMetrics.engine_step`); what depends on the text
that was kept (tokens, speculative statistics, latencies) comes from the request handling. No feeding call
ever raises: see `never_raises`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import Counter

from engine.options import MAX_SPECULATIVE_TOKENS
from engine.types import FinishReason
from service.accept_window import AcceptLengthWindow
from service.engine_metrics import EngineMetrics
from service.metric_registry import describe, never_raises

Outcome = FinishReason
HttpMethod = Literal["GET", "POST", "other"]

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{model:path}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/dashboard",
    "/dashboard/{name}",
)
OTHER = "other"
"""Label value for whatever is not known: what a client chooses must not make new series."""

_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_INTER_TOKEN_BUCKETS = (
    0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05,
    0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip


class ServiceMetrics(EngineMetrics):
    """The registry of one service process and the calls that feed it. All times are in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: Monotonic seconds, for the window of the accept-length gauge.
        """
        super().__init__()
        self._window = AcceptLengthWindow(clock)
        self._define_speculation()
        self._define_requests()

    def _define_speculation(self) -> None:
        kept = "Only what was kept counts: not what a stop, an end of sequence or a cap cut off."
        self._drafts = self._counter(
            "spec_drafts_total", f"Speculative steps of a request that verified a draft; per step. {kept}"
        )
        self._draft_tokens = self._counter(
            "spec_draft_tokens_total", "Draft tokens verified; per token, those of each step added up."
        )
        self._accepted_tokens = self._counter(
            "spec_accepted_tokens_total", f"Draft tokens accepted and emitted; per token. {kept}"
        )
        at_position = "at each position of the step's drafts; per token. Position 0 is the first draft."
        self._drafted_at = self._counter(
            "spec_draft_tokens_per_position_total", f"Draft tokens verified {at_position}", "position"
        )
        self._accepted_at = self._counter(
            "spec_accepted_tokens_per_position_total", f"Draft tokens accepted {at_position}", "position"
        )
        self._at_position: list[tuple[Counter, Counter]] = []
        self._gauge(
            "spec_accept_length",
            "Mean of accepted drafts + 1 per speculative step, last minute; NaN if none. That is what a step "
            "emits, unless a stop or cap cuts it among its drafts.",
        ).set_function(self._window.mean)
        self._accept_length = self._histogram(
            "spec_accept_length_per_step",
            "Accepted drafts + 1 of a speculative step of a request: what it emits, unless a stop or cap cuts it "
            "among its drafts; one sample per step.",
            tuple(float(length) for length in range(1, MAX_SPECULATIVE_TOKENS + 2)),
        )

    def _define_requests(self) -> None:
        self._started = self._counter(
            "requests_started_total", "Choices handed to the engine; per choice, as requests_total."
        )
        requests = self._counter(
            "requests_total", "Choices ended, by finish reason, abort or error; per choice.", "outcome"
        )
        self._finished = {outcome: requests.labels(outcome) for outcome in get_args(Outcome)}
        self._generation_tokens = self._counter(
            "generation_tokens_total", "Tokens generated and kept; per token."
        )
        self._http_requests = self._counter(
            "http_requests_total", "HTTP requests answered; per request.", "route", "method", "status"
        )
        self._queue_time = self._histogram(
            "queue_time_seconds", "From arrival to first scheduled; one sample per choice.", _LATENCY_BUCKETS
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the arrival of the HTTP request to the first token; one sample per choice with a token.",
            _LATENCY_BUCKETS,
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Time between tokens; one sample per token after the first. A step that gives m tokens after a "
            "gap of t seconds is m samples of t/m, so the sum is the time from the first to the last token.",
            _INTER_TOKEN_BUCKETS,
        )
        self._latency = self._histogram(
            "request_latency_seconds", "From arrival to the end; one sample per choice.", _LATENCY_BUCKETS
        )

    @never_raises
    def http_request(self, route: str, method: str, status: int) -> None:
        """One HTTP request was answered; ``route`` is the route's template, not the client's path."""
        self._http_requests.labels(
            route if route in ROUTES else OTHER,
            method if method in get_args(HttpMethod) else OTHER,
            str(status) if 100 <= status <= 599 else OTHER,
        ).inc()

    @never_raises
    def request_started(self) -> None:
        """One choice was handed to the engine."""
        self._started.inc()

    @never_raises
    def spec_step(self, *, num_drafts: int, num_accepted: int) -> None:
        """One kept step: ``num_accepted`` of ``num_drafts`` drafts were emitted. Without drafts: ignored."""
        if num_drafts == 0:
            return
        if not 0 <= num_accepted <= num_drafts <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(f"{num_accepted} accepted of {num_drafts} drafts")
        self._drafts.inc()
        self._draft_tokens.inc(num_drafts)
        self._accepted_tokens.inc(num_accepted)
        for position in range(len(self._at_position), num_drafts):
            # Together: a position that was drafted but never accepted must show as 0, not be absent.
            self._at_position.append((self._drafted_at.labels(position), self._accepted_at.labels(position)))
        for position in range(num_drafts):
            drafted, accepted = self._at_position[position]
            drafted.inc()
            if position < num_accepted:
                accepted.inc()
        self._accept_length.observe(num_accepted + 1)
        self._window.add(num_accepted)

    @never_raises
    def tokens(self, n: int) -> None:
        """``n`` more tokens were generated and kept."""
        self._generation_tokens.inc(n)

    @never_raises
    def queue_time(self, seconds: float) -> None:
        """A choice was first scheduled this long after its HTTP request arrived."""
        self._queue_time.observe(max(0.0, seconds))

    @never_raises
    def first_token(self, seconds: float, trace_id: str | None = None) -> None:
        """A choice's first token came this long after its HTTP request arrived. Once per choice.

        ``trace_id`` becomes the bucket's exemplar.
        """
        self._first_token.observe(max(0.0, seconds), _exemplar(trace_id))

    @never_raises
    def inter_token(self, seconds_gap: float, n: int) -> None:
        """``n`` tokens came together, ``seconds_gap`` after the choice's previous one.

        Where the first delta has m tokens, the m - 1 after the first are ``inter_token(0.0, m - 1)``.
        """
        share = max(0.0, seconds_gap) / n
        for _ in range(n):
            self._inter_token.observe(share)

    @never_raises
    def request_finished(self, outcome: Outcome, seconds: float, trace_id: str | None = None) -> None:
        """A choice ended, this long after its HTTP request arrived; ``trace_id`` as in ``first_token``."""
        self._finished[outcome].inc()
        self._latency.observe(max(0.0, seconds), _exemplar(trace_id))


def _exemplar(trace_id: str | None) -> dict[str, str] | None:
    return None if trace_id is None else {"trace_id": trace_id}


if __name__ == "__main__":
    print(describe(ServiceMetrics().families), end="")
