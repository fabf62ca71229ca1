"""The auditor by itself: which requests it chooses, what it queues, and what counts as a mismatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.audit import (
    AUDIT_PREFIX,
    AUDIT_PRIORITY,
    MARGINS,
    MAX_QUEUED,
    MAX_QUEUED_TOKENS,
    Auditor,
    is_audit,
    is_eligible,
)
from engine.types import ErrorInfo, GrammarSpec, SamplingParams, TokenDelta, TokenLogprobs
from tests.engine.drive import greedy, request


def make(rate: float = 1.0, dtype: str = "float32", draw: Callable[[], float] = lambda: 0.0) -> Any:
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    return Auditor(rate, dtype, draw, counts, clock=lambda: 3.0), counts


def ended(name: str, *tokens: int) -> TokenDelta:
    return TokenDelta(request_id=name, token_ids=list(tokens), finish_reason="length")


@pytest.mark.parametrize(
    ("changes", "eligible"),
    [
        ({}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": 1e-7}, False),
        ({"max_tokens": 0}, False),
        ({"min_tokens": 1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"grammar": GrammarSpec("regex", "a")}, False),
        ({"stop_token_ids": (1,), "top_k": 2, "top_p": 0.5, "min_p": 0.1, "seed": 4, "logprobs": 3}, True),
    ],
)
def test_which_requests_are_eligible(changes: dict[str, Any], eligible: bool) -> None:
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0} | changes)
    assert is_eligible(params) is eligible
    auditor, _ = make()
    auditor.admit(request("a", [2], params))
    auditor.observe(ended("a", 3))
    assert auditor.has_work() is eligible


@pytest.mark.parametrize(("rate", "chosen"), [(0.0, 0), (0.25, 2), (1.0, 8)])
def test_the_rate_is_the_share_of_the_draws_below_it(rate: float, chosen: int) -> None:
    draws = iter([0.0, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9, 0.999])
    auditor, _ = make(rate, draw=lambda: next(draws))
    for index in range(8):
        auditor.admit(request(str(index), [2], greedy(1)))
        auditor.observe(ended(str(index), 3))
    audits = 0
    while (audit := auditor.due()) is not None:
        audits += 1
        scores = [TokenLogprobs(3, -0.1, [(3, -0.1)])]
        auditor.conclude(
            TokenDelta(
                request_id=audit.request_id, token_ids=[], prompt_logprobs=scores, finish_reason="length"
            )
        )
    assert audits == chosen and not auditor.has_work()


def test_an_audit_is_prompt_and_output_at_the_lowest_priority() -> None:
    auditor, _ = make()
    auditor.admit(request("a", [2, 3], greedy(9, logprobs=2)))
    auditor.observe(TokenDelta(request_id="a", token_ids=[4, 5]))
    assert auditor.due() is None
    auditor.observe(ended("a", 6))
    audit = auditor.due()
    assert audit.prompt_token_ids == [2, 3, 4, 5, 6] and audit.priority == AUDIT_PRIORITY
    assert is_audit(audit.request_id) and audit.request_id.startswith(AUDIT_PREFIX)
    assert (audit.params.max_tokens, audit.params.prompt_logprobs) == (0, 1)
    assert auditor.due() is None, "one at a time"


def judged(dtype: str, logprob: float, best: float) -> int:
    """Mismatches of one output token at ``logprob`` beside another at ``best``."""
    auditor, counts = make(dtype=dtype)
    auditor.admit(request("a", [2], greedy(1)))
    auditor.observe(ended("a", 3))
    audit = auditor.due()
    scores = [TokenLogprobs(3, logprob, [(9, best)])]
    auditor.conclude(
        TokenDelta(request_id=audit.request_id, token_ids=[], prompt_logprobs=scores, finish_reason="length")
    )
    mismatches: int = counts[("audit_mismatches", ("0",))]
    return mismatches


@pytest.mark.parametrize("dtype", sorted(MARGINS))
def test_a_token_within_the_margin_is_no_mismatch(dtype: str) -> None:
    margin = MARGINS[dtype]
    assert judged(dtype, -0.5 - 0.9 * margin, -0.5) == 0
    assert judged(dtype, -0.5 - 1.1 * margin, -0.5) == 1
    assert judged(dtype, float("-inf"), -0.5) == 1
    assert judged(dtype, float("nan"), -0.5) == 1


def test_every_compute_type_has_a_margin() -> None:
    assert set(MARGINS) == {"float32", "float16", "bfloat16"}


def test_failed_requests_are_not_audited_and_failed_audits_say_nothing() -> None:
    auditor, counts = make()
    error = ErrorInfo("numerical_error", "not finite")
    for name in ("bad", "good"):
        auditor.admit(request(name, [2], greedy(4)))
        auditor.observe(TokenDelta(request_id=name, token_ids=[3]))
    auditor.observe(TokenDelta(request_id="bad", token_ids=[], finish_reason="error", error=error))
    auditor.observe(ended("good", 4))
    audit = auditor.due()
    assert audit.prompt_token_ids == [2, 3, 4]
    auditor.conclude(
        TokenDelta(request_id=audit.request_id, token_ids=[], finish_reason="error", error=error)
    )
    assert counts == {("audits", ("failed",)): 1} and not auditor.has_work()


def test_the_queue_is_bounded_in_audits_and_in_tokens() -> None:
    auditor, counts = make()
    for index in range(MAX_QUEUED + 5):
        auditor.admit(request(str(index), [2], greedy(1)))
        auditor.observe(ended(str(index), 3))
    assert counts == {("audits", ("skipped",)): 5}
    auditor, counts = make()
    half = MAX_QUEUED_TOKENS // 2
    for name, length in (("a", half), ("b", half), ("c", 5)):
        auditor.admit(request(name, [2] * length, greedy(1)))
        auditor.observe(ended(name, 3))
    assert counts == {("audits", ("skipped",)): 1}
    assert len(auditor.due().prompt_token_ids) == half + 1
    assert auditor.withdraw() == "audit:1"
    assert len(auditor.due().prompt_token_ids) == half + 1, "who gave way is the next"


def test_a_withdrawn_audit_has_another_id() -> None:
    auditor, _ = make()
    auditor.admit(request("a", [2], greedy(1)))
    auditor.observe(ended("a", 3))
    assert auditor.withdraw() is None
    first = auditor.due()
    assert auditor.withdraw() == first.request_id and auditor.withdraw() is None
    assert auditor.due().request_id != first.request_id
