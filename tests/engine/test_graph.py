"""Captured steps, by a stand-in that freezes what a CUDA graph freezes: capture = replay on any machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import ConfigError
from engine.graph import DISABLE_AFTER, StepGraphs, buckets
from engine.types import SamplingParams
from tests.engine.drive import Answer, collect, finish, generate, greedy, make_engine, request
from tests.fixtures.checkpoints import build_f2
from tests.fixtures.hf_layout import v3_config

PROMPTS = [[(7 * i + j * j) % 89 for j in range(length)] for i, length in enumerate([1, 2, 9, 17, 40])]
SAMPLED = SamplingParams(max_tokens=20, seed=2, temperature=0.7, top_k=12, top_p=0.9, frequency_penalty=0.4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = v3_config(num_hidden_layers=2, first_k_dense_replace=1)
    return build_f2(tmp_path_factory.mktemp("f2") / "m", config)


@pytest.fixture(scope="module")
def captured(path: Path) -> Engine:
    return make_engine(path, graphs="simulate", max_num_seqs=4, prefix_cache=False, num_speculative_tokens=2)


def _graphs(engine: Engine) -> StepGraphs:
    graphs = engine._runner._graphs
    assert graphs is not None
    return graphs


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, *range(8, 65, 8)]),
    ],
)
def test_the_last_bucket_is_the_limit_itself(limit: int, expected: list[int]) -> None:
    assert buckets(limit) == expected


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_replay_equals_eager_at_every_batch_size(path: Path, schedule: str) -> None:
    """A7: lengths differ and change at every step; buckets switch as requests come and go."""
    engine = make_engine(path, graphs="simulate", max_num_seqs=3, prefix_cache=False, schedule=schedule)
    plain = make_engine(path, max_num_seqs=3, prefix_cache=False)
    for params in (greedy(20), SAMPLED):
        for size in (1, 2, 3):
            expected = [answer.token_ids for answer in generate(plain, PROMPTS[:size], params)]
            assert [answer.token_ids for answer in generate(engine, PROMPTS[:size], params)] == expected


def test_a6_steady_decode_never_runs_eager_and_one_row_too_many_is_seen(path: Path) -> None:
    engine = make_engine(path, graphs="simulate", max_num_seqs=5, max_graph_rows=2, prefix_cache=False)
    for size, reason in ((2, "none"), (3, "above_bucket")):
        for index, prompt in enumerate(PROMPTS[:size]):
            engine.add(request(str(index), prompt, greedy(12)))
        steps: Counter[tuple[str, str]] = Counter()
        while engine.has_work():
            for forward in engine.iterate().stats.forwards:
                if forward.phase == "step":
                    steps[forward.path, forward.reason] += forward.count
        if size == 2:
            assert set(steps) == {("replay", "none")}
        else:
            assert steps["eager", reason] > 0


def test_replays_padding_and_checks_are_counted(captured: Engine) -> None:
    for index, prompt in enumerate(PROMPTS[:3]):
        captured.add(request(str(index), prompt, greedy(9)))
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    steps = 0
    while captured.has_work():
        stats = captured.iterate().stats
        steps += sum(f.count for f in stats.forwards if f.phase == "step")
        for count in stats.counts:
            counts[count.name, count.labels] += count.value
    replays = {labels: value for (name, labels), value in counts.items() if name == "graph_replays"}
    assert sum(value for (phase, _), value in replays.items() if phase == "step") == steps
    assert sum(replays.values()) == counts["graph_contract_checks", ()]
    # Three live rows in the bucket of four
    assert counts["graph_padding_rows", ()] == replays["step", "4"] + replays.get(("draft", "4"), 0)


def test_a2_every_input_of_a_padding_row_holds_its_filler(captured: Engine) -> None:
    graphs = _graphs(captured)
    stale = {name: tensor for name, tensor, _ in graphs.buffers.inputs()}
    for tensor in stale.values():
        with torch.inference_mode():
            tensor.fill_(3)
    words = stale["allowed"].shape[1:]
    with torch.inference_mode():
        hidden = torch.zeros_like(stale["hidden"][:1])
        graphs._copy_in(2, [1], torch.zeros((1, *words), dtype=torch.int32), hidden)
    for name, tensor, filler in graphs.buffers.inputs():
        assert (tensor[1] == filler).all(), name
        assert (tensor[2:] == 3).all(), f"{name}: nothing past the bucket is touched"
    assert stale["slots"][0] == 1
    with torch.inference_mode():
        graphs._copy_in(4, [], None, None)
    with torch.inference_mode():
        stale["allowed"].fill_(-1)


def test_a8_what_is_written_is_what_was_bound(captured: Engine) -> None:
    graphs = _graphs(captured)
    for contract, _ in graphs._captured.values():
        bound = {binding.name: binding.pointer for binding in contract.bindings}
        assert bound["slots"] == graphs.buffers.slots.data_ptr()
        assert bound["core"] == captured._runner._state.core.data_ptr()
        assert bound["pages"] == captured._runner._pool.pages.data_ptr()


def test_every_tensor_of_the_slots_state_is_bound(captured: Engine) -> None:
    names = {name for name, value in vars(captured._runner._state).items() if isinstance(value, torch.Tensor)}
    contract = next(iter(_graphs(captured)._captured.values()))[0]
    assert names <= {binding.name for binding in contract.bindings}


BOUND = ["slots", "allowed", "pages", "core", "draft_probs", "block_table", "keys", "top_k", "floats"]


@pytest.mark.parametrize("name", BOUND)
def test_a_tensor_that_is_not_the_bound_one_is_named_and_the_step_runs_eager(
    path: Path, captured: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = _graphs(captured)
    if name in ("slots", "allowed"):
        moved = replace(graphs.buffers, **{name: getattr(graphs.buffers, name).clone()})
        monkeypatch.setattr(graphs, "buffers", moved)
    else:
        bound = [(n, t.clone() if n == name else t) for n, t in graphs._bound]
        monkeypatch.setattr(graphs, "_bound", bound)
    monkeypatch.setattr(graphs, "_violations", Counter())
    captured.add(request("a", PROMPTS[2], greedy(24)))
    answers: dict[str, Answer] = {}
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    reasons: Counter[str] = Counter()
    while captured.has_work():
        outputs = captured.iterate()
        for count in outputs.stats.counts:
            counts[count.name, count.labels] += count.value
        reasons.update({f.reason: f.count for f in outputs.stats.forwards if f.phase == "step"})
        for delta in outputs.deltas:
            answers.setdefault("a", Answer()).take(delta)
    # One more for the draft phase behind the prefill, which has a contract of its own
    assert counts["graph_contract_violations", (name,)] == DISABLE_AFTER + 1
    assert reasons["contract"] == DISABLE_AFTER and reasons["disabled"] > 0 and "none" not in reasons
    lone = make_engine(path, prefix_cache=False, num_speculative_tokens=2)
    plain = generate(lone, [PROMPTS[2]], greedy(24))[0]
    assert answers["a"].token_ids == plain.token_ids


@pytest.mark.parametrize("field", ["rows", "stride", "table_width", "num_pages", "padding_slot", "backend"])
def test_a_frozen_value_that_changed_is_named(captured: Engine, field: str) -> None:
    contract = next(iter(_graphs(captured)._captured.values()))[0]
    other: int | str = "other" if field == "backend" else -5
    assert contract.violation(replace(contract, **{field: other})) == field  # type: ignore[arg-type]
    assert contract.violation(replace(contract)) is None


def test_cuda_graphs_without_a_gpu_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="graphs='cuda'"):
        make_engine(path, graphs="cuda")


def test_enforce_eager_captures_nothing(path: Path) -> None:
    assert make_engine(path, graphs="simulate", enforce_eager=True)._runner._graphs is None


def test_aborts_under_replay_leave_nothing(captured: Engine) -> None:
    answers: dict[str, Answer] = {}
    for index, prompt in enumerate(PROMPTS):
        captured.add(request(str(index), prompt, greedy(20)))
    for iteration in range(4):
        collect(captured, answers)
        captured.abort(str(iteration))
    finish(captured)
