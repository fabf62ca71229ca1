"""Compiling a grammar: what is refused, and that nobody waits for one without end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from engine.errors import RequestError
from engine.grammar import children
from engine.grammar import compiler as compiler_module
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.walker import Constraint
from engine.types import ErrorInfo, GrammarSpec, Request
from tests.engine.drive import Answer, collect, finish, greedy, make_engine, request
from tests.engine.grammar.support import VOCAB, nested, regex, sampled
from tests.fixtures.checkpoints import F1
from tests.fixtures.tokenizers import EOS_ID


@pytest.fixture(scope="module")
def compiler(flat: F1) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(flat.path, VOCAB, (EOS_ID,), time_limit=2.0)
    yield compiler
    compiler.close()


def _compile(compiler: GrammarCompiler, *specs: GrammarSpec) -> list[Constraint | ErrorInfo]:
    for i, spec in enumerate(specs):
        compiler.submit(
            Request(request_id=str(i), prompt_token_ids=[3], params=sampled(spec), arrival_time=0.0)
        )
    outcomes: dict[str, Constraint | ErrorInfo] = {}
    while compiler.num_waiting:
        compiler.wait(10)
        outcomes |= {taken.request_id: outcome for taken, outcome in compiler.take()}
    return [outcomes[str(i)] for i in range(len(specs))]


BAD = {
    "unclosed group": GrammarSpec("regex", "("),
    "unclosed set": GrammarSpec("regex", "[a"),
    "nothing to repeat": GrammarSpec("regex", "*a"),
    "reversed bounds": GrammarSpec("regex", "a{3,1}"),
    "backreference": GrammarSpec("regex", r"(a)\1"),
    "look-ahead": GrammarSpec("regex", "(?=a)b"),
    "no JSON": GrammarSpec("json_schema", '{"type":'),
    "unknown type": GrammarSpec("json_schema", '{"type": "thing"}'),
    "missing reference": GrammarSpec("json_schema", '{"$ref": "#/x"}'),
    "circular reference": GrammarSpec("json_schema", '{"$ref": "#"}'),
    "matches nothing": GrammarSpec("json_schema", "false"),
    "bad pattern inside": GrammarSpec("json_schema", '{"type": "string", "pattern": "("}'),
    "unclosed string": GrammarSpec("ebnf", 'root ::= "a'),
    "unknown rule": GrammarSpec("ebnf", "root ::= foo"),
    "no root": GrammarSpec("ebnf", 'x ::= "a"'),
    "endless rule": GrammarSpec("ebnf", "root ::= root"),
}


def test_an_abort_while_compiling_ends_the_request(flat: F1) -> None:
    engine = make_engine(flat.path)
    engine.add(request("a", [3, 4], sampled(regex("[a-z]{77}"))))
    assert engine.has_work() and engine.iterate().stats.requests_waiting == 1
    engine.abort("a")
    assert not engine.has_work()
    engine.add(request("a", [3, 4], sampled(regex("[a-z]{77}"), 5)))
    assert len(finish(engine)["a"].token_ids) == 5


def test_a_request_that_cannot_be_served_is_refused_before_it_is_compiled(flat: F1) -> None:
    engine = make_engine(flat.path, max_model_len=64)
    for params, prompt, field in [
        (sampled(regex("a"), min_tokens=3), [3], "min_tokens"),
        (sampled(regex("a" * 70_000)), [3], "grammar"),
        (sampled(regex("a")), [3] * 64, "prompt_token_ids"),
    ]:
        with pytest.raises(RequestError) as error:
            engine.add(request("a", prompt, params))
        assert error.value.param == field
    assert not engine.has_work()


def test_d9_invalid_grammars_are_refused_with_a_reason(compiler: GrammarCompiler) -> None:
    outcomes = _compile(compiler, *BAD.values())
    for name, outcome in zip(BAD, outcomes, strict=True):
        assert isinstance(outcome, ErrorInfo), name
        assert (outcome.code, outcome.param) == ("invalid_request", "grammar"), (name, outcome)
        assert ".cc" not in outcome.message and len(outcome.message) < 400


def test_d9_grammars_without_end_are_ended_and_others_go_on(compiler: GrammarCompiler) -> None:
    bad = [GrammarSpec("json_schema", text) for text in (nested(400), nested(300))]
    *refused, good = _compile(compiler, *bad, regex("ok"))
    for outcome in refused:
        assert isinstance(outcome, ErrorInfo) and outcome.code == "invalid_request", outcome
    assert isinstance(good, Constraint)
    _compile(compiler, *bad)  # known by now: refused without another attempt


def test_hostile_but_harmless_grammars_compile(flat: F1) -> None:
    compiler = GrammarCompiler(flat.path, VOCAB, (EOS_ID,), time_limit=60.0)
    patterns = ["(x+x+)+y", "(((a{1,100}){1,100}){1,100}){1,100}", "(a|aa)+", "", "é|日本|😀"]
    assert all(isinstance(one, Constraint) for one in _compile(compiler, *map(regex, patterns)))


def test_an_interrupted_compilation_can_be_tried_again(flat: F1, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended from outside, or kept from computing: neither says anything of the grammar."""
    compiler = GrammarCompiler(flat.path, VOCAB, (EOS_ID,))

    class Killed(children.Child):
        def receive(self, seconds: float) -> Any:
            self._process.kill()
            self._process.join()
            return super().receive(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(children, "Child", Killed)
        (killed,) = _compile(compiler, regex("[a-z]{3}"))
    with monkeypatch.context() as patch:
        patch.setattr(compiler_module, "PATIENCE", 0)
        (late,) = _compile(compiler, GrammarSpec("json_schema", nested(12)))
    for outcome in (killed, late):
        assert isinstance(outcome, ErrorInfo) and outcome.code == "unavailable" and "again" in outcome.message
    again = _compile(compiler, regex("[a-z]{3}"), GrammarSpec("json_schema", nested(12)))
    assert all(isinstance(outcome, Constraint) for outcome in again)
    compiler.close()


def test_the_engine_answers_others_while_it_compiles(flat: F1) -> None:
    engine = make_engine(flat.path)
    engine._grammars = GrammarCompiler(flat.path, VOCAB, (EOS_ID,), time_limit=1.0)
    engine.add(request("bad", [3, 4], sampled(GrammarSpec("json_schema", nested(400)))))
    engine.add(request("free", [3, 4], greedy(5)))
    answers: dict[str, Answer] = {}
    while "free" not in answers or answers["free"].finish_reason is None:
        collect(engine, answers)
    assert "bad" not in answers
    started = time.monotonic()
    while engine.has_work():
        assert time.monotonic() - started < 60
        collect(engine, answers)
    assert answers["bad"].finish_reason == "error"
    engine.close()


def test_a_vocabulary_of_words_offers_no_structured_output(f1: F1) -> None:
    (outcome,) = _compile(GrammarCompiler(f1.path, 64, (EOS_ID,)), regex("a"))
    assert isinstance(outcome, ErrorInfo) and outcome.code == "invalid_request"


def test_a_failed_attempt_does_not_take_the_next_one_along(compiler: GrammarCompiler) -> None:
    """Two wait for it, and only one of them sees its end in time; then comes a third request, and leaves."""
    spec, failed, second = regex("q+"), Future[str](), Future[str]()
    names = iter("abc")

    def wait_for(future: Future[str]) -> str:
        compiler._compiled.setdefault(spec, future)
        name = next(names)
        compiler.submit(
            Request(request_id=name, prompt_token_ids=[3], params=sampled(spec), arrival_time=0.0)
        )
        return name

    late = wait_for(failed)
    entry = compiler._waiting.pop(late)
    wait_for(failed)
    failed.set_exception(RuntimeError("no luck"))
    assert len(compiler.take()) == 1
    third = wait_for(second)
    compiler._waiting[late] = entry
    assert len(compiler.take()) == 1
    compiler.abort(third)
    assert second.cancelled() and spec not in compiler._compiled
