"""The draft phase behind a prefill: what its replay finds is told, and blamed on its own graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.contract import GraphKey
from engine.engine import Engine
from engine.graph import DISABLE_AFTER, StepGraphs
from engine.sampler import GREEDY
from tests.engine.drive import generate, greedy, make_engine
from tests.engine.faults import serve, tokens_of
from tests.fixtures.checkpoints import build_f2
from tests.fixtures.hf_layout import v3_config

SCHEDULES = ["sync", "overlap"]
PROMPT = [(7 * i + 3) % 89 for i in range(20)]
DRAFT = GraphKey("draft", 1, GREEDY)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = v3_config(num_hidden_layers=2, first_k_dense_replace=1)
    return build_f2(tmp_path_factory.mktemp("f2") / "m", config)


class _Damaged:
    """A capture before whose next replay something changes, once."""

    def __init__(self, inner: Any, damage: Callable[[], None]) -> None:
        self._inner, self._damages = inner, [damage]

    def replay(self) -> Any:
        for damage in self._damages:
            damage()
        self._damages = []
        return self._inner.replay()


def _slots(engine: Engine) -> None:
    assert engine._runner.graphs is not None
    engine._runner.graphs.buffers.slots[1] += 1


def _page(engine: Engine) -> None:
    engine._runner.state.block_table[0, 0] = 10**6


DAMAGES = {"slots": _slots, "block_table": _page}


@pytest.mark.parametrize("field", DAMAGES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_replay_finds_is_counted_against_it_until_it_is_off(
    path: Path, field: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the request is rebuilt and answered as if nothing had been; then its form is not replayed."""
    expected = generate(make_engine(path, prefix_cache=False), [PROMPT], greedy(12))[0].token_ids
    monkeypatch.setattr("engine.runner.VARIANTS", (GREEDY,))
    engine = make_engine(path, schedule=schedule, prefix_cache=False, graphs="simulate", max_num_seqs=2)
    graphs = engine._runner.graphs
    assert isinstance(graphs, StepGraphs)
    for time in range(DISABLE_AFTER):
        contract, capture = graphs._captured[DRAFT]
        graphs._captured[DRAFT] = (contract, _Damaged(capture, lambda: DAMAGES[field](engine)))
        deltas, counts = serve(engine, (f"a{time}", PROMPT, greedy(12)))
        graphs._captured[DRAFT] = (contract, capture)
        assert tokens_of(deltas, f"a{time}") == expected
        assert counts["graph_contract_violations", (field,)] == 1
        assert graphs.num_disabled == ({"draft": 1} if time + 1 == DISABLE_AFTER else {})
    deltas, counts = serve(engine, ("b", PROMPT, greedy(12)))
    assert tokens_of(deltas, "b") == expected
    assert not counts["graph_replays", ("draft", "1")] and counts["graph_replays", ("step", "1")]


@pytest.mark.parametrize("scores", [None, 0])
@pytest.mark.parametrize("max_tokens", [0, 9])
def test_draft_kv_that_was_not_finite_is_told_and_not_shared(
    path: Path, max_tokens: int, scores: int | None
) -> None:
    """It is zeros, so who took it from the cache would have worse drafts."""
    if not max_tokens and scores is None:
        pytest.skip("a request of no tokens is one for scores")
    engine = make_engine(path)
    armed, draft = [True], engine._runner.draft
    assert draft is not None

    def poison(module: object, args: object, out: Tensor) -> Tensor:
        if armed and len(out) >= len(PROMPT) - 1:
            armed.clear()
            out[3] = math.nan
        return out

    hook = draft.merge.register_forward_hook(poison)
    params = greedy(max_tokens, prompt_logprobs=scores)
    deltas, counts = serve(engine, ("a", PROMPT, params))
    hook.remove()
    assert not armed and deltas[-1].finish_reason == "length"
    assert counts["nan_guard_trips", ("draft", "nan")] == 1
    assert not any(name == "nan_guard_trips" and labels[0] != "draft" for name, labels in counts)
    deltas, counts = serve(engine, ("b", PROMPT, greedy(9)), ("c", PROMPT, greedy(9)))
    assert next(one.num_cached_tokens for one in deltas if one.request_id == "b") == 0
    assert engine._scheduler._kv.cache, "and those of others are shared"
