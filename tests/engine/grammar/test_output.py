"""Structured output (field notes B18, D9): a mask on the target's logits, exact under speculation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from engine.engine import Engine
from engine.types import GrammarSpec, SamplingParams
from tests.engine.drive import Answer, collect, finish, generate, greedy, make_engine, request
from tests.engine.grammar.support import VOCAB, ids, regex, sampled, text_of
from tests.fixtures.checkpoints import F1, build_f1
from tests.fixtures.tokenizers import BOS_ID, EOS_ID

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
        engine.add(request(f"json{i}", [2 + i, 3 + i, 4 + i], sampled(JSON_SCHEMA)))
        if i % 10 == 0:
            engine.add(request(f"free{i}", [5, 6, 7], free))
    answers = finish(engine)
    for name, answer in answers.items():
        if name.startswith("free"):
            assert answer.token_ids == alone.token_ids
            continue
        assert (answer.finish_reason, answer.stop_token_id) == ("stop", EOS_ID)
        assert answer.token_ids.count(EOS_ID) == 1 and answer.token_ids[-1] == EOS_ID
        _assert_valid(text_of(answer.token_ids))


def test_a_neighbour_with_a_grammar_changes_nothing_for_a_greedy_one(f1: F1, flat: F1) -> None:
    engine = make_engine(flat.path, schedule="overlap")
    alone = generate(engine, [[9, 8, 7]], greedy(40))[0].token_ids
    engine.add(request("free", [9, 8, 7], greedy(40)))
    engine.add(request("bound", [9, 8, 7], sampled(regex("[a-c]{10,20}"))))
    answers = finish(engine)
    assert answers["free"].token_ids == alone
    assert re.fullmatch("[a-c]{10,20}", text_of(answers["bound"].token_ids))


def test_steps_that_wait_for_the_step_before_them_are_counted(flat: F1) -> None:
    counts = {}
    for schedule in ("sync", "overlap"):
        engine = make_engine(flat.path, schedule=schedule, num_speculative_tokens=0)
        engine.add(request("a", [4, 5], sampled(regex("[ab]{10}"))))
        counts[schedule] = 0
        while engine.has_work():
            counts[schedule] += engine.iterate().stats.sync_steps.get("grammar", 0)
    assert counts == {"sync": 0, "overlap": 11}  # ten letters and the end of sequence


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("length", range(1, 9))
def test_b18_a_grammar_that_ends_inside_an_accepted_run_ends_the_request(
    words: F1, k: int, length: int
) -> None:
    """The drafts are right, so the run would go on; only the end of sequence may follow."""
    engine = make_engine(words.path, num_speculative_tokens=k)
    spec = regex("abcdefgh"[:length])
    (answer,) = generate(engine, [ids("x>")], greedy(50, grammar=spec, stop_token_ids=(EOS_ID,)))
    assert answer.token_ids == [*ids("abcdefgh"[:length]), EOS_ID]
    assert (answer.finish_reason, answer.stop_token_id) == ("stop", EOS_ID)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("length", range(1, 6))
def test_without_an_end_of_sequence_the_grammars_own_end_ends_the_request(
    words: F1, k: int, length: int
) -> None:
    engine = make_engine(words.path, num_speculative_tokens=k)
    text = "abcdefgh"[:length]
    (answer,) = generate(engine, [ids("x>")], greedy(50, grammar=regex(text)))
    assert text_of(answer.token_ids) == text and len(answer.token_ids) == length
    assert (answer.finish_reason, answer.stop_token_id) == ("stop", None)


@pytest.mark.parametrize("k", [0, 3])
def test_b18_masks_hold_at_every_position_of_a_run(words: F1, k: int) -> None:
    """The model wants ``abcdefgh``; the grammar forces another letter in the middle of what the drafts propose."""
    engine = make_engine(words.path, num_speculative_tokens=k)
    for place in range(8):
        wanted = "abcdefgh"[:place] + "Z" + "b" * 3
        (answer,) = generate(engine, [ids("x>")], greedy(50, grammar=regex(wanted), stop_token_ids=(EOS_ID,)))
        assert text_of(answer.token_ids) == wanted


def test_right_drafts_are_still_accepted_under_a_grammar(words: F1) -> None:
    engine = make_engine(words.path, num_speculative_tokens=3)
    (answer,) = generate(engine, [ids("x>")], greedy(8, grammar=regex("[a-h]+")))
    assert answer.steps == [(4, 3, 3), (4, 3, 3)]
    assert (text_of(answer.token_ids), answer.finish_reason) == ("abcdefgh", "length")


def test_ids_of_the_request_with_a_text_stop_it_and_are_no_end_of_the_grammar(words: F1) -> None:
    engine = make_engine(words.path)
    stops = (EOS_ID, *ids("c"))
    (answer,) = generate(engine, [ids("x>")], greedy(50, grammar=regex("[a-h]+"), stop_token_ids=stops))
    assert text_of(answer.token_ids) == "abc"
    assert (answer.finish_reason, answer.stop_token_id) == ("stop", ids("c")[0])


def test_special_tokens_cannot_be_chosen_inside_a_match(words: F1) -> None:
    engine = make_engine(words.path)
    bias = {BOS_ID: 100.0, EOS_ID: 100.0}
    (answer,) = generate(
        engine,
        [ids("x>")],
        greedy(50, grammar=regex("[a-h]{3}"), stop_token_ids=(EOS_ID,), logit_bias=bias),
    )
    assert answer.token_ids == [*ids("abc"), EOS_ID]


@pytest.mark.parametrize("k", [0, 2, 4])
def test_a_mask_keeps_the_distribution_over_what_it_allows(tmp_path: Path, k: int) -> None:
    """Chi-square of transitions against p(next | current) renormalised over the allowed tokens."""
    rng = np.random.default_rng(2)
    letters = ids("abcdef")
    table = np.full((VOCAB, VOCAB), 1e-3)
    table[:, letters] = rng.dirichlet(np.ones(6), size=VOCAB)
    table /= table.sum(axis=1, keepdims=True)
    f1 = build_f1(
        tmp_path / "m",
        vocab=VOCAB, tokenizer="bytes", next_probs={i: row.tolist() for i, row in enumerate(table)},
        wrong_draft_tokens=ids("bd"),
    )  # fmt: skip
    engine = make_engine(f1.path, num_speculative_tokens=k, max_num_seqs=32, num_kv_pages=1500, seed=4)
    allowed = ids("abd")
    answers = generate(engine, [ids("xa")] * 32, sampled(regex("[abd]{200}"), 200))
    counts = np.zeros((3, 3))
    for answer in answers:
        for current, following in zip([ids("a")[0], *answer.token_ids], answer.token_ids, strict=False):
            counts[allowed.index(current), allowed.index(following)] += 1
    expected = table[np.ix_(allowed, allowed)]
    expected = expected / expected.sum(axis=1, keepdims=True) * counts.sum(axis=1, keepdims=True)
    assert counts.sum() == 6400
    assert stats.chi2.sf(float(((counts - expected) ** 2 / expected).sum()), 6) > 1e-4


def test_a_seed_gives_the_same_under_preemption_and_in_both_schedules(flat: F1) -> None:
    """Too few pages for all: requests give way and resume inside their grammar."""
    params = sampled(regex("([a-z]{3}-){15}[0-9]{4}"), seed=3)
    prompts = [[10 + i, 11 + i] for i in range(8)]
    roomy = generate(make_engine(flat.path, schedule="sync"), prompts, params)
    for schedule in ("sync", "overlap"):
        engine = make_engine(flat.path, schedule=schedule, num_kv_pages=20)
        answers, preemptions = _run_counting(engine, prompts, params)
        assert preemptions > 0
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in roomy]
    assert all(re.fullmatch("([a-z]{3}-){15}[0-9]{4}", text_of(answer.token_ids)) for answer in roomy)


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
        engine.add(request(str(i), [3 + i, 4], sampled(regex("[a-z]{100}"))))
    answers: dict[str, Answer] = {}
    while len(answers) < 4 or min(len(answer.token_ids) for answer in answers.values()) < 10:
        collect(engine, answers)
    for name in ("0", "2"):
        engine.abort(name)
        del answers[name]
    answers |= {name: answer for name, answer in finish(engine).items() if name not in answers}
    assert set(answers) <= {"1", "3"}
