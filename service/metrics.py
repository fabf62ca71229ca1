"""Every metric of Eyas: names, labels, meaning, and the calls that feed them.

The engine's own numbers come with each iteration (`ServiceMetrics.engine_step`); what depends on the text
that was kept (tokens, speculative statistics, latencies) comes from the request handling. No feeding call
ever raises: a failure is counted in ``eyas_metrics_errors_total`` and logged once per call name.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Concatenate, Literal, ParamSpec, get_args

from prometheus_client import Counter

from engine.options import MAX_SPECULATIVE_TOKENS
from engine.types import EngineInfo, FinishReason, StepStats
from service.accept_window import AcceptLengthWindow
from service.engine_counts import ENGINE_COUNTS
from service.metric_registry import MetricRegistry, describe

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
ENGINE_LABELS = (
    "model_type", "device", "dtype", "attention_backend", "schedule", "num_speculative_tokens",
    "max_model_len", "max_num_seqs",
)  # fmt: skip
INFO_LABELS = ("model", "version", *ENGINE_LABELS)
OTHER = "other"
"""Label value for whatever is not known: what a client chooses must not make new series."""

_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_INTER_TOKEN_BUCKETS = (
    0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05,
    0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip

logger = logging.getLogger(__name__)
_P = ParamSpec("_P")


def _never_raises(
    feed: Callable[Concatenate[ServiceMetrics, _P], None],
) -> Callable[Concatenate[ServiceMetrics, _P], None]:
    @functools.wraps(feed)
    def guarded(self: ServiceMetrics, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            feed(self, *args, **kwargs)
        except Exception:
            self._failed(feed.__name__)

    return guarded


class ServiceMetrics(MetricRegistry):
    """The registry of one service process and the calls that feed it. All times are in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: Monotonic seconds, for the window of the accept-length gauge.
        """
        super().__init__()
        self._window = AcceptLengthWindow(clock)
        self._failed_calls: set[str] = set()
        self._define_speculation()
        self._define_engine()
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

    def _define_engine(self) -> None:
        self._forwards = self._counter(
            "forward_total",
            "Forward passes by phase, path and reason; per forward of a whole batch. "
            "A whole-step forward counts once, as step.",
            "phase",
            "path",
            "reason",
        )
        self._running = self._gauge("requests_running", "Requests that hold a slot of the engine.")
        self._waiting = self._gauge("requests_waiting", "Requests in the engine's queue.")
        self._pages = self._gauge("kv_pages", "Pages of the KV pool by state, without scratch.", "state")
        self._prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of requests admitted, cached ones included; per token."
        )
        self._prefix_queried = self._counter(
            "prefix_cache_queried_tokens_total", "Tokens looked up in the prefix cache; per token."
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hit_tokens_total", "Tokens whose KV the prefix cache had; per token."
        )
        self._sync_steps = self._counter(
            "sync_steps_total",
            "Steps of the overlapped schedule that waited for the step before them; per step of a whole batch.",
            "reason",
        )
        self._preemptions = self._counter(
            "preemptions_total", "Requests that lost their slot to make room and wait again; per event."
        )
        self._counts = {
            name: self._counter(f"{name}_total", count.text, *count.labels)
            for name, count in ENGINE_COUNTS.items()
        }
        for name, count in ENGINE_COUNTS.items():
            for values in count.series:
                self._counts[name].labels(*values)
        self._restarts = self._counter(
            "engine_restarts_total", "Attempts to start the engine again after its death; per attempt."
        )
        self._ready = self._gauge("ready", "1 while requests are taken, as /ready tells, else 0.")
        self._info = self._gauge(
            "info", "1 from when the engine is first ready; what is served, as labels.", *INFO_LABELS
        )
        self.engine_down()

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
        self._errors = self._counter(
            "metrics_errors_total", "Recordings of other metrics that failed and were dropped; per call."
        )

    def _failed(self, call: str) -> None:
        self._errors.inc()
        if call not in self._failed_calls:
            self._failed_calls.add(call)
            logger.exception("metrics: %s failed; further failures are only counted", call)

    @_never_raises
    def engine_step(self, stats: StepStats) -> None:
        """Take over one iteration's statistics."""
        self._running.set(stats.requests_running)
        self._waiting.set(stats.requests_waiting)
        self._pages.labels("used").set(stats.pages_used)
        self._pages.labels("cached").set(stats.pages_cached)
        self._pages.labels("free").set(stats.pages_free)
        for forward in stats.forwards:
            self._forwards.labels(forward.phase, forward.path, forward.reason).inc(forward.count)
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._prefix_queried.inc(stats.prefix_cache_queried_tokens)
        self._prefix_hits.inc(stats.prefix_cache_hit_tokens)
        self._preemptions.inc(stats.preemptions)
        for reason, count in stats.sync_steps.items():
            self._sync_steps.labels(reason).inc(count)
        for one in stats.counts:
            counter = self._counts[one.name]
            (counter.labels(*one.labels) if one.labels else counter).inc(one.value)

    @_never_raises
    def watch_ready(self, ready: Callable[[], bool]) -> None:
        """Where ``eyas_ready`` asks, at each scrape."""
        self._ready.set_function(lambda: float(ready()))

    @_never_raises
    def engine_ready(self, model: str, version: str, info: EngineInfo) -> None:
        """The engine can take requests; tells what it resolved."""
        self._info.clear()
        self._info.labels(
            model=model, version=version, **{name: str(getattr(info, name)) for name in ENGINE_LABELS}
        ).set(1)

    @_never_raises
    def engine_restart(self) -> None:
        """An attempt to start the engine again begins."""
        self._restarts.inc()

    @_never_raises
    def engine_down(self) -> None:
        """The engine is gone, and with it everything that its gauges told."""
        self._running.set(0)
        self._waiting.set(0)
        for state in ("used", "cached", "free"):
            self._pages.labels(state).set(0)

    @_never_raises
    def http_request(self, route: str, method: str, status: int) -> None:
        """One HTTP request was answered; ``route`` is the route's template, not the client's path."""
        self._http_requests.labels(
            route if route in ROUTES else OTHER,
            method if method in get_args(HttpMethod) else OTHER,
            str(status) if 100 <= status <= 599 else OTHER,
        ).inc()

    @_never_raises
    def request_started(self) -> None:
        """One choice was handed to the engine."""
        self._started.inc()

    @_never_raises
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

    @_never_raises
    def tokens(self, n: int) -> None:
        """``n`` more tokens were generated and kept."""
        self._generation_tokens.inc(n)

    @_never_raises
    def queue_time(self, seconds: float) -> None:
        """A choice was first scheduled this long after its HTTP request arrived."""
        self._queue_time.observe(max(0.0, seconds))

    @_never_raises
    def first_token(self, seconds: float, trace_id: str | None = None) -> None:
        """A choice's first token came this long after its HTTP request arrived. Once per choice.

        ``trace_id`` becomes the bucket's exemplar.
        """
        self._first_token.observe(max(0.0, seconds), _exemplar(trace_id))

    @_never_raises
    def inter_token(self, seconds_gap: float, n: int) -> None:
        """``n`` tokens came together, ``seconds_gap`` after the choice's previous one.

        Where the first delta has m tokens, the m - 1 after the first are ``inter_token(0.0, m - 1)``.
        """
        share = max(0.0, seconds_gap) / n
        for _ in range(n):
            self._inter_token.observe(share)

    @_never_raises
    def request_finished(self, outcome: Outcome, seconds: float, trace_id: str | None = None) -> None:
        """A choice ended, this long after its HTTP request arrived; ``trace_id`` as in ``first_token``."""
        self._finished[outcome].inc()
        self._latency.observe(max(0.0, seconds), _exemplar(trace_id))


def _exemplar(trace_id: str | None) -> dict[str, str] | None:
    return None if trace_id is None else {"trace_id": trace_id}


if __name__ == "__main__":
    print(describe(ServiceMetrics().families), end="")
