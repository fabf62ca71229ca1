"""Invariant I5: a non-finite value never becomes a token, and only the guilty request pays (field note B16)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.guard import Flag, classify, is_halted, reduce_rows
from engine.types import SamplingParams, TokenDelta
from tests.engine.drive import Answer, check_pages, finish, generate, greedy, make_engine, request
from tests.fixtures.checkpoints import F1, build_f1

NAN_TOKEN = 30
SCHEDULES = ["sync", "overlap"]


@pytest.fixture(scope="module")
def f3(tmp_path_factory: pytest.TempPathFactory) -> F1:
    """F1 with the embedding of one token NaN."""
    return build_f1(tmp_path_factory.mktemp("f3") / "m", nan_tokens=[NAN_TOKEN], eos=None)


def _deltas(engine: Engine) -> list[TokenDelta]:
    deltas = []
    while engine.has_work():
        deltas += engine.iterate().deltas
        engine._scheduler.check()
    check_pages(engine)
    return deltas


def _before(f1: F1, token: int, steps: int) -> int:
    """The token from which greedy decoding reaches ``token`` in ``steps`` steps."""
    for start in range(f1.vocab_size):
        if f1.walk(start, steps)[-1] == token:
            return start
    raise AssertionError("the walk is one cycle")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "prompt", [[NAN_TOKEN], [4, NAN_TOKEN], [NAN_TOKEN, 4], [4] * 40 + [NAN_TOKEN] + [5] * 9]
)
def test_f3_a_poisoned_prompt_ends_with_an_error_and_its_neighbours_do_not_notice(
    f3: F1, prompt: list[int], schedule: str
) -> None:
    engine = make_engine(f3.path, schedule=schedule, prefill_chunk_size=16)
    start = f3.next_token(NAN_TOKEN)
    engine.add(request("neighbour", [start], greedy(20)))
    engine.add(request("poisoned", prompt, greedy(20)))
    deltas = _deltas(engine)
    bad = [delta for delta in deltas if delta.request_id == "poisoned"]
    assert [delta.finish_reason for delta in bad] == ["error"]
    assert bad[0].token_ids == [] and bad[0].error is not None and bad[0].error.code == "numerical_error"
    good = [token for delta in deltas if delta.request_id == "neighbour" for token in delta.token_ids]
    assert good == f3.walk(start, 20)
    assert torch.isfinite(engine._runner.pool.pages).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("params", [greedy(40), SamplingParams(max_tokens=40, temperature=0.3, seed=1)])
def test_f3_output_stops_right_before_the_token_that_poisons(
    f3: F1, distance: int, params: SamplingParams, schedule: str
) -> None:
    """Whatever place of a run the poison is at: everything emitted is right and ends with the poisoned token."""
    engine = make_engine(f3.path, schedule=schedule)
    start = _before(f3, NAN_TOKEN, distance)
    engine.add(request("a", [start], params))
    deltas = _deltas(engine)
    emitted = [token for delta in deltas for token in delta.token_ids]
    expected = f3.walk(start, distance)
    assert emitted == expected[: len(emitted)]
    assert len(emitted) >= distance - 3  # a run that would hold the poisoned row is not emitted at all
    assert deltas[-1].finish_reason == "error"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pages_of_a_poisoned_request_are_zeroed_and_not_published(f3: F1, schedule: str) -> None:
    engine = make_engine(f3.path, schedule=schedule)
    prompt = [4, 5, 6, 7] * 8 + [NAN_TOKEN] + [9] * 8
    engine.add(request("a", prompt, greedy(9)))
    _deltas(engine)
    stats = engine._scheduler.stats()
    assert stats.pages_cached == 0
    assert not engine._runner.pool.pages[:, 1:].any()
    clean = generate(engine, [prompt[:32]], greedy(9))[0]
    assert clean.token_ids == f3.walk(7, 9) and clean.num_cached_tokens == 0


def _poison_logits(
    engine: Engine, part: str, when: int, row: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overwrite one row of the logits of the ``when``-th call of a model with ``value``."""
    step = engine._runner.step
    model = step._decoder if part == "target" else step._draft_model
    assert model is not None
    original: Callable[[Tensor], Tensor] = model.logits
    calls = 0

    def logits(hidden: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        out = original(hidden)
        if calls == when:
            out = out.clone()
            out[row, 3] = value
        return out

    monkeypatch.setattr(model, "logits", logits)


def test_b16_a_verify_row_past_the_accepted_ones_is_ignored(
    f1_wrong: F1, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = min(f1_wrong.wrong_draft_tokens)
    engine = make_engine(f1_wrong.path)
    _poison_logits(engine, "target", when=1, row=2, value=math.nan, monkeypatch=monkeypatch)
    answer = generate(engine, [[5, wrong]], greedy(20))[0]
    assert answer.token_ids == f1_wrong.walk(wrong, 20)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("when", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_b16_a_draft_fault_costs_one_steps_drafts_and_nothing_else(
    f1: F1, when: int, value: float, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls 1 to 3 are the draft phase behind the prefill, 4 to 6 that of the first step."""
    engine = make_engine(f1.path, schedule=schedule)
    _poison_logits(engine, "draft", when=when, row=0, value=value, monkeypatch=monkeypatch)
    answer = generate(engine, [[5, 9]], greedy(17))[0]
    assert answer.token_ids == f1.walk(9, 17)
    without = 0 if when <= 3 else 1
    expected = [(4, 3, 3)] * 4
    expected.insert(without, (1, 0, 0))
    assert answer.steps == expected


def test_a_draft_model_of_nothing_but_nan_still_serves(tmp_path: Path) -> None:
    def poison(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if "shared_head.norm" in name:
                tensor.fill_(math.nan)

    f1 = build_f1(tmp_path / "m", edit_tensors=poison)
    answer: Answer = generate(make_engine(f1.path), [[5, 9]], greedy(12))[0]
    assert answer.token_ids == f1.walk(9, 12)
    assert answer.steps == [(1, 0, 0)] * 12


def test_classify_names_nan_before_infinity_and_misses_nothing() -> None:
    values = torch.zeros(5, 7)
    values[1, 2], values[2, 3], values[3, 4] = math.nan, math.inf, -math.inf
    values[4, 1], values[4, 5] = math.inf, math.nan
    found = classify(values, Flag.TARGET_NAN, Flag.TARGET_INF)
    assert found.tolist() == [0, Flag.TARGET_NAN, Flag.TARGET_INF, Flag.TARGET_INF, Flag.TARGET_NAN]
    rows = torch.tensor([[True, False, True, True, False]])
    assert reduce_rows(found[None], rows).tolist() == [int(Flag.TARGET_INF)]
    assert is_halted(found).tolist() == [False, True, True, True, True]
    assert not is_halted(torch.tensor(int(Flag.DRAFT_NAN | Flag.DRAFT_INF | Flag.IGNORED)))


def test_an_engine_goes_on_after_faults(f3: F1) -> None:
    engine = make_engine(f3.path)
    for _ in range(3):
        engine.add(request("bad", [4, NAN_TOKEN, 4], greedy(9)))
        finish(engine)
        start = f3.next_token(NAN_TOKEN)
        assert generate(engine, [[start, f3.next_token(start)]], greedy(9))[0].finish_reason == "length"


def test_trips_and_actions_are_counted(f1: F1, f3: F1, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(engine: Engine, prompt: list[int]) -> dict[tuple[str, tuple[str, ...]], int]:
        engine.add(request("a", prompt, greedy(8)))
        found: dict[tuple[str, tuple[str, ...]], int] = {}
        while engine.has_work():
            for count in engine.iterate().stats.counts:
                found[count.name, count.labels] = found.get((count.name, count.labels), 0) + count.value
        return found

    target = counted(make_engine(f3.path), [4, NAN_TOKEN])
    assert target["nan_guard_trips", ("verify", "nan")] == 1
    assert target["nan_guard_actions", ("failed", "model")] == 1
    engine = make_engine(f1.path)
    _poison_logits(engine, "draft", when=1, row=0, value=math.inf, monkeypatch=monkeypatch)
    draft = counted(engine, [5, 9])
    assert draft["nan_guard_trips", ("draft", "inf")] == 1
    assert draft["nan_guard_actions", ("drafts_dropped", "draft")] == 1
    # Behind the forced step of one token, two of four: 3 steps of 4 verify rows
    assert draft["nan_guard_rows_checked", ("verify",)] == 12
