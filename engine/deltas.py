"""What a client is told of a result."""

from __future__ import annotations

from engine.sequence import RowResult, Sequence
from engine.types import ErrorInfo, FinishReason, TokenDelta


def make_delta(
    sequence: Sequence,
    kept: list[int],
    reason: FinishReason | None,
    result: RowResult | None = None,
) -> TokenDelta:
    """The delta of ``kept`` tokens; the first one of a sequence tells the facts of its start too.

    Args:
        result: Of the step that emitted them.
    """
    is_first, sequence.has_emitted = not sequence.has_emitted, True
    logprobs = None if result is None else result.logprobs
    stopped = reason == "stop" and bool(kept) and kept[-1] in sequence.stop_ids
    return TokenDelta(
        request_id=sequence.request.request_id,
        token_ids=kept,
        num_drafts=0 if result is None else result.num_drafts,
        num_accepted=0 if result is None else min(result.num_accepted, len(kept)),
        logprobs=None if logprobs is None else logprobs[: len(kept)],
        prompt_logprobs=sequence.prompt_logprobs if is_first else None,
        finish_reason=reason,
        stop_token_id=kept[-1] if stopped else None,
        num_cached_tokens=sequence.num_cached_tokens if is_first else 0,
        scheduled_time=sequence.scheduled_time if is_first else None,
        error=_dead_end(sequence) if reason == "error" else None,
    )


def _dead_end(sequence: Sequence) -> ErrorInfo:
    spec = sequence.request.params.grammar
    message = "no token of the model can continue the output as the grammar wants it"
    return ErrorInfo("invalid_request", message, spec.param if spec is not None else None)
