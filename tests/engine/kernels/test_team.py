"""Rows that several programs read together: they decide as one program does, and as the plain operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from engine.guard import Flag
from engine.sampler import FULL, mask_words
from tests.engine.kernels.step_pair import INF, NAN, SLOTS, make_state
from tests.engine.kernels.test_sample import (
    CONSTRAINED,
    LIMITS,
    ROWS,
    Sampling,
    _params,
    bound_state,
    spread_logits,
)

step = pytest.importorskip("engine.kernels.step", reason="Triton is not installed")
team = pytest.importorskip("engine.kernels.team", reason="Triton is not installed")
crew = pytest.importorskip("tests.engine.kernels.crew", reason="Triton is not installed")

MEMBERS = 4


@pytest.fixture
def teams(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every row is read by a team, each of whose members has it in several pieces."""
    monkeypatch.setattr(team, "SIZES", (MEMBERS,))
    monkeypatch.setattr(step, "SIZES", (MEMBERS,))
    monkeypatch.setattr(step, "MIN_TEAM_VOCAB", 1)
    monkeypatch.setattr(step, "TEAM_VALUES", 4)
    assemble = step.FusedOps.assemble
    monkeypatch.setattr(step.FusedOps, "assemble", lambda ops, _: assemble(ops, 132))
    with nullcontext([MEMBERS]) if device.type == "cuda" else crew.side_by_side() as sizes:
        yield
        assert set(sizes) == {MEMBERS}


@pytest.mark.parametrize(("k", "seed"), [(0, 0), (1, 1), (3, 2)])
def test_steps_of_few_rows_decide_as_the_plain_operators(
    k: int, seed: int, teams: None, device: torch.device
) -> None:
    """Twice over, so that turns go on from launch to launch; greedy and sampled rows, and a padding row."""
    vocab, generator = 77, torch.Generator().manual_seed(40 + seed)
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    state = bound_state(k, vocab, generator)
    for _ in range(2):
        slots = [*torch.randperm(SLOTS, generator=generator).tolist()[:2], SLOTS]
        sampling = Sampling.of(state, k, device, slots, FULL)
        logits = spread_logits(len(slots), k + 1, vocab, generator=generator, dtype=dtype)
        for place in range(k):
            logits[0, place, sampling.rows[1].tokens[0, place + 1]] = 6
        accepted = sampling.accept(logits)
        draft_logits = [spread_logits(len(slots), vocab, generator=generator, dtype=dtype) for _ in range(k)]
        histories = (accepted[0].history, accepted[1].history)
        drafted = sampling.draft(draft_logits, histories) if k else (None, None)
        sampling.commit(accepted, drafted)  # type: ignore[arg-type]
        state = sampling.pair.plain_state


@pytest.mark.parametrize("name", ROWS)
def test_thresholds_keep_what_a_sort_keeps(name: str, teams: None, device: torch.device) -> None:
    """Rows that resist a search; each of their limits is searched by all members, to the last token."""
    limits = LIMITS if device.type == "cuda" else LIMITS[3::6]
    state = make_state(1, 120, torch.Generator().manual_seed(1), num_slots=SLOTS + 1)
    for slot, each in enumerate(limits):
        state.bind(slot, [0], 1, _params(**{"temperature": 1.0} | each), slot)
    sampling = Sampling.of(state, 1, device, list(range(len(limits))), FULL)
    empty = torch.empty((len(limits), 0), dtype=torch.int64)
    _, plain = sampling.draft([torch.tensor([ROWS[name]] * len(limits))], (empty.to(device), empty))
    assert plain.probs is not None and bool((plain.probs.sum(-1) > 0.999).all())


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_fault_in_one_members_part_is_told_for_the_row(
    value: float, teams: None, device: torch.device
) -> None:
    """Also behind a grammar that hides it."""
    vocab, generator = 50, torch.Generator().manual_seed(3)
    sampling = Sampling.of(bound_state(1, vocab, generator), 1, device, [1, 2], CONSTRAINED)
    logits = spread_logits(2, 2, vocab, generator=generator)
    logits[0, 0, 37] = value
    allowed = torch.full((2, 2, mask_words(vocab)), 0x0F0F0F0F, dtype=torch.int32)
    found = sampling.pair.fused.accept(sampling.rows[0], logits.to(device), allowed.to(device))
    kind = Flag.TARGET_NAN if value != value else Flag.TARGET_INF
    assert found.flags.tolist() == [int(kind), 0]
    assert bool(((found.emitted >= 0) & (found.emitted < vocab)).all())


@pytest.mark.parametrize(
    ("rows", "processors", "size"),
    [
        (1, 132, 32),
        (4, 132, 32),
        (8, 132, 16),
        (16, 132, 8),
        (32, 132, 1),
        (64, 132, 1),
        (1, 0, 1),
        (4, 16, 1),
    ],
)
def test_no_more_programs_than_can_run_at_once(rows: int, processors: int, size: int) -> None:
    assert team.team_size(rows, processors) == size
    assert size == 1 or rows * size <= processors
