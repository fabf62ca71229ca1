"""A tripped request is rebuilt, and run again alone until the cause is known (invariant I5)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.graph import DISABLE_AFTER, StepGraphs
from engine.guard import HALTING
from engine.sampler import GREEDY
from engine.state import SEQ_LEN
from engine.types import TokenDelta
from tests.engine.drive import greedy, make_engine, request
from tests.engine.faults import poison, serve, tokens_of
from tests.fixtures.checkpoints import F1, build_f1

SCHEDULES = ["sync", "overlap"]
VALUES = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fault_of_one_eager_step_costs_that_step_and_nothing_else(
    f1: F1, row: int, value: float, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager with drafts was answered by the step itself: the next token alone is what is left to try."""
    engine = make_engine(f1.path, schedule=schedule)
    poison(engine, monkeypatch, lambda _, call: call == 2, value, row)
    deltas, counts = serve(engine, ("a", [5, 9], greedy(30)))
    assert tokens_of(deltas, "a") == f1.walk(9, 30) and deltas[-1].finish_reason == "length"
    kind = "nan" if math.isnan(value) else "inf"
    assert counts["nan_guard_trips", ("verify", kind)] == 1
    assert counts["nan_guard_actions", ("retried", "draft_token")] == 1
    assert counts["steps", ("eager", "retry")] == 1
    assert counts["sync_steps", ("retry",)] == (schedule == "overlap")
    assert counts["nan_guard_pages_scrubbed", ()] > 0


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_model_without_an_answer_ends_the_request_and_no_other(
    f1: F1, schedule: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(f1.path, schedule=schedule)
    faulty = [False]

    def when(hidden: Tensor, call: int) -> bool:
        # From the third call on: the second request's first row, and whoever runs alone
        faulty[0] |= call >= 3 and hidden.shape[0] == 8
        return faulty[0] and hidden.shape[0] in (1, 8)

    poison(engine, monkeypatch, when, value, row=-4)
    deltas, counts = serve(engine, ("a", [5, 9], greedy(30)), ("b", [7, 11], greedy(30)))
    assert tokens_of(deltas, "a") == f1.walk(9, 30)
    last = [delta for delta in deltas if delta.request_id == "b"][-1]
    assert last.finish_reason == "error" and last.error is not None and last.error.code == "numerical_error"
    emitted = tokens_of(deltas, "b")
    assert emitted == f1.walk(11, 30)[: len(emitted)]
    assert counts["nan_guard_actions", ("failed", "model")] == 1
    assert torch.isfinite(engine._runner.pool.pages).all()


@pytest.fixture(scope="module", params=SCHEDULES)
def captured(f1: F1, request: pytest.FixtureRequest) -> Engine:
    options = {"graphs": "simulate", "max_num_seqs": 2, "prefix_cache": False, "schedule": request.param}
    with pytest.MonkeyPatch.context() as only:
        only.setattr("engine.runner.VARIANTS", (GREEDY,))
        return make_engine(f1.path, **options)


def _graphs(engine: Engine) -> StepGraphs:
    graphs = engine._runner.graphs
    assert graphs is not None
    return graphs


class _Poisoned:
    """A captured step whose first tripped replay runs with the embedding of one token not finite."""

    def __init__(self, inner: Any, weight: Tensor, token: int, value: float) -> None:
        self._inner, self._weight, self._token, self._value = inner, weight, token, value
        self._armed = True

    def replay(self) -> tuple[Tensor, ...]:
        clean = self._weight[self._token].clone()
        if self._armed:
            self._weight[self._token] = self._value
        out: tuple[Tensor, ...] = self._inner.replay()
        self._weight[self._token] = clean
        self._armed &= not (out[0][:, -1] & int(HALTING)).any()
        return out


@pytest.mark.parametrize("distance", [1, 2, 3, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_fault_of_the_replay_alone_replaces_the_graph_and_the_request_goes_on(
    f1: F1, captured: Engine, distance: int, value: float
) -> None:
    """The token stands at each place of a run; both requests of the step are tripped by it."""
    graphs = _graphs(captured)
    graphs._faults.clear()
    [key] = [
        key for key in graphs._captured if key.phase == "step" and key.rows == 2 and key.variant == GREEDY
    ]
    contract, inner = graphs._captured[key]
    weight = captured._runner.step._decoder.embedding.weight
    poisoned = _Poisoned(inner, weight, f1.walk(9, 8 + distance)[-1], value)
    graphs._captured[key] = (contract, poisoned)
    deltas, counts = serve(captured, ("a", [5, 9], greedy(24)), ("b", [5, 9], greedy(24)))
    for name in "ab":
        assert tokens_of(deltas, name) == f1.walk(9, 24)
    # A poisoned embedding trips drafts too; those cost acceptance only
    trips = sum(counts["nan_guard_trips", ("verify", kind)] for kind in ("nan", "inf"))
    assert trips == counts["nan_guard_actions", ("retried", "replay")] == 2
    assert graphs._captured[key][1] is not poisoned
    assert graphs.num_disabled == {}


def test_a_graph_that_keeps_failing_is_given_up(f1: F1, captured: Engine) -> None:
    graphs = _graphs(captured)
    graphs._faults.clear()
    [key] = [
        key for key in graphs._captured if key.phase == "step" and key.rows == 1 and key.variant == GREEDY
    ]
    for expected in range(1, DISABLE_AFTER + 1):
        captured._runner.capture_again(key, graphs.capture_of(key))
        assert graphs.num_disabled == ({"step": 1} if expected == DISABLE_AFTER else {})
    deltas, counts = serve(captured, ("a", [5, 9], greedy(9)))
    assert tokens_of(deltas, "a") == f1.walk(9, 9)
    assert counts["steps", ("eager", "disabled")] > 0 and not counts["steps", ("replay", "none")]


def test_one_replay_that_trips_many_rows_is_one_fault(f1: F1, captured: Engine) -> None:
    graphs = _graphs(captured)
    graphs._faults.clear()
    [key] = [
        key for key in graphs._captured if key.phase == "step" and key.rows == 2 and key.variant == GREEDY
    ]
    failed = graphs.capture_of(key)
    for _ in range(DISABLE_AFTER):
        captured._runner.capture_again(key, failed)
    assert graphs._faults[key] == 1 and graphs.num_disabled == {}


def test_a_capture_that_fails_costs_the_graph_and_not_the_engine(
    f1: F1, captured: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = _graphs(captured)
    graphs._faults.clear()
    [key] = [
        key for key in graphs._captured if key.phase == "step" and key.rows == 1 and key.variant == GREEDY
    ]

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(graphs, "_capture_one", fail)
        captured._runner.capture_again(key, graphs.capture_of(key))
    assert graphs.num_disabled == {"step": 1}
    deltas, _ = serve(captured, ("a", [5, 9], greedy(9)))
    assert tokens_of(deltas, "a") == f1.walk(9, 9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_suspect_does_not_overtake_what_its_prefill_told(
    f1: F1, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step trips while the scores of the rebuilt prompt's last chunk are not read yet."""
    engine = make_engine(f1.path, schedule=schedule, prefill_chunk_size=3)
    poison(engine, monkeypatch, lambda hidden, call: hidden.shape[0] == 4 and not tripped, math.nan, 0)
    tripped: list[int] = []
    process = engine._ladder.trip

    def trip(results: Any, step: Any) -> list[TokenDelta]:
        tripped.extend([1] * len(results))
        return process(results, step)

    monkeypatch.setattr(engine._ladder, "trip", trip)
    prompt = [5, 9, 3, 7, 2, 8, 6, 4, 5, 9]
    deltas, _ = serve(engine, ("a", prompt, greedy(6, prompt_logprobs=1)))
    assert tripped and tokens_of(deltas, "a") == f1.walk(9, 6)
    scores = deltas[0].prompt_logprobs
    assert scores is not None and [one.token_id for one in scores] == prompt[1:]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_aborting_a_suspect_leaves_nothing(f1: F1, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(f1.path, schedule=schedule, prefill_chunk_size=2)
    poison(engine, monkeypatch, lambda _, call: call == 3, math.nan, 0)
    engine.add(request("a", [5, 9, 3, 5, 9], greedy(60)))
    for _ in range(200):
        engine.iterate()
        if any(row.suspicion is not None for row in engine._scheduler._waiting + engine._scheduler._running):
            break
    else:
        raise AssertionError("never suspected")
    engine.abort("a")
    serve(engine)


def test_a_rebuilt_request_takes_nothing_from_the_prefix_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    f1 = build_f1(tmp_path / "m", eos=None)
    engine = make_engine(f1.path)
    prompt = [5, 9] * 12
    serve(engine, ("warm", prompt, greedy(9)))
    poison(engine, monkeypatch, lambda _, call: call == 1, math.nan, 0)
    deltas, counts = serve(engine, ("a", prompt, greedy(9)))
    assert tokens_of(deltas, "a") == f1.walk(9, 9)
    assert counts["nan_guard_rows_checked", ("prefill",)] >= len(prompt) - 1


@pytest.mark.parametrize("field", ["seq_lens", "block_table"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_slot_that_is_broken_behind_each_prefill_ends_the_request_rather_than_begin_at_nothing(
    f1: F1, field: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft phase finds it first, and the eager step that comes of it must find it too."""
    engine = make_engine(f1.path, schedule=schedule, prefix_cache=False)
    state, begin = engine._runner.state, engine._runner.step.begin

    def broken(slots: Tensor, *args: Any) -> Tensor:
        if field == "seq_lens":
            state.core[slots, SEQ_LEN] = 10**6
        else:
            state.block_table[slots, 0] = 0
        return begin(slots, *args)

    monkeypatch.setattr(engine._runner.step, "begin", broken)
    deltas, counts = serve(engine, ("a", [5, 9, 3, 9], greedy(12)))
    assert not tokens_of(deltas, "a") and deltas[-1].finish_reason == "error"
    assert deltas[-1].error is not None and deltas[-1].error.code == "internal_error"
    assert counts["graph_contract_violations", (field,)] > 0
    assert counts["nan_guard_actions", ("failed", "contract")] == 1
    assert not counts["nan_guard_actions", ("failed", "model")], "no fault of the weights"
