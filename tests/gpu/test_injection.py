"""The NaN guard over replayed steps: a fault at each place of a step, what the request gets, and what is counted.

Two requests walk F1's cycle half of it apart, four tokens a step. ``BEHIND`` are the tokens of the faulty one: the
second replay verifies BEHIND[3..6] and emits BEHIND[4..7], its extend phase ends at BEHIND[7], and its draft steps
read BEHIND[8] and BEHIND[9].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import pytest
import torch

from engine.contract import GraphKey
from engine.engine import Engine
from engine.sampler import FULL, GREEDY, Variant
from engine.state import NEXT_TOKEN
from engine.types import SamplingParams
from tests.engine.drive import greedy
from tests.fixtures.checkpoints import F1, build_f1
from tests.gpu.inject import (
    Fault,
    Kind,
    OnReplay,
    draft_fault,
    graphs_of,
    overwritten,
    prefill_fault,
    target_fault,
)
from tests.gpu.serving import FLASH_DIMS, ON_GPU, Served, schedules, serve

pytestmark = ON_GPU
K = 3
FIRST = 9
"""The faulty request's last prompt token."""
MAX_TOKENS = 24
ALL_RIGHT = [(K + 1, K, K)] * (MAX_TOKENS // (K + 1))
SCHEDULES = ["sync", "overlap"]
PARAMS = {
    GREEDY: greedy(MAX_TOKENS),
    FULL: SamplingParams(max_tokens=MAX_TOKENS, temperature=0.3, seed=1),  # e^-67 for any other token
}
VARIANTS = pytest.mark.parametrize("variant", list(PARAMS), ids=["greedy", "full"])
KINDS = pytest.mark.parametrize("kind", ["nan", "inf"])
PREFIXES = count()


@pytest.fixture(scope="module")
def f1(tmp_path_factory: pytest.TempPathFactory) -> F1:
    return build_f1(tmp_path_factory.mktemp("f1") / "m", eos=None, dtype=torch.bfloat16, **FLASH_DIMS)


@pytest.fixture(scope="module")
def engines(f1: F1) -> Iterator[dict[str, Engine]]:
    made = schedules(f1.path, max_num_seqs=3, num_speculative_tokens=K)
    yield made
    made["overlap"].close()


@pytest.fixture(params=SCHEDULES)
def engine(engines: dict[str, Engine], request: pytest.FixtureRequest) -> Engine:
    chosen = engines[request.param]
    graphs_of(chosen)._faults.clear()
    return chosen


@pytest.fixture
def behind(f1: F1) -> list[int]:
    return f1.walk(FIRST, 60)


def _with_params(params: SamplingParams, prompt: list[int], f1: F1) -> list[tuple[str, list[int], Any]]:
    """The faulty request, which gets the first slot, and its neighbour."""
    far = f1.walk(FIRST, 33)[-2:]
    return [("bad", prompt, params), ("good", far, params)]


def _serve_with_replay_fault(
    engine: Engine, f1: F1, key: GraphKey, number: int, fault: Fault, prompt: list[int] | None = None
) -> tuple[Served, bool]:
    """Both requests, with ``fault`` around one replay of a graph; and whether that graph was replaced."""
    graphs = graphs_of(engine)
    contract, inner = graphs._captured[key]
    faulty = OnReplay(inner, number, fault)
    graphs._captured[key] = (contract, faulty)
    try:
        served = serve(engine, _with_params(PARAMS[key.variant], prompt or [5, FIRST], f1))
        replaced = graphs._captured[key][1] is not faulty
    finally:
        if graphs._captured[key][1] is faulty:
            graphs._captured[key] = (contract, inner)
    assert faulty.fired
    _check_neighbour(engine, f1, served)
    return served, replaced


def _check_neighbour(engine: Engine, f1: F1, served: Served) -> None:
    """It noticed nothing, and nothing that is not finite is left."""
    good = served.answers["good"]
    assert good.token_ids == f1.walk(f1.walk(FIRST, 33)[-1], MAX_TOKENS)
    assert good.steps == ALL_RIGHT and good.finish_reason == "length"
    assert torch.isfinite(engine._runner.pool.pages).all()
    assert graphs_of(engine).num_disabled == {}


def _long_prompt(behind: list[int]) -> list[int]:
    """More than a page of tokens that nobody else has; the last ones are those of the short prompt."""
    number = next(PREFIXES)
    digits = [behind[30 + number % 20], behind[30 + number // 20 % 20]]
    return [behind[30], *digits, *(behind[30 + i % 20] for i in range(70)), 5, FIRST]


def _check_failed(engine: Engine, served: Served, f1: F1, prompt: list[int], emitted: list[int]) -> None:
    """The request ended with an error behind ``emitted``, and the prefix cache has nothing of it."""
    bad, end = served.answers["bad"], served.ends["bad"]
    assert bad.token_ids == emitted and bad.finish_reason == "error"
    assert end.token_ids == [] and end.error is not None and end.error.code == "numerical_error"
    assert served.of("nan_guard_actions") == {("failed", "model"): 1}
    assert served.of("nan_guard_pages_scrubbed")[()] > 0
    again = serve(engine, [("again", prompt, greedy(MAX_TOKENS))]).answers["again"]
    assert again.num_cached_tokens == 0 and again.token_ids == f1.walk(FIRST, MAX_TOKENS)


@pytest.mark.parametrize("place", range(K + 1))
@pytest.mark.parametrize("kind", ["nan", "inf", "oov"])
@VARIANTS
def test_a_verify_row_of_one_replay(
    engine: Engine, f1: F1, behind: list[int], variant: Variant, kind: Kind, place: int
) -> None:
    """Eager, the same step is finite: the graph is captured anew, and the request gets every token."""
    key = GraphKey("step", 2, variant)
    fault = target_fault(engine, kind, behind[3 + place], place)
    served, replaced = _serve_with_replay_fault(engine, f1, key, 2, fault)
    bad = served.answers["bad"]
    assert bad.token_ids == behind[:MAX_TOKENS] and bad.steps == ALL_RIGHT
    trips = {labels: value for labels, value in served.of("nan_guard_trips").items() if labels[0] != "draft"}
    assert trips == {("verify", kind): 1}
    assert served.of("nan_guard_actions") == {("retried", "replay"): 1}
    assert served.of("nan_guard_pages_scrubbed")[()] > 0
    assert served.eager_steps == {"retry": 1} and replaced
    assert served.sync_steps["retry"] == (engine.info.schedule == "overlap")


@pytest.mark.parametrize("place", range(1, K + 1))
@KINDS
@VARIANTS
def test_a_verify_row_past_the_accepted_ones(
    engine: Engine, f1: F1, behind: list[int], variant: Variant, kind: Kind, place: int
) -> None:
    """Its drafts are replaced by wrong ones: none is accepted, and what stands at ``place`` costs nothing."""
    state, wrong = engine._runner.state, behind[25 : 25 + K]
    inner = target_fault(engine, kind, wrong[place - 1], place)

    def fault() -> AbstractContextManager[None]:
        with torch.inference_mode():
            state.core[0, NEXT_TOKEN + 1 :].copy_(torch.tensor(wrong))
            state.draft_probs[0].zero_()
            for draft, token in enumerate(wrong):
                state.draft_probs[0, draft, token].fill_(1)  # drawn for certain, and refused for certain
        return inner()

    served, replaced = _serve_with_replay_fault(engine, f1, GraphKey("step", 2, variant), 2, fault)
    bad = served.answers["bad"]
    assert bad.token_ids == behind[:MAX_TOKENS]
    assert bad.steps[:3] == [(4, 3, 3), (1, 3, 0), (4, 3, 3)]
    assert served.of("nan_guard_trips") == {}
    assert served.of("nan_guard_actions") == {("ignored", "none"): 1}
    assert served.eager_steps == {} and not replaced


@pytest.mark.parametrize("draft", range(1, K + 1))
@KINDS
@VARIANTS
def test_a_draft_of_one_replay(
    engine: Engine, f1: F1, behind: list[int], variant: Variant, kind: Kind, draft: int
) -> None:
    """The first one's logits are the extend phase's, the others' those of draft steps: one step without drafts."""
    key = GraphKey("step", 2, variant)
    served, replaced = _serve_with_replay_fault(
        engine, f1, key, 2, draft_fault(engine, kind, behind[6 + draft])
    )
    _check_dropped(served, behind, kind, before=2)
    assert not replaced


@pytest.mark.parametrize("draft", [2, 3])
@KINDS
@VARIANTS
def test_a_draft_behind_a_prefill(
    engine: Engine, f1: F1, behind: list[int], variant: Variant, kind: Kind, draft: int
) -> None:
    """The draft phase of its own graph; its first draft comes from the prefill's state."""
    key = GraphKey("draft", 2, variant)
    served, replaced = _serve_with_replay_fault(
        engine, f1, key, 1, draft_fault(engine, kind, behind[draft - 2])
    )
    _check_dropped(served, behind, kind, before=0)
    assert not replaced


def _check_dropped(served: Served, behind: list[int], kind: Kind, before: int) -> None:
    """One trip, one step without drafts behind ``before`` full ones, and acceptance as before."""
    bad = served.answers["bad"]
    assert bad.token_ids == behind[:MAX_TOKENS]
    expected = [(K + 1, K, K)] * 6
    expected.insert(before, (1, 0, 0))
    assert bad.steps == [*expected[:-1], (3, K, 3)]  # what is left of max_tokens
    assert served.of("nan_guard_trips") == {("draft", kind): 1}
    assert served.of("nan_guard_actions") == {("drafts_dropped", "draft"): 1}
    assert served.eager_steps == {}


@pytest.mark.parametrize("place", range(1, K + 1))
@KINDS
def test_a_fault_of_every_step_with_drafts(
    engine: Engine, f1: F1, behind: list[int], kind: Kind, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay and eager step with drafts are not finite, the next token alone is: the drafts are to blame."""
    fault = target_fault(engine, kind, behind[3 + place], place)
    original = engine._runner.retry

    def retry(*args: Any, verify_drafts: bool, **others: Any) -> Any:
        with fault() if verify_drafts else nullcontext():
            return original(*args, verify_drafts=verify_drafts, **others)

    monkeypatch.setattr(engine._runner, "retry", retry)
    served, replaced = _serve_with_replay_fault(engine, f1, GraphKey("step", 2, GREEDY), 2, fault)
    assert served.answers["bad"].token_ids == behind[:MAX_TOKENS]
    assert served.of("nan_guard_trips")["verify", kind] == 1
    assert served.of("nan_guard_actions") == {("retried", "draft_token"): 1}
    assert served.eager_steps == {"retry": 2} and not replaced


@KINDS
def test_a_fault_of_the_model_itself(
    engine: Engine, f1: F1, behind: list[int], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing finds a finite step: the request ends with what it has, and leaves nothing behind."""
    fault, original = target_fault(engine, kind, behind[3], 0), engine._runner.retry

    def retry(*args: Any, **others: Any) -> Any:
        with fault():
            return original(*args, **others)

    monkeypatch.setattr(engine._runner, "retry", retry)
    prompt = _long_prompt(behind)
    served, replaced = _serve_with_replay_fault(engine, f1, GraphKey("step", 2, GREEDY), 2, fault, prompt)
    assert served.of("nan_guard_trips")["verify", kind] == 1
    assert served.eager_steps == {"retry": 2} and not replaced
    monkeypatch.undo()
    _check_failed(engine, served, f1, prompt, behind[:4])


@pytest.mark.parametrize("position", [0, 40, -2])
@KINDS
def test_a_prefill(
    engine: Engine,
    f1: F1,
    behind: list[int],
    kind: Kind,
    position: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of both requests in one call, at one token of one of them; -2 is the last position that is prefilled."""
    prompt, poison = _long_prompt(behind), behind[55]
    prompt[position] = poison
    fault, original = prefill_fault(engine, kind, poison), engine._runner.prefill

    def prefill(chunks: Any) -> Any:
        with fault():
            return original(chunks)

    monkeypatch.setattr(engine._runner, "prefill", prefill)
    served = serve(engine, _with_params(PARAMS[GREEDY], prompt, f1))
    monkeypatch.undo()
    _check_neighbour(engine, f1, served)
    trips = {labels: value for labels, value in served.of("nan_guard_trips").items() if labels[0] != "draft"}
    assert trips == {("prefill", kind): 1}
    assert served.eager_steps == {"retry": 1}
    assert (
        served.forwards["prefill", "replay", "none"] > 0 and served.forwards["prefill", "eager", "retry"] == 1
    )
    _check_failed(engine, served, f1, prompt, [])


@pytest.mark.parametrize("position", [0, 40, -2])
@KINDS
def test_a_prefill_of_one_replay(
    engine: Engine, f1: F1, behind: list[int], kind: Kind, position: int
) -> None:
    """Of both requests in one replay; computed again, eager, it is finite: the request gets every token."""
    prompt, poison = _long_prompt(behind), behind[55]
    prompt[position] = poison
    fault = prefill_fault(engine, kind, poison)
    key = GraphKey("prefill", 96, GREEDY)  # 74 tokens of one, 1 of the other
    served, replaced = _serve_with_replay_fault(engine, f1, key, 1, fault, prompt)
    assert served.answers["bad"].token_ids == behind[:MAX_TOKENS]
    trips = {labels: value for labels, value in served.of("nan_guard_trips").items() if labels[0] != "draft"}
    assert trips == {("prefill", kind): 1}
    assert served.of("nan_guard_actions") == {("retried", "replay"): 1}
    assert served.eager_steps == {"retry": 1} and replaced


def test_a_fault_leaves_the_weights_as_they_were(engine: Engine, behind: list[int]) -> None:
    weight = engine._runner.step._decoder.embedding.weight
    before = weight.clone()
    with overwritten((weight[behind[0]], float("nan"))):
        assert not torch.isfinite(weight).all()
    assert torch.equal(weight, before)
