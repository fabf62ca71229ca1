"""Captured steps, by a stand-in that freezes what a CUDA graph freezes: capture = replay on any machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.torch_mla import TorchMla
from engine.contract import GraphKey
from engine.engine import Engine
from engine.errors import ConfigError
from engine.graph import DISABLE_AFTER, StepGraphs, buckets
from engine.layout import UniformLayout
from engine.sampler import GREEDY
from engine.spec import slots_check
from engine.state import NEXT_TOKEN, SEQ_LEN
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
    graphs = engine._runner.graphs
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
    with torch.inference_mode():
        for tensor in stale.values():
            tensor.fill_(3)
        mask = torch.zeros((1, *stale["allowed"].shape[1:]), dtype=torch.int32)
        graphs._inputs.copy_in(2, [1], mask, torch.zeros_like(stale["hidden"][:1]))
    padding = graphs.buffers.padding_slot
    assert stale["slots"][:3].tolist() == [slots_check([1, padding]), 1, padding]
    rows = {name: tensor[1:] if name == "slots" else tensor for name, tensor in stale.items()}
    for name, _, filler in graphs.buffers.inputs():
        assert (rows[name][1] == filler).all(), name
        assert (rows[name][2:] == 3).all(), f"{name}: nothing past the bucket is touched"
    with torch.inference_mode():
        graphs._inputs.copy_in(4, [], None, None)
        stale["allowed"].fill_(-1)


def test_a8_what_is_written_is_what_was_bound(captured: Engine) -> None:
    graphs = _graphs(captured)
    for contract, _ in graphs._captured.values():
        bound = {binding.name: binding.pointer for binding in contract.bindings}
        assert bound["slots"] == graphs.buffers.slots.data_ptr()
        assert bound["core"] == captured._runner.state.core.data_ptr()
        assert bound["pages"] == captured._runner.pool.pages.data_ptr()


def test_every_tensor_of_the_slots_state_is_bound(captured: Engine) -> None:
    names = {name for name, value in vars(captured._runner.state).items() if isinstance(value, torch.Tensor)}
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
        monkeypatch.setattr(graphs._inputs, "buffers", moved)
    else:
        bound = [(n, t.clone() if n == name else t) for n, t in graphs._bound]
        monkeypatch.setattr(graphs, "_bound", bound)
    monkeypatch.setattr(graphs, "_faults", Counter())
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


def _tamper(engine: Engine, field: str) -> None:
    """Corrupt what a captured step reads, after the host wrote it."""
    state, buffers = engine._runner.state, _graphs(engine).buffers
    if field == "slots":
        buffers.slots[1] += 1
    elif field == "slots of padding":
        buffers.slots[4] = 0  # a live slot, as an earlier batch may have left it
    elif field == "seq_lens":
        state.core[0, SEQ_LEN] = 10**6
    elif field == "negative seq_lens":
        state.core[0, SEQ_LEN] = -1
    elif field == "block_table":
        state.block_table[0, 0] = captured_pages(engine)
    elif field == "no page":
        state.block_table[0, 0] = 0
    else:
        state.core[0, NEXT_TOKEN] = state.vocab_size


def captured_pages(engine: Engine) -> int:
    return engine._runner.pool.num_pages


TAMPERED = ["slots", "slots of padding", "seq_lens", "negative seq_lens", "block_table", "no page", "oov"]


@pytest.mark.parametrize("field", TAMPERED)
def test_a_value_that_changes_between_copy_in_and_replay_is_named_and_costs_nothing_else(
    path: Path, captured: Engine, field: str
) -> None:
    """Three rows in the bucket of four; the first slot's state, or the slots themselves, are corrupted once."""
    graphs = _graphs(captured)
    graphs._faults.clear()
    prompts = PROMPTS[2:5]
    for index, prompt in enumerate(prompts):
        captured.add(request(str(index), prompt, greedy(24)))
    key = GraphKey("step", 4, GREEDY)
    contract, inner = graphs._captured[key]
    left = [3]

    class Tampered:
        def replay(self) -> tuple[torch.Tensor, ...]:
            left[0] -= 1
            if left[0] == 0:
                _tamper(captured, field)
            out: tuple[torch.Tensor, ...] = inner.replay()
            return out

    graphs._captured[key] = (contract, Tampered())
    answers: dict[str, Answer] = {}
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    while captured.has_work():
        outputs = captured.iterate()
        counts.update({(one.name, one.labels): one.value for one in outputs.stats.counts})
        counts.update(
            {
                ("steps", (one.path, one.reason)): one.count
                for one in outputs.stats.forwards
                if one.phase == "step"
            }
        )
        for delta in outputs.deltas:
            answers.setdefault(delta.request_id, Answer()).take(delta)
    graphs._captured[key] = (contract, inner)
    assert left[0] <= 0
    plain = make_engine(path, prefix_cache=False, num_speculative_tokens=2)
    expected = [answer.token_ids for answer in generate(plain, prompts, greedy(24))]
    assert [answers[str(index)].token_ids for index in range(3)] == expected
    if field == "oov":
        assert counts["nan_guard_trips", ("verify", "oov")] == 1
        assert counts["steps", ("eager", "retry")] == 1
        return
    name = {"slots of padding": "slots", "negative seq_lens": "seq_lens", "no page": "block_table"}.get(
        field, field
    )
    assert counts["graph_contract_violations", (name,)] == 1
    assert counts["steps", ("eager", "contract")] == (3 if name == "slots" else 1)
    assert counts["nan_guard_actions", ("retried", "replay")] == (3 if name == "slots" else 1)


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
    assert make_engine(path, graphs="simulate", enforce_eager=True)._runner.graphs is None


def test_aborts_under_replay_leave_nothing(captured: Engine) -> None:
    answers: dict[str, Answer] = {}
    for index, prompt in enumerate(PROMPTS):
        captured.add(request(str(index), prompt, greedy(20)))
    for iteration in range(4):
        collect(captured, answers)
        captured.abort(str(iteration))
    finish(captured)


def test_rows_that_are_short_have_graphs_of_their_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to two rows of at most 32 positions; a row that outgrows them goes on in the others, at once."""
    lengths: list[set[int]] = []
    prepare = TorchMla.prepare

    def watched(
        self: TorchMla, layout: UniformLayout, table: Tensor, lens: Tensor, most: tuple[int, ...]
    ) -> Any:
        lengths.append(set(most))
        return prepare(self, layout, table, lens, most)

    monkeypatch.setattr(TorchMla, "short_length", lambda self, rows, stride: 32 if rows <= 2 else None)
    monkeypatch.setattr(TorchMla, "prepare", watched)
    engine = make_engine(path, graphs="simulate", max_num_seqs=3, prefix_cache=False, max_model_len=100)
    graphs = _graphs(engine)
    keys = sorted((key.phase, key.rows, key.short) for key in graphs._captured if key.variant == GREEDY)
    assert keys == [
        (phase, rows, short)
        for phase in ("draft", "step")
        for rows, short in ((1, False), (1, True), (2, False), (2, True), (3, False))
    ]
    widths = {key.short: contract.table_width for key, (contract, _) in graphs._captured.items()}
    assert widths == {True: 4, False: engine._runner.state.block_table.shape[1]}
    assert {32} in lengths and {max(*lengths[0], graphs._max_len)} in lengths
    plain = make_engine(path, prefix_cache=False, max_model_len=100)
    for size in (1, 2, 3):
        expected = [answer.token_ids for answer in generate(plain, PROMPTS[:size], greedy(40))]
        lengths.clear()
        replays: Counter[bool] = Counter()
        replay = graphs._replay

        def counted(key: GraphKey | None, *args: Any, replay: Any = replay, replays: Any = replays) -> Any:
            assert key is not None
            replays[key.short] += key.phase == "step"
            return replay(key, *args)

        monkeypatch.setattr(graphs, "_replay", counted)
        assert [answer.token_ids for answer in generate(engine, PROMPTS[:size], greedy(40))] == expected
        assert not lengths, "no step ran eager"
        assert replays[False] and (replays[True] or size == 3)
        monkeypatch.setattr(graphs, "_replay", replay)
