"""Grammars that are slow to follow: they cost their own requests, and nobody else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import psutil
import pytest

from engine.engine import Engine
from engine.grammar import walker
from engine.grammar.walker import Constraint, GrammarWalker
from engine.types import GrammarSpec, TokenDelta
from tests.engine.drive import Answer, collect, finish, generate, greedy, make_engine, request
from tests.engine.grammar.support import VOCAB, ids, regex, sampled
from tests.fixtures.checkpoints import F1

AMBIGUOUS = GrammarSpec(
    "ebnf", 'root ::= a a a a a a a a\na ::= b* b* b*\nb ::= c c | c | ""\nc ::= a | [a-z ]'
)
"""Each ``a`` can be read in more ways than the one before: a step takes milliseconds, then seconds."""


@contextmanager
def _suspended(engine: Engine, *, slow: bool = False) -> Iterator[None]:
    """Stop a walking process, so that a question has no answer meanwhile."""
    child = engine._grammars.walker(slow=slow)._child
    assert child is not None
    process = psutil.Process(child._process.pid)
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _finish_one(engine: Engine, answers: dict[str, Answer], name: str) -> None:
    started = time.monotonic()
    while name not in answers or answers[name].finish_reason is None:
        assert time.monotonic() - started < 60
        collect(engine, answers)


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_others_step_while_a_grammar_is_followed_and_its_row_goes_on_later(flat: F1, schedule: str) -> None:
    engine = make_engine(flat.path, schedule=schedule)
    params = sampled(regex("[a-z]{40}"), seed=2)
    bound = generate(engine, [[3, 4], [5, 6]], params)
    (free,) = generate(engine, [[7, 8]], greedy(40))
    answers: dict[str, Answer] = {}
    engine.add(request("a", [3, 4], params))
    engine.add(request("b", [5, 6], params))
    while len(answers) < 2:
        collect(engine, answers)
    with _suspended(engine):
        engine.add(request("free", [7, 8], greedy(40)))
        _finish_one(engine, answers, "free")
        assert answers["a"].finish_reason is answers["b"].finish_reason is None
    while engine.has_work():
        collect(engine, answers)
    assert answers["free"].token_ids == free.token_ids
    assert [answers[name].token_ids for name in ("a", "b")] == [one.token_ids for one in bound]


def test_an_abort_while_its_grammar_is_followed_leaves_nothing_behind(flat: F1) -> None:
    engine = make_engine(flat.path)
    params = sampled(regex("[a-z]{40}"), seed=2)
    (alone,) = generate(engine, [[5, 6]], params)
    answers: dict[str, Answer] = {}
    engine.add(request("a", [3, 4], params))
    while "a" not in answers:
        collect(engine, answers)
    with _suspended(engine):
        collect(engine, answers)
        engine.abort("a")
        assert not engine.has_work()
        engine.add(request("b", [5, 6], params))
        for _ in range(3):
            collect(engine, answers)
    assert finish(engine)["b"].token_ids == alone.token_ids


def test_a_walk_that_something_else_ended_is_done_again(flat: F1) -> None:
    engine = make_engine(flat.path)
    params = sampled(regex("[a-z]{40}"), seed=2)
    expected = generate(engine, [[3, 4], [5, 6]], params)
    answers: dict[str, Answer] = {}
    for name, prompt in (("a", [3, 4]), ("b", [5, 6])):
        engine.add(request(name, prompt, params))
    while len(answers) < 2:
        collect(engine, answers)
    with _suspended(engine):
        collect(engine, answers)  # one is asked for now, the other is not
        child = engine._grammars.walker()._child
        assert child is not None
        child._process.kill()
        child._process.join()
    while engine.has_work():
        collect(engine, answers)
    assert [answers[name].token_ids for name in ("a", "b")] == [one.token_ids for one in expected]


def test_a_slow_grammar_is_followed_apart_from_the_others(flat: F1, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walker, "SLOW_SECONDS", 0.02)
    engine = make_engine(flat.path)
    params = sampled(regex("[a-z]{40}"), seed=2)
    (alone,) = generate(engine, [[5, 6]], params)
    bias = {ids("a")[0]: 90.0}
    engine.add(request("hostile", [3, 4], sampled(AMBIGUOUS, stop_token_ids=(), logit_bias=bias)))
    while engine._grammars.walker(slow=True)._asked is None:
        assert engine.has_work(), "it was never followed apart"
        engine.iterate()
    with _suspended(engine, slow=True):
        engine.add(request("good", [5, 6], params))
        answers: dict[str, Answer] = {}
        _finish_one(engine, answers, "good")
    assert answers["good"].token_ids == alone.token_ids
    engine.close()


def _run(engine: Engine, names: int, hostile: int) -> tuple[dict[str, Answer], dict[str, TokenDelta]]:
    """Requests with good grammars and with the ambiguous one at once; also the last deltas."""
    for i in range(hostile):
        bias = {ids("a")[0]: 90.0}
        engine.add(request(f"hostile{i}", [3, 4], sampled(AMBIGUOUS, stop_token_ids=(), logit_bias=bias)))
    for i in range(names):
        engine.add(request(str(i), [3 + i, 4], sampled(regex("[a-z]{40}"), seed=i)))
    answers: dict[str, Answer] = {}
    last: dict[str, TokenDelta] = {}
    started = time.monotonic()
    while engine.has_work():
        assert time.monotonic() - started < 120
        for delta in engine.iterate().deltas:
            answers.setdefault(delta.request_id, Answer()).take(delta)
            last[delta.request_id] = delta
    return answers, last


@pytest.mark.parametrize(("excess", "seconds"), [(0.2, 60.0), (60.0, 0.2)])
def test_only_the_requests_with_a_slow_grammar_end(
    flat: F1, monkeypatch: pytest.MonkeyPatch, excess: float, seconds: float
) -> None:
    """By all the time that they took, or by that of one step, which ends the process for everybody."""
    monkeypatch.setattr(walker, "EXCESS_SECONDS", excess)
    engine = make_engine(flat.path, max_num_seqs=16)
    expected, _ = _run(engine, names=6, hostile=0)
    for slow in (False, True):
        engine._grammars.walker(slow=slow)._time_limit = seconds
    answers, last = _run(engine, names=6, hostile=3)
    for name, answer in expected.items():
        assert answers[name].token_ids == answer.token_ids
    for i in range(3):
        delta = last[f"hostile{i}"]
        assert delta.finish_reason == "error" and delta.error is not None
        assert (delta.error.code, delta.error.param) == ("invalid_request", "grammar")
        assert f"more than {min(excess, seconds)} s" in delta.error.message
    engine.close()


def _ask(walking: GrammarWalker, constraint: Constraint, output: list[int]) -> bool:
    out = np.full((1, -(-VOCAB // 32)), -1, dtype=np.int32)
    return walking.walk(constraint, output, [], out, until=time.monotonic() + 60, alone=True)


def test_what_a_new_process_must_do_again_is_not_charged(flat: F1) -> None:
    engine = make_engine(flat.path)
    generate(engine, [[3, 4]], sampled(AMBIGUOUS, 1))
    grammar = next(iter(engine._grammars._compiled.values())).result()
    walking, constraint = engine._grammars.walker(), Constraint(grammar, ())
    output: list[int] = []
    while constraint.walked < 0.1:
        assert _ask(walking, constraint, output)
        output = [*output, *ids("a")]
    charged = constraint.walked
    walking.close()
    assert _ask(walking, constraint, output) and constraint.walked == charged
    assert _ask(walking, constraint, [*output, *ids("a")]) and constraint.walked > charged
    engine.close()


def test_a_process_that_cannot_be_started_is_nobodys_fault(flat: F1, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(flat.path)
    generate(engine, [[3, 4]], sampled(regex("[a-z]{4}")))
    engine._grammars.walker().close()

    def fail(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(walker.children, "Child", fail)
    engine.add(request("a", [3, 4], sampled(regex("[a-z]{4}"))))
    deltas = [delta for _ in range(5) if engine.has_work() for delta in engine.iterate().deltas]
    assert [delta.error.code for delta in deltas if delta.error is not None] == ["unavailable"]
    assert not engine.has_work()
