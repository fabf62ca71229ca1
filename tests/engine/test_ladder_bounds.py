"""What faults that do not end, or hit many at once, may cost: work, time of one iteration, and the neighbours."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.ladder import MAX_RESCUES
from engine.state import NEXT_TOKEN
from engine.turns import TURN_EVERY
from engine.types import GrammarSpec, Outputs, SamplingParams, TokenDelta
from tests.engine.drive import check_pages, finish, generate, greedy, make_engine, request
from tests.engine.faults import poison, serve, tokens_of
from tests.fixtures.checkpoints import F1, build_f1

SCHEDULES = pytest.mark.parametrize("schedule", ["sync", "overlap"])
LENGTH = 30
PARAMS = [greedy(LENGTH), SamplingParams(max_tokens=LENGTH, temperature=0.3, seed=4)]


def _poison_drafts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of a step that verifies drafts is finite."""
    decoder = engine._runner.step._decoder
    original = decoder.logits
    monkeypatch.setattr(
        decoder, "logits", lambda hidden: original(hidden) * (math.nan if hidden.shape[0] > 1 else 1)
    )


@SCHEDULES
@pytest.mark.parametrize("params", PARAMS)
def test_drafts_that_the_target_can_never_bear_cost_a_bounded_number_of_prefills(
    f1: F1, schedule: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token is right: the first ones come from the ladder, the others without drafts and without a trip."""
    engine = make_engine(f1.path, schedule=schedule)
    _poison_drafts(engine, monkeypatch)
    deltas, counts = serve(engine, ("a", [5, 9], params))
    assert tokens_of(deltas, "a") == f1.walk(9, LENGTH)
    assert all(delta.num_drafts == 0 for delta in deltas)
    assert counts["nan_guard_trips", ("verify", "nan")] == MAX_RESCUES
    assert counts["nan_guard_actions", ("retried", "draft_token")] == MAX_RESCUES
    assert counts["nan_guard_actions", ("isolated", "draft_token")] == 1
    assert counts["steps", ("eager", "retry")] == LENGTH
    # All known tokens but the last: of the prompt, and of what there was at each trip
    assert counts["nan_guard_rows_checked", ("prefill",)] == 1 + sum(range(1, MAX_RESCUES + 1))


@SCHEDULES
def test_steps_that_trip_where_their_repetition_does_not_are_given_up_too(
    f1: F1, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are no tokens are put before each step but those of the ladder."""
    engine = make_engine(f1.path, schedule=schedule)
    launch, core = engine._runner.launch, engine._runner.state.core

    def spoil(rows: Any, allowed: Tensor | None = None) -> Any:
        core[rows[0].slot, NEXT_TOKEN + 1 :] = f1.vocab_size
        core[rows[0].slot, 1] = core.shape[1] - NEXT_TOKEN - 1
        return launch(rows, allowed)

    monkeypatch.setattr(engine._runner, "launch", spoil)
    deltas, counts = serve(engine, ("a", [5, 9], greedy(LENGTH)))
    assert tokens_of(deltas, "a") == f1.walk(9, LENGTH)
    assert counts["nan_guard_trips", ("verify", "oov")] == MAX_RESCUES
    assert counts["nan_guard_actions", ("retried", "replay")] == MAX_RESCUES
    assert counts["nan_guard_actions", ("isolated", "replay")] == 1


@SCHEDULES
def test_a_request_that_trips_alone_as_well_ends(
    f1: F1, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(f1.path, schedule=schedule)
    alone: list[int] = []

    def when(hidden: Tensor, call: int) -> bool:
        alone.extend([call] * (hidden.shape[0] == 1))
        return hidden.shape[0] > 1 or len(alone) == MAX_RESCUES + 5

    poison(engine, monkeypatch, when, math.inf, 0)
    deltas, counts = serve(engine, ("a", [5, 9], greedy(LENGTH)))
    assert tokens_of(deltas, "a") == f1.walk(9, MAX_RESCUES + 4)
    assert deltas[-1].error is not None and deltas[-1].error.code == "numerical_error"
    assert counts["nan_guard_trips", ("verify", "inf")] == MAX_RESCUES + 1
    assert counts["nan_guard_actions", ("failed", "model")] == 1
    assert torch.isfinite(engine._runner.pool.pages).all()


@SCHEDULES
def test_an_isolated_request_keeps_to_its_grammar(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids(text: str) -> list[int]:
        return [2 + byte for byte in text.encode()]

    letters = build_f1(tmp_path / "m", vocab=300, tokenizer="bytes", cycle_start=ids(">abcdefgh"))
    engine = make_engine(letters.path, schedule=schedule)
    _poison_drafts(engine, monkeypatch)
    params = greedy(20, grammar=GrammarSpec("regex", "abcdZfgh"))
    deltas, counts = serve(engine, ("a", ids("x>"), params))
    assert tokens_of(deltas, "a") == ids("abcdZfgh") and deltas[-1].finish_reason == "stop"
    assert counts["nan_guard_actions", ("isolated", "draft_token")] == 1
    engine.close()


@SCHEDULES
def test_aborting_an_isolated_request_leaves_nothing(
    f1: F1, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(f1.path, schedule=schedule)
    _poison_drafts(engine, monkeypatch)
    engine.add(request("a", [5, 9], greedy(200)))
    while not any(row.isolated for row in engine._scheduler._running):
        engine.iterate()
    for _ in range(3):
        engine.iterate()
    engine.abort("a")
    finish(engine)
    monkeypatch.undo()
    [answer] = generate(engine, [[5, 9]], greedy(12))
    assert answer.token_ids == f1.walk(9, 12) and answer.steps == [(4, 3, 3)] * 3


def test_a_draft_that_is_never_finite_rebuilds_nothing(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if "shared_head.norm" in name:
                tensor.fill_(math.nan)

    f1 = build_f1(tmp_path / "m", edit_tensors=spoil)
    deltas, counts = serve(make_engine(f1.path), ("a", [5, 9], greedy(12)))
    assert tokens_of(deltas, "a") == f1.walk(9, 12)
    # One behind the prefill, told by the first step with its own
    assert counts["nan_guard_actions", ("drafts_dropped", "draft")] == 12
    assert counts["nan_guard_rows_checked", ("prefill",)] == 1
    assert {name for name, _ in counts} & {"nan_guard_pages_scrubbed", "nan_bundles"} == set()


class _Storm:
    """An engine some of whose requests trip in the same step, once; what each iteration did is written down.

    Attributes:
        turns: In order, (iteration, request) of each step alone.
        emitted: Requests that got tokens, by iteration.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, guilty: set[str]) -> None:
        self.engine = engine
        self.turns: list[tuple[int, str]] = []
        self.emitted: list[set[str]] = []
        self.deltas: list[TokenDelta] = []
        self.counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._guilty = set(guilty)
        self._launch, self._retry = engine._runner.launch, engine._runner.retry
        monkeypatch.setattr(engine._runner, "launch", self._spoil)
        monkeypatch.setattr(engine._runner, "retry", self._note)

    def _spoil(self, rows: Any, allowed: Tensor | None = None) -> Any:
        """Once all stand in one step: no token for the guilty ones' next."""
        names = {row.request.request_id for row in rows}
        if self._guilty and self._guilty <= names:
            slots = [row.slot for row in rows if row.request.request_id in self._guilty]
            self.engine._runner.state.core[slots, NEXT_TOKEN] = -1
            self._guilty = set()
        return self._launch(rows, allowed)

    def _note(self, row: Any, *args: Any, **others: Any) -> Any:
        self.turns.append((len(self.emitted), row.request.request_id))
        return self._retry(row, *args, **others)

    def iterate(self) -> Outputs:
        outputs = self.engine.iterate()
        self.emitted.append({delta.request_id for delta in outputs.deltas})
        self.deltas += outputs.deltas
        self.counts.update({(one.name, one.labels): one.value for one in outputs.stats.counts})
        self.engine._scheduler.check()
        return outputs

    def run(self) -> None:
        while self.engine.has_work():
            self.iterate()
        check_pages(self.engine)


GUILTY = [f"guilty {number}" for number in range(5)]


@SCHEDULES
def test_while_many_climb_the_others_go_on(f1: F1, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(f1.path, schedule=schedule, max_num_seqs=6, max_model_len=400)
    storm = _Storm(engine, monkeypatch, set(GUILTY))
    for number, name in enumerate(["good", *GUILTY]):
        engine.add(request(name, [5, 9 + number], greedy(240 if name == "good" else LENGTH)))
    storm.run()
    assert tokens_of(storm.deltas, "good") == f1.walk(9, 240)
    for number, name in enumerate(GUILTY):
        assert tokens_of(storm.deltas, name) == f1.walk(10 + number, LENGTH)
    assert storm.counts["nan_guard_trips", ("verify", "oov")] == len(GUILTY)
    assert storm.counts["nan_guard_actions", ("retried", "replay")] == len(GUILTY)
    assert [name for _, name in storm.turns] == GUILTY  # each once, in order
    first = storm.turns[0][0]
    assert [at for at, _ in storm.turns] == [first + TURN_EVERY * number for number in range(len(GUILTY))]
    between = storm.emitted[first : storm.turns[-1][0]]
    assert all("good" in names for names in between)


@SCHEDULES
def test_without_others_turns_follow_each_other(
    f1: F1, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is isolated gives way to whoever waits: tokens come by turns."""
    engine = make_engine(f1.path, schedule=schedule)
    storm = _Storm(engine, monkeypatch, set())
    _poison_drafts(engine, monkeypatch)
    for number in range(3):
        engine.add(request(str(number), [5, 9 + number], greedy(12)))
    storm.run()
    for number in range(3):
        assert tokens_of(storm.deltas, str(number)) == f1.walk(9 + number, 12)
    # One turn an iteration, each of one step: eager with drafts was answered
    iterations = [at for at, _ in storm.turns]
    assert len(set(iterations)) == len(iterations) == 3 * 12
    names = [name for _, name in storm.turns]
    assert Counter(names[-21:-6]) == {"0": 5, "1": 5, "2": 5}  # all are isolated, and none is done


@SCHEDULES
def test_suspects_that_lose_their_pages_meanwhile_are_served(
    f1: F1, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is too small for all of them, so some give way while they are held."""
    engine = make_engine(f1.path, schedule=schedule, max_num_seqs=6, num_kv_pages=14, prefix_cache=False)
    storm = _Storm(engine, monkeypatch, set(GUILTY))
    for number, name in enumerate(["good", *GUILTY]):
        engine.add(request(name, [5, 9 + number], greedy(90 if name == "good" else LENGTH)))
    scheduler, lost = engine._scheduler, 0
    while engine.has_work():
        held = [row for row in scheduler._running if row.held]
        preemptions = storm.iterate().stats.preemptions
        lost += sum(row in scheduler._waiting and row.held for row in held) if preemptions else 0
    assert lost > 0 and len(storm.turns) == len(GUILTY)
    for number, name in enumerate(GUILTY):
        assert tokens_of(storm.deltas, name) == f1.walk(10 + number, LENGTH)
    assert tokens_of(storm.deltas, "good") == f1.walk(9, 90)
    check_pages(engine)


@SCHEDULES
def test_one_bundle_an_iteration(
    f1: F1, tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "bundles"
    engine = make_engine(f1.path, schedule=schedule, nan_bundle_dir=str(directory))
    storm = _Storm(engine, monkeypatch, set(GUILTY))
    for number, name in enumerate(GUILTY):
        engine.add(request(name, [5, 9 + number], greedy(LENGTH)))
    storm.run()
    assert storm.counts["nan_bundles", ("written",)] == 1 == len(list(directory.iterdir()))
    assert storm.counts["nan_bundles", ("skipped",)] == len(GUILTY) - 1
    storm._guilty = {"later"}
    engine.add(request("later", [5, 9], greedy(LENGTH)))
    storm.run()
    assert storm.counts["nan_bundles", ("written",)] == 2 == len(list(directory.iterdir()))
