"""Structured output (field notes B18, D9): a mask on the target's logits, exact under speculation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from scipy import stats

from engine.engine import Engine
from engine.grammar import job
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.matcher import Matcher
from engine.grammar.walker import Constraint, GrammarWalker
from engine.types import ErrorInfo, GrammarSpec, Request, SamplingParams
from tests.engine.drive import Answer, collect, finish, generate, greedy, make_engine, request
from tests.fixtures.checkpoints import F1, build_f1
from tests.fixtures.tokenizers import BOS_ID, EOS_ID

ROOT = Path(__file__).parents[2]
VOCAB = 300
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 1, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "next"],
}
JSON_SCHEMA = GrammarSpec("json_schema", json.dumps(SCHEMA))


def _regex(pattern: str) -> GrammarSpec:
    return GrammarSpec("regex", pattern)


def _ids(text: str) -> list[int]:
    return [2 + byte for byte in text.encode()]


def _text(token_ids: list[int]) -> str:
    return bytes(token - 2 for token in token_ids if 2 <= token < 258).decode(errors="replace")


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> F1:
    """Every byte nearly equally probable after every other, with a slight favour for text: grammars do the work."""
    logits = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return build_f1(
        tmp_path_factory.mktemp("flat") / "m",
        vocab=VOCAB, tokenizer="bytes", next_probs={i: row.tolist() for i, row in enumerate(probs)},
    )  # fmt: skip


def _sampled(spec: GrammarSpec | None, max_tokens: int = 400, **changes: Any) -> SamplingParams:
    stops = changes.pop("stop_token_ids", (EOS_ID,))
    return SamplingParams(max_tokens=max_tokens, grammar=spec, stop_token_ids=stops, **changes)


def _assert_valid(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags", "next"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 6
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert 1 <= len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "bb", "ccc"}
    assert value["next"] in (None, True, False)


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("k", [0, 3])
def test_b18_every_output_at_temperature_1_is_valid_json_of_the_schema(
    flat: F1, k: int, schedule: str
) -> None:
    engine = make_engine(
        flat.path, num_speculative_tokens=k, schedule=schedule, max_num_seqs=32, num_kv_pages=1200, seed=k
    )
    free = SamplingParams(max_tokens=30, seed=11)
    alone = generate(engine, [[5, 6, 7]], free)[0]
    for i in range(50):
        engine.add(request(f"json{i}", [2 + i, 3 + i, 4 + i], _sampled(JSON_SCHEMA)))
        if i % 10 == 0:
            engine.add(request(f"free{i}", [5, 6, 7], free))
    answers = finish(engine)
    for name, answer in answers.items():
        if name.startswith("free"):
            assert answer.token_ids == alone.token_ids
            continue
        assert (answer.finish_reason, answer.stop_token_id) == ("stop", EOS_ID)
        assert answer.token_ids.count(EOS_ID) == 1 and answer.token_ids[-1] == EOS_ID
        _assert_valid(_text(answer.token_ids))


def test_a_neighbour_with_a_grammar_changes_nothing_for_a_greedy_one(f1: F1, flat: F1) -> None:
    engine = make_engine(flat.path, schedule="overlap")
    alone = generate(engine, [[9, 8, 7]], greedy(40))[0].token_ids
    engine.add(request("free", [9, 8, 7], greedy(40)))
    engine.add(request("bound", [9, 8, 7], _sampled(_regex("[a-c]{10,20}"))))
    answers = finish(engine)
    assert answers["free"].token_ids == alone
    assert re.fullmatch("[a-c]{10,20}", _text(answers["bound"].token_ids))


def test_steps_that_wait_for_the_step_before_them_are_counted(flat: F1) -> None:
    counts = {}
    for schedule in ("sync", "overlap"):
        engine = make_engine(flat.path, schedule=schedule, num_speculative_tokens=0)
        engine.add(request("a", [4, 5], _sampled(_regex("[ab]{10}"))))
        counts[schedule] = 0
        while engine.has_work():
            counts[schedule] += engine.iterate().stats.sync_steps.get("grammar", 0)
    assert counts == {"sync": 0, "overlap": 11}  # ten letters and the end of sequence


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> F1:
    """Greedy output after ``>`` is ``abcabcab...``: a cycle through the letters first."""
    return build_f1(
        tmp_path_factory.mktemp("words") / "m",
        vocab=VOCAB, tokenizer="bytes", cycle_start=_ids(">abcdefgh"),
    )  # fmt: skip


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("length", range(1, 9))
def test_b18_a_grammar_that_ends_inside_an_accepted_run_ends_the_request(
    words: F1, k: int, length: int
) -> None:
    """The drafts are right, so the run would go on; only the end of sequence may follow."""
    engine = make_engine(words.path, num_speculative_tokens=k)
    spec = _regex("abcdefgh"[:length])
    (answer,) = generate(engine, [_ids("x>")], greedy(50, grammar=spec, stop_token_ids=(EOS_ID,)))
    assert answer.token_ids == [*_ids("abcdefgh"[:length]), EOS_ID]
    assert (answer.finish_reason, answer.stop_token_id) == ("stop", EOS_ID)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("length", range(1, 6))
def test_without_an_end_of_sequence_the_grammars_own_end_ends_the_request(
    words: F1, k: int, length: int
) -> None:
    engine = make_engine(words.path, num_speculative_tokens=k)
    text = "abcdefgh"[:length]
    (answer,) = generate(engine, [_ids("x>")], greedy(50, grammar=_regex(text)))
    assert _text(answer.token_ids) == text and len(answer.token_ids) == length
    assert (answer.finish_reason, answer.stop_token_id) == ("stop", None)


@pytest.mark.parametrize("k", [0, 3])
def test_b18_masks_hold_at_every_position_of_a_run(words: F1, k: int) -> None:
    """The model wants ``abcdefgh``; the grammar forces another letter in the middle of what the drafts propose."""
    engine = make_engine(words.path, num_speculative_tokens=k)
    for place in range(8):
        wanted = "abcdefgh"[:place] + "Z" + "b" * 3
        (answer,) = generate(
            engine, [_ids("x>")], greedy(50, grammar=_regex(wanted), stop_token_ids=(EOS_ID,))
        )
        assert _text(answer.token_ids) == wanted


def test_right_drafts_are_still_accepted_under_a_grammar(words: F1) -> None:
    engine = make_engine(words.path, num_speculative_tokens=3)
    (answer,) = generate(engine, [_ids("x>")], greedy(8, grammar=_regex("[a-h]+")))
    assert answer.steps == [(4, 3, 3), (4, 3, 3)]
    assert (_text(answer.token_ids), answer.finish_reason) == ("abcdefgh", "length")


def test_ids_of_the_request_with_a_text_stop_it_and_are_no_end_of_the_grammar(words: F1) -> None:
    engine = make_engine(words.path)
    stops = (EOS_ID, *_ids("c"))
    (answer,) = generate(engine, [_ids("x>")], greedy(50, grammar=_regex("[a-h]+"), stop_token_ids=stops))
    assert _text(answer.token_ids) == "abc"
    assert (answer.finish_reason, answer.stop_token_id) == ("stop", _ids("c")[0])


def test_special_tokens_cannot_be_chosen_inside_a_match(words: F1) -> None:
    engine = make_engine(words.path)
    bias = {BOS_ID: 100.0, EOS_ID: 100.0}
    (answer,) = generate(
        engine,
        [_ids("x>")],
        greedy(50, grammar=_regex("[a-h]{3}"), stop_token_ids=(EOS_ID,), logit_bias=bias),
    )
    assert answer.token_ids == [*_ids("abc"), EOS_ID]


@pytest.mark.parametrize("k", [0, 2, 4])
def test_a_mask_keeps_the_distribution_over_what_it_allows(tmp_path: Path, k: int) -> None:
    """Chi-square of transitions against p(next | current) renormalised over the allowed tokens."""
    rng = np.random.default_rng(2)
    letters = _ids("abcdef")
    table = np.full((VOCAB, VOCAB), 1e-3)
    table[:, letters] = rng.dirichlet(np.ones(6), size=VOCAB)
    table /= table.sum(axis=1, keepdims=True)
    f1 = build_f1(
        tmp_path / "m",
        vocab=VOCAB, tokenizer="bytes", next_probs={i: row.tolist() for i, row in enumerate(table)},
        wrong_draft_tokens=_ids("bd"),
    )  # fmt: skip
    engine = make_engine(f1.path, num_speculative_tokens=k, max_num_seqs=32, num_kv_pages=1500, seed=4)
    allowed = _ids("abd")
    answers = generate(engine, [_ids("xa")] * 32, _sampled(_regex("[abd]{200}"), 200))
    counts = np.zeros((3, 3))
    for answer in answers:
        for current, following in zip([_ids("a")[0], *answer.token_ids], answer.token_ids, strict=False):
            counts[allowed.index(current), allowed.index(following)] += 1
    expected = table[np.ix_(allowed, allowed)]
    expected = expected / expected.sum(axis=1, keepdims=True) * counts.sum(axis=1, keepdims=True)
    assert counts.sum() == 6400
    assert stats.chi2.sf(float(((counts - expected) ** 2 / expected).sum()), 6) > 1e-4


def test_a_seed_gives_the_same_under_preemption_and_in_both_schedules(flat: F1) -> None:
    """Too few pages for all: requests give way and resume inside their grammar."""
    params = _sampled(_regex("([a-z]{3}-){15}[0-9]{4}"), seed=3)
    prompts = [[10 + i, 11 + i] for i in range(8)]
    roomy = generate(make_engine(flat.path, schedule="sync"), prompts, params)
    for schedule in ("sync", "overlap"):
        engine = make_engine(flat.path, schedule=schedule, num_kv_pages=20)
        answers, preemptions = _run_counting(engine, prompts, params)
        assert preemptions > 0
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in roomy]
    assert all(re.fullmatch("([a-z]{3}-){15}[0-9]{4}", _text(answer.token_ids)) for answer in roomy)


def _run_counting(
    engine: Engine, prompts: list[list[int]], params: SamplingParams
) -> tuple[list[Answer], int]:
    answers = {str(i): Answer() for i in range(len(prompts))}
    for name, prompt in zip(answers, prompts, strict=True):
        engine.add(request(name, prompt, params))
    preemptions = 0
    while engine.has_work():
        outputs = engine.iterate()
        preemptions += outputs.stats.preemptions
        for delta in outputs.deltas:
            answers[delta.request_id].take(delta)
    return list(answers.values()), preemptions


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_an_abort_in_the_middle_of_a_grammar_frees_everything(flat: F1, schedule: str) -> None:
    engine = make_engine(flat.path, schedule=schedule)
    for i in range(4):
        engine.add(request(str(i), [3 + i, 4], _sampled(_regex("[a-z]{100}"))))
    answers: dict[str, Answer] = {}
    while len(answers) < 4 or min(len(answer.token_ids) for answer in answers.values()) < 10:
        collect(engine, answers)
    for name in ("0", "2"):
        engine.abort(name)
        del answers[name]
    answers |= {name: answer for name, answer in finish(engine).items() if name not in answers}
    assert set(answers) <= {"1", "3"}


def test_an_abort_while_compiling_ends_the_request(flat: F1) -> None:
    engine = make_engine(flat.path)
    engine.add(request("a", [3, 4], _sampled(_regex("[a-z]{77}"))))
    assert engine.has_work() and engine.iterate().stats.requests_waiting == 1
    engine.abort("a")
    assert not engine.has_work()
    engine.add(request("a", [3, 4], _sampled(_regex("[a-z]{77}"), 5)))
    assert len(finish(engine)["a"].token_ids) == 5


def test_a_request_that_cannot_be_served_is_refused_before_it_is_compiled(flat: F1) -> None:
    engine = make_engine(flat.path, max_model_len=64)
    from engine.errors import RequestError

    for params, prompt, field in [
        (_sampled(_regex("a"), min_tokens=3), [3], "min_tokens"),
        (_sampled(_regex("a" * 70_000)), [3], "grammar"),
        (_sampled(_regex("a")), [3] * 64, "prompt_token_ids"),
    ]:
        with pytest.raises(RequestError) as error:
            engine.add(request("a", prompt, params))
        assert error.value.param == field
    assert not engine.has_work()


# --- compiling ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler(flat: F1) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(flat.path, VOCAB, (EOS_ID,), time_limit=2.0)
    yield compiler
    compiler.close()


def _compile(compiler: GrammarCompiler, *specs: GrammarSpec) -> list[Constraint | ErrorInfo]:
    for i, spec in enumerate(specs):
        compiler.submit(
            Request(request_id=str(i), prompt_token_ids=[3], params=_sampled(spec), arrival_time=0.0)
        )
    outcomes: dict[str, Constraint | ErrorInfo] = {}
    while compiler.num_waiting:
        compiler.wait(10)
        outcomes |= {taken.request_id: outcome for taken, outcome in compiler.take()}
    return [outcomes[str(i)] for i in range(len(specs))]


def _nested(depth: int) -> str:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return json.dumps(schema)


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


def test_d9_invalid_grammars_are_refused_with_a_reason(compiler: GrammarCompiler) -> None:
    outcomes = _compile(compiler, *BAD.values())
    for name, outcome in zip(BAD, outcomes, strict=True):
        assert isinstance(outcome, ErrorInfo), name
        assert (outcome.code, outcome.param) == ("invalid_request", "grammar"), (name, outcome)
        assert ".cc" not in outcome.message and len(outcome.message) < 400


def test_d9_grammars_without_end_are_ended_and_others_go_on(compiler: GrammarCompiler) -> None:
    bad = [GrammarSpec("json_schema", text) for text in (_nested(400), _nested(300))]
    *refused, good = _compile(compiler, *bad, _regex("ok"))
    for outcome in refused:
        assert isinstance(outcome, ErrorInfo) and outcome.code == "invalid_request", outcome
    assert isinstance(good, Constraint)
    _compile(compiler, *bad)  # known by now: refused without another attempt


def test_hostile_but_harmless_grammars_compile(flat: F1) -> None:
    compiler = GrammarCompiler(flat.path, VOCAB, (EOS_ID,), time_limit=60.0)
    patterns = ["(x+x+)+y", "(((a{1,100}){1,100}){1,100}){1,100}", "(a|aa)+", "", "é|日本|😀"]
    assert all(isinstance(one, Constraint) for one in _compile(compiler, *map(_regex, patterns)))


def test_the_engine_answers_others_while_it_compiles(flat: F1) -> None:
    engine = make_engine(flat.path)
    engine._grammars = GrammarCompiler(flat.path, VOCAB, (EOS_ID,), time_limit=1.0)
    engine.add(request("bad", [3, 4], _sampled(GrammarSpec("json_schema", _nested(400)))))
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
    (outcome,) = _compile(GrammarCompiler(f1.path, 64, (EOS_ID,)), _regex("a"))
    assert isinstance(outcome, ErrorInfo) and outcome.code == "invalid_request"


def _matcher(spec: GrammarSpec, stop_ids: tuple[int, ...] = (EOS_ID,)) -> Matcher:
    """In this process, over the bytes and nothing else."""
    table = [b"", b"", *(bytes([byte]) for byte in range(256)), *[b""] * (VOCAB - 258)]
    silent = frozenset(token for token, text in enumerate(table) if not text)
    return Matcher(job.compile_grammar(spec, job.vocabulary(table)), VOCAB, silent, stop_ids)


def _allowed(matcher: Matcher, drafts: list[int]) -> tuple[list[list[int]], tuple[int | None, bool]]:
    mask = np.full((4, -(-VOCAB // 32)), -1, dtype=np.int32)
    end = matcher.fill(drafts, mask)
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    return [list(np.flatnonzero(row)) for row in bits], end


def test_masks_are_those_of_each_place_behind_the_drafts() -> None:
    matcher = _matcher(_regex("ab?c"))
    free = list(range(VOCAB))
    a, b, c = _ids("abc")
    going_on = (None, False)
    assert _allowed(matcher, []) == ([[a], free, free, free], going_on)
    assert _allowed(matcher, _ids("abc")) == ([[a], [b, c], [c], [EOS_ID]], going_on)
    assert _allowed(matcher, _ids("acb")) == ([[a], [b, c], [EOS_ID], free], going_on)
    assert _allowed(matcher, _ids("xbc")) == ([[a], free, free, free], going_on)
    assert _allowed(matcher, [a, c, EOS_ID]) == ([[a], [b, c], [EOS_ID], free], going_on)
    matcher.advance(_ids("ac"))
    assert _allowed(matcher, _ids("aaa")) == ([[EOS_ID], free, free, free], going_on)


def test_masks_say_where_nothing_can_follow() -> None:
    matcher = _matcher(_regex("ab"), stop_ids=())
    masks, end = _allowed(matcher, _ids("abc"))
    assert masks[:2] == [_ids("a"), _ids("b")] and end == (2, True)


def test_strings_of_bounded_length_hold_no_control_characters() -> None:
    """The library itself would let them through, and the output would not be JSON."""
    schema = {
        "type": "object",
        "properties": {"enum": {"type": "string", "maxLength": 2}},
        "required": ["enum"],
    }
    matcher = _matcher(GrammarSpec("json_schema", json.dumps(schema)))
    matcher.advance(_ids('{"enum":"'))
    text = [token - 2 for token in _allowed(matcher, [])[0][0] if token - 2 < 0x80]
    assert text == [byte for byte in range(0x20, 0x80) if chr(byte) != "\\"], "the quote ends the string"


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_d9_a_grammar_that_cannot_be_followed_ends_its_request_only(flat: F1, schedule: str) -> None:
    """It compiles at once, but each token takes many times as long as the one before."""
    hostile = "a"
    for _ in range(6):
        hostile = f"({hostile}){{1,50}}"
    engine = make_engine(flat.path, schedule=schedule)
    good = _sampled(_regex("[a-z]{40}"), seed=2)
    (alone,) = generate(engine, [[3, 4]], good)
    engine._grammars.walker._time_limit = 0.5
    engine.add(request("good", [3, 4], good))
    engine.add(request("free", [3, 4], greedy(20)))
    answers: dict[str, Answer] = {}
    while "good" not in answers:
        collect(engine, answers)
    engine.add(request("hostile", [3, 4], _sampled(_regex(f"b?{hostile}"), logit_bias={_ids("a")[0]: 90.0})))
    while engine.has_work():
        collect(engine, answers)
    assert answers["good"].token_ids == alone.token_ids
    assert len(answers["free"].token_ids) == 20
    assert answers["hostile"].finish_reason == "error"
    assert re.fullmatch("b?a+", _text(answers["hostile"].token_ids)), "what came before the end was masked"
    engine.close()


def test_the_death_of_the_walking_process_costs_one_request_at_most(flat: F1) -> None:
    engine = make_engine(flat.path)
    params = _sampled(_regex("[a-z]{40}"), seed=2)
    (alone,) = generate(engine, [[3, 4]], params)
    child = engine._grammars.walker._child
    assert child is not None
    child._process.kill()
    child._process.join()
    again = generate(engine, [[3, 4], [3, 4]], params)
    assert [answer.finish_reason for answer in again] == ["error", "stop"]
    assert again[1].token_ids == alone.token_ids
    assert isinstance(engine._grammars.walker, GrammarWalker)


def test_no_process_outlives_an_engine_that_is_killed(flat: F1) -> None:
    """Not even one that is busy with a grammar without end."""
    code = (
        "import sys\n"
        "from tests.engine.drive import make_engine, request\n"
        "from tests.engine.test_grammar import _nested, _regex, _sampled\n"
        "from engine.types import GrammarSpec\n"
        "if __name__ == '__main__':\n"
        "    engine = make_engine(sys.argv[1])\n"
        "    engine.add(request('endless', [3], _sampled(GrammarSpec('json_schema', _nested(400)))))\n"
        "    engine.add(request('a', [3], _sampled(_regex('[a-z]{9999}'), 9999)))\n"
        "    print('ready', flush=True)\n"
        "    while engine.has_work():\n"
        "        engine.iterate()\n"
    )
    arguments = [sys.executable, "-c", code, str(flat.path)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        family: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(family) < 4 and time.monotonic() < deadline:  # resource tracker, fork server, two at work
            family = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        assert len(family) >= 4
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
