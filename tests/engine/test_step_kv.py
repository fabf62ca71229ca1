"""What the step leaves in the pool: true draft KV, untouched neighbours, nothing a graph could not capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from engine.engine import Engine
from engine.sampler import FULL, GREEDY, Variant
from engine.sequence import Sequence
from tests.engine.drive import finish, greedy, make_engine, request
from tests.fixtures.checkpoints import build_f2

PROMPTS = [[5, 9, 2, 7, 7, 1], [3, 4], [(i * 7) % 89 for i in range(30)]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_f2(tmp_path_factory.mktemp("f2") / "m")


def _running(engine: Engine) -> list[Sequence]:
    return list(engine._scheduler._running)


def _latents(engine: Engine, sequence: Sequence, count: int) -> Tensor:
    """``[planes, count, latent_dim]``: what the pool holds for a sequence's first positions."""
    pages = engine._runner.pool.pages[:, torch.tensor(sequence.pages)]
    return pages.flatten(1, 2)[:, :count].clone()


@pytest.mark.parametrize("iterations", [2, 3, 6])
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_b14_latents_of_accepted_positions_are_those_of_a_fresh_prefill(
    path: Path, schedule: str, iterations: int
) -> None:
    """Target and draft planes alike: nothing written from guessed hidden states survives."""
    engine = make_engine(path, prefix_cache=False, schedule=schedule)
    for index, prompt in enumerate(PROMPTS):
        engine.add(request(str(index), prompt, greedy(40)))
    for _ in range(iterations):
        engine.iterate()
    for sequence in _running(engine):
        fresh = make_engine(path, prefix_cache=False)
        fresh.add(request("again", sequence.tokens, greedy(5)))
        fresh.iterate()
        written = len(sequence.tokens) - 1
        expected = _latents(fresh, _running(fresh)[0], written)
        torch.testing.assert_close(_latents(engine, sequence, written), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 29, 30])
def test_b13_draft_latents_do_not_depend_on_chunk_boundaries(path: Path, chunk: int) -> None:
    prompt = PROMPTS[2]
    whole = make_engine(path, prefix_cache=False)
    whole.add(request("a", prompt, greedy(5)))
    whole.iterate()
    chunked = make_engine(path, prefix_cache=False, prefill_chunk_size=chunk)
    chunked.add(request("a", prompt, greedy(5)))
    while _running(chunked) == [] or _running(chunked)[0].prefilled < _running(chunked)[0].prefill_end:
        chunked.iterate()
    expected = _latents(whole, _running(whole)[0], len(prompt) - 1)
    got = _latents(chunked, _running(chunked)[0], len(prompt) - 1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def _mid_generation(path: Path) -> Engine:
    engine = make_engine(path, prefix_cache=False)
    for index, prompt in enumerate(PROMPTS):
        engine.add(request(str(index), prompt, greedy(40)))
    for _ in range(3):
        engine.iterate()
    return engine


@pytest.mark.parametrize("variant", [GREEDY, FULL])
def test_a3_padding_rows_touch_only_the_scratch_page(path: Path, variant: Variant) -> None:
    engine = _mid_generation(path)
    runner = engine._runner
    pool, state = runner.pool, runner.state
    running = _running(engine)
    owned = {page for sequence in running for page in sequence.pages}
    spare = [page for page in range(1, pool.num_pages) if page not in owned]
    pool.pages[:, torch.tensor(spare)] = 7.25
    live = torch.tensor([sequence.slot for sequence in running])
    padded = torch.cat([live, torch.full((5,), state.padding_slot)])
    max_len = state.block_table.shape[1] * runner.pool.page_size
    before, core = pool.pages.clone(), state.core.clone()
    with torch.inference_mode():
        straight = runner.step.run(live, (max_len,) * len(live), variant).packed.clone()
        pool.pages.copy_(before)
        state.core.copy_(core)
        out = runner.step.run(padded, (max_len,) * len(padded), variant).packed
    assert torch.equal(out[: len(running)], straight)
    assert torch.equal(pool.pages[:, torch.tensor(spare)], before[:, torch.tensor(spare)])
    assert not state.core[state.padding_slot].any()
    assert torch.isfinite(pool.pages[:, 0]).all()


@pytest.mark.parametrize("variant", [GREEDY, FULL])
@pytest.mark.parametrize("k", [0, 3])
def test_the_whole_step_traces_without_a_look_at_a_value(path: Path, k: int, variant: Variant) -> None:
    """Fake tensors have no data: an ``.item()`` or a branch on a value inside the step would raise."""
    engine = make_engine(path, num_speculative_tokens=k)
    step, state = engine._runner.step, engine._runner.state
    slots = torch.tensor([0, state.padding_slot])
    max_len = state.block_table.shape[1] * engine._runner.pool.page_size
    with torch.no_grad():
        step.run(slots, (max_len,) * 2, variant)  # fills the layouts' cache with real tensors
        graph = make_fx(
            lambda rows: step.run(rows, (max_len,) * 2, variant).packed,
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(slots)
    names = {str(node.target) for node in graph.graph.nodes}
    assert not [name for name in names if "local_scalar" in name or "nonzero" in name]
    assert sum("index_copy" in name for name in names) > 0


def test_i6_counts_cover_every_forward(path: Path) -> None:
    engine = make_engine(path)
    engine.add(request("a", PROMPTS[2], greedy(9)))
    counted: dict[tuple[str, str, str], int] = {}
    while engine.has_work():
        for forward in engine.iterate().stats.forwards:
            key = (forward.phase, forward.path, forward.reason)
            counted[key] = counted.get(key, 0) + forward.count
    assert counted[("prefill", "eager", "prefill")] == 1
    assert counted[("draft", "eager", "no_graphs")] == 1
    assert counted[("step", "eager", "no_graphs")] >= 3
    assert len(counted) == 3
    finish(engine)
