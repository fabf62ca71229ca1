"""The live audit: right outputs pass, a changed token is found where it stands, and users never wait for it."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.audit import (
    AUDIT_PREFIX,
    AUDIT_PRIORITY,
    MARGINS,
    MAX_ATTEMPTS,
    MAX_QUEUED,
    MAX_QUEUED_TOKENS,
    Auditor,
    is_audit,
    is_eligible,
)
from engine.engine import Engine
from engine.errors import RequestError
from engine.options import EngineOptions
from engine.types import (
    ErrorInfo,
    GrammarSpec,
    Outputs,
    Request,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from tests.engine.drive import Answer, check_pages, collect, finish, greedy, request
from tests.fixtures.checkpoints import F1

SCHEDULES = ["sync", "overlap"]
K = 3


class AuditedEngine(Engine):
    """Remembers what was counted of audits and which were started; ``tamper`` changes what the auditor is told."""

    tamper: Callable[[TokenDelta], TokenDelta]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.started: list[str] = []
        self.tamper = lambda delta: delta
        observe, due = self._auditor.observe, self._auditor.due

        def record() -> Request | None:
            audit = due()
            self.started += [] if audit is None else [audit.request_id]
            return audit

        self._auditor.observe = lambda delta: observe(self.tamper(delta))  # type: ignore[method-assign]
        self._auditor.due = record  # type: ignore[method-assign]

    def iterate(self) -> Outputs:
        outputs = super().iterate()
        for one in outputs.stats.counts:
            if one.name.startswith("audit"):
                self.seen[one.name, one.labels] += one.value
        return outputs


def audited(path: Path, **options: Any) -> AuditedEngine:
    defaults: dict[str, Any] = {
        "model": str(path),
        "device": "cpu",
        "threads": 1,
        "max_num_seqs": 8,
        "kv_page_size": 8,
        "num_kv_pages": 200,
        "audit_rate": 1.0,
    }
    engine = AuditedEngine.load(EngineOptions(**defaults | options), lambda _: None)
    assert isinstance(engine, AuditedEngine)
    return engine


def prompts(vocab: int, count: int) -> list[list[int]]:
    generator = random.Random(count)
    return [[generator.randrange(2, vocab) for _ in range(1 + 5 * i)] for i in range(count)]


def answers_of(engine: Engine, given: list[list[int]], params: SamplingParams) -> dict[str, Answer]:
    for index, prompt in enumerate(given):
        engine.add(request(str(index), prompt, params))
    return finish(engine)


# --- with an engine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("k", [0, K])
def test_right_output_has_no_mismatch(f1_wrong: F1, f2: Path, k: int, schedule: str) -> None:
    """F1 has accepted runs of all lengths; F2 attends to the whole prompt, and its best tokens are close."""
    for path, vocab in ((f1_wrong.path, 64), (f2, 96)):
        engine = audited(path, num_speculative_tokens=k, schedule=schedule, prefill_chunk_size=16)
        answers = answers_of(engine, prompts(vocab, 6), greedy(25))
        assert all(name.isdigit() for name in answers), "an audit is nobody's to see"
        emitted = sum(len(answer.token_ids) for answer in answers.values())
        assert engine.seen == {("audits", ("scored",)): 6, ("audit_tokens", ()): emitted}
        if k and path == f1_wrong.path:
            assert {accepted for answer in answers.values() for _, _, accepted in answer.steps} == {
                0,
                1,
                2,
                3,
            }
        check_pages(engine)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("place", range(K + 1))
def test_a_changed_token_is_found_at_its_position(
    f1: F1, schedule: str, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Every draft of F1 is right, so a step emits K + 1 tokens. The token after a wrong one is wrong as well: it
    follows what was there before."""
    engine = audited(f1.path, num_speculative_tokens=K, schedule=schedule)
    walk = f1.walk(5, 12)
    changed = next(token for token in range(2, 64) if token not in walk)

    def tamper(delta: TokenDelta) -> TokenDelta:
        if delta.token_ids[place : place + 1] != [walk[4 + place]]:
            return delta
        ids = [*delta.token_ids[:place], changed, *delta.token_ids[place + 1 :]]
        return TokenDelta(
            request_id=delta.request_id, token_ids=ids, num_drafts=K, finish_reason=delta.finish_reason
        )

    engine.tamper = tamper
    with caplog.at_level(logging.ERROR, "engine.audit"):
        answers = answers_of(engine, [[7, 5]], greedy(12))
    assert answers["0"].token_ids == walk
    assert engine.seen[("audit_tokens", ())] == 12
    wrong = {labels[0]: n for (name, labels), n in engine.seen.items() if name == "audit_mismatches"}
    assert wrong == {str(place): 1, str((place + 1) % (K + 1)): 1}
    [record] = caplog.records
    assert f"first output token {4 + place}, at position {place} of its run: id {changed}," in record.message


def test_answers_are_those_of_an_engine_without_audits(f2: Path) -> None:
    given = prompts(96, 5)
    plain = Engine.load(
        EngineOptions(model=str(f2), device="cpu", threads=1, max_num_seqs=8, num_kv_pages=64), lambda _: None
    )
    expected = answers_of(plain, given, greedy(20))
    found = answers_of(audited(f2), given, greedy(20))
    assert {name: answer.token_ids for name, answer in found.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }


def test_an_audit_uses_no_cached_kv_and_counts_as_nobodys_prompt(f1: F1) -> None:
    engine = audited(f1.path, num_speculative_tokens=K)
    prompt = [2 + i for i in range(40)]
    total: Counter[str] = Counter()
    forwards: Counter[str] = Counter()
    engine.add(request("a", prompt, greedy(20)))
    running = []
    while engine.has_work():
        stats = engine.iterate().stats
        running.append((stats.requests_running, stats.requests_waiting))
        forwards.update({one.reason: one.count for one in stats.forwards if one.phase == "prefill"})
        total["prompt"] += stats.prompt_tokens
        total["queried"] += stats.prefix_cache_queried_tokens
        total["checked"] += sum(
            one.value
            for one in stats.counts
            if one.name == "nan_guard_rows_checked" and one.labels == ("prefill",)
        )
    assert total == {"prompt": 40, "queried": 40, "checked": 39 + 59}
    assert forwards == {"prefill": 1, "audit": 1}
    assert running[-1] == (0, 0) and running == sorted(running, reverse=True), "an audit counts as a request"
    assert engine.seen[("audit_tokens", ())] == 20


def test_ids_of_audits_are_not_for_users(f1: F1) -> None:
    engine = audited(f1.path)
    with pytest.raises(RequestError, match="audit:1"):
        engine.add(request("audit:1", [5], greedy(1)))
    assert not engine.has_work()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_request_that_fills_the_context_is_audited(f1: F1, schedule: str) -> None:
    for pages in (200, 10):  # the pool bounds the second
        engine = audited(f1.path, schedule=schedule, max_model_len=64, num_kv_pages=pages)
        longest = engine.info.max_request_tokens
        answers = answers_of(engine, [[5] * 30], greedy(longest - 30))
        assert len(answers["0"].token_ids) == longest - 30
        assert engine.seen == {("audits", ("scored",)): 1, ("audit_tokens", ()): longest - 30}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_audit_gives_way_to_a_request_and_is_done_later(f1: F1, schedule: str) -> None:
    engine = audited(f1.path, schedule=schedule, prefill_chunk_size=8, num_speculative_tokens=K)
    engine.add(request("long", [5] * 60, greedy(4)))
    answers: dict[str, Answer] = {}
    while not engine.started:
        collect(engine, answers)
    collect(engine, answers)
    assert engine.started == ["audit:1"]
    engine.add(request("user", [7] * 30, greedy(4)))
    iterations = 0
    while "user" not in answers:
        collect(engine, answers)
        iterations += 1
        assert iterations >= 4 or engine.started == ["audit:1"], "an audit runs beside a prefill"
    # Four chunks, the first step, and one iteration more where results are read late: as without the audit
    assert iterations == 4 + 1 + (schedule == "overlap")
    finish(engine)
    assert engine.seen == {("audits", ("scored",)): 2, ("audit_tokens", ()): 8}


def test_an_audit_that_always_gives_way_is_skipped(f1: F1) -> None:
    engine = audited(f1.path, prefill_chunk_size=8)
    engine.add(request("long", [5] * 60, greedy(1)))
    for start in range(1, MAX_ATTEMPTS + 1):
        while len(engine.started) < start:
            engine.iterate()
        engine.add(request(f"user{start}", [7], greedy(1, min_tokens=1)))  # is not audited itself
    finish(engine)
    assert engine.seen == {("audits", ("skipped",)): 1}


def test_an_audit_waits_for_a_free_slot_and_for_who_waits(f1: F1) -> None:
    engine = audited(f1.path, max_num_seqs=2, num_speculative_tokens=K)
    for index in range(4):
        engine.add(request(str(index), [5, 6 + index], greedy(8 * (index + 1))))
    answers: dict[str, Answer] = {}
    while sum(answer.finish_reason is not None for answer in answers.values()) < 2:
        assert engine.started == []
        collect(engine, answers)
    finish(engine)
    assert engine.seen[("audits", ("scored",))] == 4


def test_audits_and_requests_share_a_pool_that_is_too_small_for_all(f2: Path) -> None:
    engine = audited(f2, num_kv_pages=14, prefill_chunk_size=8)
    given = prompts(96, 6)
    answers: dict[str, Answer] = {}
    for index, prompt in enumerate(given):
        engine.add(request(str(index), prompt, greedy(30)))
        for _ in range(9):
            collect(engine, answers)
    while engine.has_work():
        collect(engine, answers)
    assert all(len(answer.token_ids) == 30 for answer in answers.values())
    outcomes = [engine.seen[("audits", (outcome,))] for outcome in ("scored", "skipped", "failed")]
    assert sum(outcomes) == 6 and outcomes[0] > 0 and outcomes[2] == 0
    assert not any(name == "audit_mismatches" for name, _ in engine.seen)
    check_pages(engine)


def test_what_an_aborted_request_got_is_audited(f1: F1) -> None:
    engine = audited(f1.path, num_speculative_tokens=K)
    engine.add(request("a", [5, 6], greedy(40)))
    engine.add(request("b", [5, 7], greedy(40)))
    engine.abort("b")  # before its first token
    answers: dict[str, Answer] = {}
    while "a" not in answers:
        collect(engine, answers)
    engine.abort("a")
    finish(engine)
    assert engine.seen == {("audits", ("scored",)): 1, ("audit_tokens", ()): len(answers["a"].token_ids)}


# --- alone --------------------------------------------------------------------------------------------------


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
