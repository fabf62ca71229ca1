"""The live audit: right outputs pass, a changed token is found where it stands, and users never wait for it."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.audit import MAX_ATTEMPTS
from engine.engine import Engine
from engine.errors import RequestError
from engine.options import EngineOptions
from engine.types import Outputs, Request, SamplingParams, TokenDelta
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
