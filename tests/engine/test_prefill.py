"""Prefills of few tokens: uniform as ragged, replayed as eager, and what becomes of their faults."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contract import GraphKey
from engine.engine import Engine
from engine.graph import DISABLE_AFTER, StepGraphs
from engine.prefill import COLUMNS, Prefill, Prefilled, Tokens, token_buckets
from engine.sampler import GREEDY
from engine.types import SamplingParams
from tests.engine.drive import Answer, generate, greedy, make_engine, request
from tests.engine.faults import tokens_of
from tests.fixtures.checkpoints import F1, build_f1, build_f2
from tests.fixtures.hf_layout import v3_config

SCHEDULES = ["sync", "overlap"]
PROMPTS = [[(7 * i + j * j) % 89 for j in range(length)] for i, length in enumerate([2, 9, 17, 40, 60])]
MOST = 24
"""Tokens of the largest captured prefill here: buckets of 16 and 24."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = v3_config(num_hidden_layers=2, first_k_dense_replace=1)
    return build_f2(tmp_path_factory.mktemp("f2") / "m", config)


def _engine(path: Path, **options: Any) -> Engine:
    """An engine whose steps of one and two rows, and prefills of up to ``MOST`` tokens, are captured."""
    defaults = {
        "graphs": "simulate",
        "max_num_seqs": 2,
        "max_graph_prefill_tokens": MOST,
        "prefix_cache": False,
    }
    with pytest.MonkeyPatch.context() as only:
        only.setattr("engine.runner.VARIANTS", (GREEDY,))
        return make_engine(path, **defaults | options)


@pytest.fixture(scope="module", params=SCHEDULES)
def captured(f1: F1, request: pytest.FixtureRequest) -> Engine:
    return _engine(f1.path, schedule=request.param)


def _graphs(engine: Engine) -> StepGraphs:
    graphs = engine._runner.graphs
    assert graphs is not None
    return graphs


def _serve(engine: Engine, *prompts: list[int], tokens: int = 12) -> tuple[list[list[int]], Counter[Any]]:
    """What each prompt is answered, and what was counted; of forwards, those of prefills."""
    for index, prompt in enumerate(prompts):
        engine.add(request(str(index), prompt, greedy(tokens)))
    deltas, counts = [], Counter[Any]()
    while engine.has_work():
        outputs = engine.iterate()
        deltas += outputs.deltas
        counts.update({(one.name, one.labels): one.value for one in outputs.stats.counts})
        prefills = [one for one in outputs.stats.forwards if one.phase == "prefill"]
        counts.update({("prefill", one.path, one.reason): one.count for one in prefills})
        engine._scheduler.check()
    return [tokens_of(deltas, str(index)) for index in range(len(prompts))], counts


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0, []), (5, [5]), (16, [16]), (24, [16, 24]), (512, [16, 32, 64, 96, 128, 192, 256, 384, 512])],
)
def test_the_last_bucket_is_the_limit_itself(limit: int, expected: list[int]) -> None:
    assert token_buckets(limit) == expected


@pytest.mark.parametrize("spans", [[(0, 9)], [(0, 5), (0, 16)], [(7, 12), (0, 3), (16, 30)], [(0, 1)]])
def test_uniform_is_ragged(path: Path, spans: list[tuple[int, int]]) -> None:
    """Whatever the mix of requests, contexts and padding: the same states, and the same KV of both models."""
    engine = make_engine(path, num_speculative_tokens=2)
    prefill, state, pool = engine._runner._prefill, engine._runner.state, engine._runner.pool
    before = [(0, start) for start, _ in spans]
    with torch.inference_mode():
        for slot in range(len(spans)):
            state.block_table[slot, :4] = torch.tensor([4 * slot + page for page in (3, 1, 4, 2)])
        out, kept = [], []
        for form in ("ragged", "uniform"):
            pool.pages.zero_()
            for slot, (start, end) in enumerate(before):
                if end:
                    _ragged(prefill, _tokens([slot], [(start, end)]))
            tokens = _tokens(list(range(len(spans))), spans)
            out.append(
                _ragged(prefill, tokens)
                if form == "ragged"
                else prefill.uniform(prefill.uniform_inputs(tokens, len(tokens.ids) + 3))
            )
            kept.append(pool.pages[:, 1:].clone())
    live = sum(end - start for start, end in spans)
    torch.testing.assert_close(out[1].target_hidden[:live], out[0].target_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[1].hidden[:live], out[0].hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-4, atol=1e-5)
    assert int(out[1].verdict) == 0 and not out[1].found.any()


def _ragged(prefill: Prefill, tokens: Tokens) -> Prefilled:
    return prefill.ragged(tokens, *prefill.staged(tokens))


def _tokens(slots: list[int], spans: list[tuple[int, int]]) -> Tokens:
    ids = [(31 * slot + 7 * p) % 89 for slot, span in zip(slots, spans, strict=True) for p in range(*span)]
    shifted = [(31 * slot + 7 * p + 7) % 89 for slot, s in zip(slots, spans, strict=True) for p in range(*s)]
    return Tokens(slots, spans, ids, shifted)


@pytest.mark.parametrize("column", range(COLUMNS))
def test_inputs_that_are_not_those_written_are_not_taken(path: Path, column: int) -> None:
    engine = make_engine(path)
    prefill, pool = engine._runner._prefill, engine._runner.pool
    with torch.inference_mode():
        engine._runner.state.block_table[:2, :2] = torch.tensor([[1, 2], [3, 4]])
        inputs = prefill.uniform_inputs(_tokens([0, 1], [(0, 9), (0, 4)]), 16)
        inputs[1 + 10, column] += 10**9
        out = prefill.uniform(inputs)
    assert int(out.verdict) != 0 and out.hidden.isfinite().all()
    assert not pool.pages[:, 1:].any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replayed_prefills_change_no_token(path: Path, schedule: str) -> None:
    """Alone, two at once, more than fit a bucket, in chunks, behind cached blocks."""
    plain = make_engine(path, prefix_cache=False)
    expected = [answer.token_ids for answer in generate(plain, PROMPTS, greedy(12))]
    engine = _engine(path, schedule=schedule, prefill_chunk_size=20, prefix_cache=True)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        for _ in range(2):
            [got], counts = _serve(engine, prompt)
            assert got == answer
            assert counts["prefill", "replay", "none"] > 0
            assert counts["prefill", "eager", "prefill"] == 0
    assert _serve(engine, *PROMPTS)[0] == expected


def test_what_is_replayed_and_what_is_not(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(path)
    _, counts = _serve(engine, PROMPTS[1])  # 8 tokens to prefill
    assert counts["prefill", "replay", "none"] == 1
    assert counts["graph_replays", ("prefill", "16")] == 1
    assert counts["nan_guard_rows_checked", ("prefill",)] == 8
    _, counts = _serve(engine, PROMPTS[3])  # 39, more than the largest graph
    assert counts["prefill", "eager", "prefill"] == 1 and not counts["prefill", "replay", "none"]
    monkeypatch.setattr("engine.runner.MAX_KEYS", 1 + 2 + 3 + 4 + 5 + 6 + 7)
    _, counts = _serve(engine, PROMPTS[1])
    assert counts["prefill", "eager", "prefill"] == 1 and not counts["prefill", "replay", "none"]
    _, counts = _serve(engine, PROMPTS[1][:8])
    assert counts["prefill", "replay", "none"] == 1
    assert _graphs(engine).captured_rows["prefill"] == [16, 24]


def test_prefills_that_are_read_at_once_are_not_replayed(path: Path) -> None:
    engine = _engine(path)
    engine.add(request("a", PROMPTS[1], SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)))
    forwards = [one for _ in range(5) for one in engine.iterate().stats.forwards if one.phase == "prefill"]
    assert [(one.path, one.reason) for one in forwards] == [("eager", "prefill")]


def test_a_prefill_under_another_binding_is_named_and_runs_eager(path: Path) -> None:
    engine = _engine(path)
    graphs = _graphs(engine)
    [plain], _ = _serve(engine, PROMPTS[1])
    graphs.prefill_inputs = graphs.prefill_inputs.clone()
    totals = Counter[Any]()
    for _ in range(DISABLE_AFTER + 2):
        [got], counts = _serve(engine, PROMPTS[1])
        assert got == plain
        totals += counts
    assert totals["graph_contract_violations", ("prefill_inputs",)] == DISABLE_AFTER
    assert totals["prefill", "eager", "contract"] == DISABLE_AFTER
    assert totals["prefill", "eager", "disabled"] == 2
    assert graphs.num_disabled == {"prefill": 1}


class _Replaced:
    """A captured prefill around the first replay of which something is done."""

    def __init__(self, inner: Any, before: Any, after: Any) -> None:
        self.inner, self._before, self._after = inner, before, after

    def replay(self) -> tuple[Tensor, ...]:
        self._before()
        out: tuple[Tensor, ...] = self.inner.replay()
        self._after()
        self._before = self._after = lambda: None
        return out


KEY = GraphKey("prefill", 16, GREEDY)


def test_inputs_that_change_before_the_replay_cost_a_rebuild_and_nothing_else(
    f1: F1, captured: Engine
) -> None:
    """The first request's tokens name the second one's slot: nothing of it is written there."""
    graphs = _graphs(captured)
    graphs._faults.clear()
    contract, inner = graphs._captured[KEY]

    def corrupt() -> None:
        graphs.prefill_inputs[1:4, 0] = 1

    graphs._captured[KEY] = contract, _Replaced(inner, corrupt, lambda: None)
    got, counts = _serve(captured, [5, 9, 3, 8], [7, 7, 7, 11])
    graphs._captured[KEY] = contract, inner
    assert got == [f1.walk(8, 12), f1.walk(11, 12)]
    assert counts["graph_contract_violations", ("prefill_inputs",)] == 1
    assert counts["prefill", "eager", "retry"] >= 1
    assert counts["nan_guard_actions", ("retried", "replay")] == 2
    assert graphs._faults == {KEY: 1}, "two requests tell of one replay"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_fault_of_the_replay_alone_replaces_the_graph_and_the_request_goes_on(
    f1: F1, captured: Engine, value: float
) -> None:
    graphs = _graphs(captured)
    graphs._faults.clear()
    contract, inner = graphs._captured[KEY]
    weight = captured._runner.decoder.embedding.weight
    clean = weight[3].clone()
    poisoned = _Replaced(inner, lambda: weight[3].fill_(value), lambda: weight[3].copy_(clean))
    graphs._captured[KEY] = contract, poisoned
    with torch.inference_mode():
        [got], counts = _serve(captured, [5, 3, 8])
    assert got == f1.walk(8, 12)
    assert sum(counts["nan_guard_trips", ("prefill", kind)] for kind in ("nan", "inf")) == 1
    assert counts["nan_guard_actions", ("retried", "replay")] == 1
    assert graphs._captured[KEY][1] is not poisoned and graphs._faults == {KEY: 1}


def test_a_model_whose_prefill_is_not_finite_ends_the_request(tmp_path: Path, f1: F1) -> None:
    engine = _engine(build_f1(tmp_path / "m").path)
    token = next(token for token in range(f1.vocab_size) if token not in [7, 11, *f1.walk(11, 20)])
    with torch.inference_mode():
        engine._runner.decoder.embedding.weight[token] = math.nan
    engine.add(request("a", [5, token, 8], greedy(9)))
    engine.add(request("b", [7, 11], greedy(9)))
    answers: dict[str, Answer] = {}
    counts = Counter[Any]()
    while engine.has_work():
        outputs = engine.iterate()
        counts.update({(one.name, one.labels): one.value for one in outputs.stats.counts})
        for delta in outputs.deltas:
            answers.setdefault(delta.request_id, Answer()).take(delta)
    assert answers["b"].token_ids == f1.walk(11, 9)
    assert counts["nan_guard_actions", ("failed", "model")] == 1
    assert counts["nan_guard_actions", ("retried", "replay")] == 0
    assert _graphs(engine)._faults == {}, "the graph is not at fault"


def test_the_uniform_form_at_fault_costs_rescues_until_its_graph_is_off_and_no_request(
    f1: F1, captured: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only rows of single tokens meet is not tried eager in the same form."""
    graphs = _graphs(captured)
    graphs._faults.clear()
    weight = captured._runner.decoder.embedding.weight
    clean = weight[3].clone()

    class Faulty:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def replay(self) -> tuple[Tensor, ...]:
            weight[3].fill_(math.nan)
            out: tuple[Tensor, ...] = self._inner.replay()
            weight[3].copy_(clean)
            return out

    capture_one = graphs._capture_prefill
    monkeypatch.setattr(graphs, "_capture_prefill", lambda tokens: Faulty(capture_one(tokens)))
    contract, inner = graphs._captured[KEY]
    graphs._captured[KEY] = contract, Faulty(inner)
    with torch.inference_mode():
        for number in range(DISABLE_AFTER + 3):
            [got], counts = _serve(captured, [5, 3, 8])
            assert got == f1.walk(8, 12)
            rescued = number < DISABLE_AFTER
            assert counts["nan_guard_actions", ("retried", "replay")] == rescued
            assert counts["prefill", "eager", "disabled"] == (not rescued)
    assert graphs.num_disabled == {"prefill": 1}
    graphs._captured[KEY] = contract, inner
    graphs._faults.clear()


def test_an_eager_uniform_prefill_at_fault_is_computed_again_ragged(
    f1: F1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU without graphs."""
    engine = _engine(f1.path)
    engine._runner.graphs = None
    inputs, left = engine._runner._prefill.uniform_inputs, [1]

    def corrupted(tokens: Tokens, count: int) -> Tensor:
        made = inputs(tokens, count)
        made[1, 2] += left.pop() if left else 0
        return made

    monkeypatch.setattr(engine._runner._prefill, "uniform_inputs", corrupted)
    [got], counts = _serve(engine, [5, 3, 8])
    assert got == f1.walk(8, 12)
    assert counts["graph_contract_violations", ("prefill_inputs",)] == 1
    assert counts["prefill", "eager", "retry"] == 1
    assert counts["nan_guard_actions", ("retried", "replay")] == 1
