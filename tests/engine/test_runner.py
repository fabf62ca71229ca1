"""What the runner keeps from step to step, and how it tells the device of new pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.kv.pool import LatentPool
from engine.runner import Runner
from engine.sampler import FULL, GREEDY
from engine.sequence import Sequence
from engine.state import SlotState
from engine.types import Request, SamplingParams

CPU = torch.device("cpu")
EVERYTHING = SamplingParams(max_tokens=9, temperature=0.5, top_k=3, presence_penalty=1.0, logprobs=2)


@pytest.fixture
def runner() -> Runner:
    """Three slots and the padding slot, four pages each; no model."""
    model: Any = SimpleNamespace(decoder=None, draft=None)
    backend: Any = SimpleNamespace(name="none", reads=frozenset())
    pool = LatentPool(num_layers=1, num_pages=13, page_size=8, latent_dim=4, dtype=torch.float32, device=CPU)
    state = SlotState(num_slots=3, num_speculative_tokens=0, vocab_size=50, table_width=4, device=CPU)
    return Runner(
        model=model,
        backend=backend,
        pool=pool,
        state=state,
        num_speculative_tokens=0,
        draft_reach=1,
        hidden_size=4,
        max_uniform_tokens=0,
    )


def _row(slot: int, params: SamplingParams) -> Sequence:
    request = Request(request_id=str(slot), prompt_token_ids=[1, 2], params=params, arrival_time=0.0)
    sequence = Sequence(request, (0, 0.0, slot), 9, 1)
    sequence.slot = slot
    return sequence


def test_pages_of_many_slots_are_written_at_once_and_nothing_else_is(runner: Runner) -> None:
    table = runner.state.block_table
    table.fill_(99)
    runner.state.set_pages([(2, 1, [5, 6]), (0, 0, [7]), (1, 3, [8])])
    assert table.tolist() == [[7, 99, 99, 99], [99, 99, 99, 8], [99, 5, 6, 99], [99] * 4]
    runner.state.set_pages([])
    assert table[0].tolist() == [7, 99, 99, 99]


def test_pages_past_the_end_of_a_row_never_reach_the_next_slot(runner: Runner) -> None:
    with pytest.raises(AssertionError, match="too short"):
        runner.state.set_pages([(0, 3, [5, 6])])
    assert not runner.state.block_table.any()


def test_what_is_known_of_a_steps_rows_is_that_of_these_rows_in_these_slots(runner: Runner) -> None:
    rows = [_row(0, SamplingParams(max_tokens=9, temperature=0.0)), _row(2, EVERYTHING)]
    known = runner._step_rows(rows)
    assert (known.slots, known.variant(False), known.with_logprobs) == ([0, 2], FULL, [1])
    assert runner._step_rows(list(rows)) is known
    rows[0].slot = 1  # it gave way and came back
    rows[0].epoch += 1
    assert runner._step_rows(rows).slots == [1, 2]
    assert runner._step_rows(rows[::-1]).slots == [2, 1]
    alone = runner._step_rows(rows[:1])
    assert (alone.slots, alone.variant(False), alone.with_logprobs) == ([1], GREEDY, [])
    assert alone.variant(True).constrained and not alone.variant(False).constrained
