"""What crosses the boundary of the engine: requests in, token deltas and step statistics out.

All are frozen ``msgspec.Struct`` types (slotted, typed, encodable), so the same objects serve the in-process
client and the wire between the service and the engine process. Times are ``time.monotonic()`` seconds, which
Linux processes of one machine share.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy: the quotient of logits would overflow long before it mattered."""
FinishReason = Literal["stop", "length", "abort", "error"]
ForwardPhase = Literal["prefill", "draft", "step"]
ForwardPath = Literal["replay", "eager"]
ForwardReason = Literal[
    "none", "prefill", "no_graphs", "above_bucket", "contract", "disabled", "retry", "audit"
]


SyncReason = Literal["grammar", "retry"]
GrammarKind = Literal["json_schema", "regex", "ebnf"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """What the output must match, from its first token on; compiled by the engine before the request is queued."""

    kind: GrammarKind
    text: str
    """A JSON schema, a regular expression for the whole output, or an EBNF grammar with the rule ``root``."""
    param: str = "grammar"
    """The request field to name in errors."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. The service validates; the engine honours exactly.

    Logits are processed in this order: ``grammar`` mask, ``logit_bias``, ``min_tokens`` mask, repetition,
    frequency and presence penalties, temperature, ``min_p``, ``top_k``, ``top_p``.
    """

    max_tokens: int
    """Most tokens to emit; the context end may come first (both finish with "length"). 0: the prompt is only
    prefilled, for its ``prompt_logprobs``."""
    min_tokens: int = 0
    """No id of ``stop_token_ids`` can be chosen before this many tokens were emitted."""
    temperature: float = 1.0
    """0 is greedy: the argmax of the processed logits."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """Any int64. ``None``: the engine draws one from the system's entropy."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request, the model's end-of-sequence ids included (the service leaves those out for
    ``ignore_eos``). The stopping id is emitted as the last token."""
    logprobs: int | None = None
    """Number of top alternatives (0..20) for each emitted token; ``None``: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first. Such a request computes its whole prompt: it uses no block of
    the prefix cache."""
    grammar: GrammarSpec | None = None
    """The output matches it, or can be continued to match it where a cap or a stop id with a text cuts it short.
    Ids without text (end of sequence, special ones) can be chosen where the match is complete, and only those of
    ``stop_token_ids``; where there are none and nothing else can follow, the request ends with "stop". Excludes
    ``min_tokens``."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. ``n`` choices are ``n`` requests."""

    request_id: str
    """Unique among live requests."""
    prompt_token_ids: list[int]
    """At least one id, each in ``[0, vocab_size)``."""
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    """Lower is served first; equal priorities in order of arrival."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one emitted token under the target's raw distribution (before any processing)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """(id, logprob) of the most probable tokens, best first."""
    rank: int | None = None
    """Place of ``token_id`` by probability, from 1; of prompt tokens only."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """Why a request ended with ``finish_reason="error"``."""

    code: str
    """``invalid_request``, ``numerical_error``, ``engine_dead``, ``unavailable`` (another try may succeed) or
    ``internal_error``."""
    message: str
    param: str | None = None


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave one request; the last one carries ``finish_reason``.

    ``token_ids`` are 1..K+1 new tokens, already cut at a stop id or at ``max_tokens`` (and possibly none in
    the delta of an abort or error). ``num_drafts`` is how many drafts the step verified, 0 where it was not a
    speculative step; ``num_accepted`` is how many of ``token_ids`` were accepted drafts, always the first.
    Who cuts the tail later (a stop string) keeps ``min(num_accepted, tokens kept)``.
    """

    request_id: str
    token_ids: list[int]
    num_drafts: int = 0
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """In a request's first delta, where asked for: of prompt tokens 1, 2, ... (the first has none)."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id that stopped the request (also the last of ``token_ids``)."""
    num_cached_tokens: int = 0
    """In a request's first delta: prompt tokens whose KV came from the prefix cache."""
    scheduled_time: float | None = None
    """In a request's first delta: when it first left the queue (monotonic seconds)."""
    error: ErrorInfo | None = None


class ForwardCount(msgspec.Struct, frozen=True):
    """Forwards of one kind since the last statistics (I6: every forward is counted)."""

    phase: ForwardPhase
    path: ForwardPath
    reason: ForwardReason
    count: int


class Count(msgspec.Struct, frozen=True):
    """An increment of one of the engine's own counters; the service names and describes them."""

    name: str
    labels: tuple[str, ...]
    value: int


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """State after, and counts since, one engine iteration. Counts are increments, never negative."""

    requests_running: int
    requests_waiting: int
    pages_used: int
    pages_cached: int
    pages_free: int
    forwards: list[ForwardCount]
    prompt_tokens: int = 0
    """Prompt tokens of requests admitted for the first time (cached ones included)."""
    prefix_cache_queried_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    preemptions: int = 0
    counts: list[Count] = []
    sync_steps: dict[SyncReason, int] = {}
    """Steps of the overlapped schedule that had to wait for the step before them."""
    graphs_disabled: dict[str, int] = {}
    """State: captured graphs of each phase that are not replayed any more."""
    step_gpu_seconds: list[float] = []
    """Of each step whose results were read: how long the device worked on it (on a CPU: its call)."""
    step_host_gap_seconds: list[float] = []
    """Of each step that followed another at once: how long the device waited for its launch."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine resolved at start; the service validates requests with it."""

    model_type: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_speculative_tokens: int
    num_pages: int
    page_size: int
    max_request_tokens: int
    """Longest prompt + output that the pool can ever hold (<= ``max_model_len``)."""
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    attention_backend: str
    schedule: str
    resolved: dict[str, str]
    """Every resolved option as text, for the start-up print."""
    graphs_captured: dict[str, list[int]] = {}
    """Row counts of the captured graphs of each phase; empty without graphs."""
    graph_capture_seconds: float = 0.0
    graph_memory_bytes: int = 0
    """What capturing took from the device's memory."""


# --- messages, service -> engine ---------------------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    request: Request


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """Stop a request and free what it holds. The engine sends no further delta for it."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the engine process after the current iteration; running requests are dropped."""


ToEngine = AddRequest | AbortRequest | Shutdown

# --- messages, engine -> service ---------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Where the start stands: ``stage`` is loading, warming or capturing."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """One iteration's deltas and statistics."""

    deltas: list[TokenDelta]
    stats: StepStats


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent by the engine's loop at least once a second, idle or busy; needs no forward pass."""

    time: float


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on; the process exits after this."""

    message: str


FromEngine = Progress | Ready | Outputs | Heartbeat | Fatal
