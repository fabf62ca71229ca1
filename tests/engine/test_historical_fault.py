"""The fault that this project exists to make impossible (field note A1), reintroduced and caught.

Draft-extend is captured with query offsets ``[0, W, 2W, ...]`` and replayed with ``cumsum(accept_length + 1)``.
Three requests accept 0, K and 1 drafts.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.build
from engine.config import ModelConfig
from engine.engine import Engine
from engine.graph import DISABLE_AFTER
from engine.guard import Flag, violated_fields
from engine.model.loader import load_model
from engine.options import EngineOptions
from engine.runner import Runner
from engine.sampler import GREEDY
from engine.state import NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN
from engine.step_ops import PlainOps
from tests.engine.drive import generate, greedy, make_engine, request
from tests.engine.varlen import HistoricalFault, TorchVarlen
from tests.fixtures.checkpoints import build_f2
from tests.fixtures.hf_layout import v3_config

K = 3
PROMPTS = [[(7 * i + j * j) % 89 for j in range(length)] for i, length in enumerate([9, 17, 26])]
ACCEPTED = [0, K, 1]
Counts = Counter[tuple[str, tuple[str, ...]]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = v3_config(num_hidden_layers=2, first_k_dense_replace=1)
    return build_f2(tmp_path_factory.mktemp("f2") / "m", config)


def _engine(path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, faulty: bool = True) -> Engine:
    """An engine over the varlen backend, captured, with the fault built in but not armed."""
    monkeypatch.setattr(engine.build, "make_backend", lambda _, spec: TorchVarlen(spec))
    monkeypatch.setattr("engine.runner.VARIANTS", (GREEDY,))  # the others have the same extend phase
    options = EngineOptions(
        model=str(path), device="cpu", threads=1, max_num_seqs=3, kv_page_size=8, num_kv_pages=100,
        graphs="simulate", schedule=schedule, prefix_cache=False,
    )  # fmt: skip
    config = ModelConfig.from_dir(path)

    def load(resolved: Any, max_positions: int) -> Any:
        return load_model(
            path,
            config,
            dtype=resolved.dtype,
            device=resolved.device,
            max_positions=max_positions,
            with_draft=True,
        )

    def adjust(runner: Runner) -> None:
        if faulty:
            runner.step = HistoricalFault(
                decoder=runner.decoder,
                draft=runner.draft,
                backend=runner._backend,
                pool=runner.pool,
                num_speculative_tokens=K,
                ops=PlainOps(runner.state, runner.pool, K),
            )
            runner.step.arm(3, config.hidden_size)

    return Engine(engine.build.assemble(config, options, load, lambda _: None, adjust), options)


def _reach_steady_state(engine_: Engine, path: Path) -> list[list[int]]:
    """Three requests decoding; the tokens that each emits next."""
    plain = generate(make_engine(path, prefix_cache=False), PROMPTS, greedy(40))
    for index, prompt in enumerate(PROMPTS):
        engine_.add(request(str(index), prompt, greedy(40)))
    for _ in range(4):
        engine_.iterate()
    running = engine_._scheduler._running
    assert [row.slot for row in running] == [0, 1, 2] and all(row.may_step for row in running)
    known = (engine_._runner.state.core[:3, SEQ_LEN] + 1).tolist()  # what the host has read may lag behind
    return [plain[i].token_ids[known[i] - row.num_prompt :] for i, row in enumerate(running)]


def _step(engine_: Engine, accepted: list[int], coming: list[list[int]], *, packed: bool) -> torch.Tensor:
    """One replayed step of the first rows from the present state, which is put back; flags of its rows.

    Drafts are set so that each row accepts as many of them as wanted.
    """
    runner = engine_._runner
    state, step, rows = runner.state, runner.step, len(accepted)
    assert isinstance(step, HistoricalFault) and runner.graphs is not None
    kept = [(tensor, tensor.clone()) for tensor in (state.core, runner.pool.pages)]
    for slot, count in enumerate(accepted):
        drafts = [t if i < count else (t + 1) % 80 for i, t in enumerate(coming[slot][:K])]
        assert drafts[count : count + 1] != coming[slot][count : count + 1] or count == K
        state.core[slot, NUM_DRAFTS] = K
        state.core[slot, NEXT_TOKEN + 1 :] = torch.tensor(drafts)
    step.packed.fill_(packed)
    out = runner.graphs.run(list(range(rows)), 1, GREEDY, None)
    assert not isinstance(out, str)
    packed_results = out[0].packed
    if not packed_results[:, -1].any():
        assert packed_results[:, K + 1].tolist() == accepted
    step.packed.fill_(False)
    for tensor, before in kept:
        tensor.copy_(before)
    return packed_results[:, -1]


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_packed_offsets_at_replay_break_batches_and_are_named(
    path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode():
        engine_ = _engine(path, monkeypatch, schedule)
        coming = _reach_steady_state(engine_, path)
        step: Any = engine_._runner.step
    # (a) and (c): a trace without the contract
    with torch.inference_mode():
        step.contract_on = False
        engine_._runner.capture("simulate", 3, lambda _: None)
        assert not _step(engine_, ACCEPTED, coming, packed=False).any()
        right = step.extended.clone()
        flags = _step(engine_, ACCEPTED, coming, packed=True)
        wrong = ~torch.isclose(step.extended, right, atol=1e-5).all(dim=1)
        assert wrong.tolist()[1:] == [True, True], "some request reads the queries of another"
        assert (flags & int(Flag.DRAFT_NAN)).any(), "the guard sees what no kernel wrote"
        # At batch 1 the packed form is right, which is how the fault lived so long
        for accepted in ACCEPTED:
            _step(engine_, [accepted], coming, packed=False)
            alone = step.extended[0].clone()
            assert not _step(engine_, [accepted], coming, packed=True).any()
            assert torch.allclose(step.extended[0], alone, atol=1e-5)
    # (b): the shipped contract
    with torch.inference_mode():
        step.contract_on = True
        engine_._runner.capture("simulate", 3, lambda _: None)
        assert not _step(engine_, ACCEPTED, coming, packed=False).any()
        flags = _step(engine_, ACCEPTED, coming, packed=True)
        assert [violated_fields(flag) for flag in flags.tolist()] == [["cu_seqlens_q"]] * 3


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_a_server_with_the_fault_built_in_names_it_turns_the_graph_off_and_answers_right(
    path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_ = _engine(path, monkeypatch, schedule)
    step: Any = engine_._runner.step
    with torch.inference_mode():
        step.packed.fill_(True)
    # Eager steps go through the same code: what runs after a violation must be the fault-free one
    original = engine_._runner._run_eager

    def run_eager(*args: Any, **kwargs: Any) -> Any:
        step.packed.fill_(False)
        out = original(*args, **kwargs)
        step.packed.fill_(True)
        return out

    monkeypatch.setattr(engine_._runner, "_run_eager", run_eager)
    counts: Counts = Counter()
    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        engine_.add(request(str(index), prompt, greedy(24)))
    while engine_.has_work():
        outputs = engine_.iterate()
        counts.update({(one.name, one.labels): one.value for one in outputs.stats.counts})
        for forward in outputs.stats.forwards:
            counts[forward.phase, (forward.path, forward.reason)] += forward.count
        for delta in outputs.deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    plain = generate(make_engine(path, prefix_cache=False), PROMPTS, greedy(24))
    assert [tokens[str(i)] for i in range(3)] == [answer.token_ids for answer in plain]
    assert counts["graph_contract_violations", ("cu_seqlens_q",)] >= DISABLE_AFTER
    assert counts["step", ("eager", "contract")] > 0
    assert sum(outputs.stats.graphs_disabled.values()) > 0 and counts["step", ("eager", "disabled")] > 0


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_the_shipped_step_over_a_kernel_that_reads_offsets(
    path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(d): replay = eager = the oracle backend, whatever is accepted; nothing is violated."""
    engine_ = _engine(path, monkeypatch, schedule, faulty=False)
    answers = generate(engine_, PROMPTS, greedy(40))
    plain = generate(make_engine(path, prefix_cache=False), PROMPTS, greedy(40))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    assert not any(name == "graph_contract_violations" for name, _ in engine_._runner.counts)
    assert engine_._runner.graphs is not None and engine_._runner.graphs.num_disabled == {}
