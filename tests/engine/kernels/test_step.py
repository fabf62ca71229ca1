"""The fused kernels of greedy steps against the plain operators, to the bit, whatever state and logits hold.

Run as ``python -m tests.engine.kernels.test_step CAPABILITY`` it compiles them for a GPU that is not there.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.graph import VARIANTS
from engine.guard import Flag, is_halted
from engine.sampler import GREEDY, Variant, mask_words
from engine.spec import Drafted, slots_check
from engine.state import FLAGS, NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN, SlotState
from tests.engine.drive import generate, greedy, make_engine
from tests.engine.kernels.step_pair import (
    INF,
    NAN,
    NUM_PAGES,
    PAGE_SIZE,
    SLOTS,
    TABLE_WIDTH,
    Pair,
    agreeing,
    make_pool,
    make_state,
    plant,
    tied_logits,
)
from tests.fixtures.checkpoints import F1, build_f2

step = pytest.importorskip("engine.kernels.step", reason="Triton is not installed")
argmax = pytest.importorskip("engine.kernels.argmax", reason="Triton is not installed")


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a program reads of slots, pages and logits: all at once, or, as if they were many, in several goes."""
    if request.param == "large":
        monkeypatch.setattr(step, "CHUNK", 4)
        monkeypatch.setattr(step, "MAX_TILE", 0)
        monkeypatch.setattr(argmax, "MIN_PART", 32)
    return str(request.param)


def set_core(column: int, value: int) -> Callable[[SlotState, int], None]:
    def break_it(state: SlotState, slot: int) -> None:
        state.core[slot, column] = value

    return break_it


def set_page(index: int, value: int, seq_len: int = PAGE_SIZE + 1) -> Callable[[SlotState, int], None]:
    def break_it(state: SlotState, slot: int) -> None:
        state.core[slot, SEQ_LEN] = seq_len
        state.block_table[slot, index] = value

    return break_it


def furthest(k: int) -> int:
    return TABLE_WIDTH * PAGE_SIZE - (k + 1) - max(0, k - 1)


BREAKS: dict[str, tuple[Callable[[SlotState, int], None], Flag]] = {
    "negative length": (set_core(SEQ_LEN, -1), Flag.SEQ_LENS),
    "length past the table": (set_core(SEQ_LEN, furthest(3) + 1), Flag.SEQ_LENS),
    "huge length": (set_core(SEQ_LEN, 2**40), Flag.SEQ_LENS),
    "furthest length": (set_core(SEQ_LEN, furthest(3)), Flag(0)),
    "token is V": (set_core(NEXT_TOKEN, 77), Flag.TARGET_OOV),
    "negative draft": (set_core(NEXT_TOKEN + 2, -1), Flag.TARGET_OOV),
    "last draft huge": (set_core(NEXT_TOKEN + 3, 2**33), Flag.TARGET_OOV),
    "page past the pool": (set_page(5, NUM_PAGES), Flag.BLOCK_TABLE),
    "negative page": (set_page(0, -3), Flag.BLOCK_TABLE),
    "written position without a page": (set_page(1, 0), Flag.BLOCK_TABLE),
    "scratch page behind what is written": (set_page(2, 0), Flag(0)),
    "halted before": (set_core(FLAGS, int(Flag.TARGET_NAN)), Flag.TARGET_NAN),
    "prefill's fault": (set_core(FLAGS, int(Flag.PREFILL_INF | Flag.DRAFT_INF)), Flag.PREFILL_INF),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_state_is_told_and_its_row_does_not_run(name: str, size: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    state = make_state(3, 77, generator)
    break_it, flag = BREAKS[name]
    break_it(state, 4)
    pair = Pair.of(state, 3, device)
    slots = [1, 4, SLOTS, 8]
    rows = pair.load(slots, check=slots_check(slots))
    assert [bool(one) for one in is_halted(rows[0].flags)] == [False, bool(flag), False, False]
    assert int(rows[0].flags[1]) & int(flag) == int(flag)
    for stride, ahead in ((4, 0), (1, 4), (1, 5)):
        pair.place(rows, ahead, stride)
    logits = tied_logits(4, 4, 77, generator=generator)
    before = state.core[4].clone()
    packed = pair.step(rows, logits, [tied_logits(4, 77, generator=generator) for _ in range(3)])
    assert int(packed[1, -1]) & int(flag) == int(flag)
    if flag:  # only its flags changed
        before[FLAGS] = state.core[4, FLAGS]
        assert state.core[4].equal(before) and is_halted(state.core[4, FLAGS])


@pytest.mark.parametrize(
    ("slots", "check"),
    [
        ([0, 1, 2], slots_check([0, 1, 3])),
        ([2, 1, 0], slots_check([0, 1, 2])),
        ([0, -1, 2], slots_check([0, -1, 2])),
        ([0, 1, SLOTS + 1], None),
        ([2**40, 1, 2], None),
        ([0] * 7, slots_check([0] * 6 + [1])),
        ([0] * 6 + [-1], None),
    ],
)
def test_slots_that_the_host_did_not_write_stop_every_row(
    slots: list[int], check: int | None, size: str, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(4)
    pair = Pair.of(make_state(1, 20, generator), 1, device)
    before = pair.plain_state.core.clone()
    rows = pair.load(slots, check=check)
    assert set(rows[0].flags.tolist()) == {int(Flag.SLOTS)} and set(rows[0].slots.tolist()) == {SLOTS}
    pair.place(rows, 0, 2)
    logits = tied_logits(len(slots), 2, 20, generator=generator)
    pair.step(rows, logits, [tied_logits(len(slots), 20, generator=generator)])
    assert pair.plain_state.core.equal(before)


@pytest.mark.parametrize("max_len", [1, PAGE_SIZE, PAGE_SIZE + 1, TABLE_WIDTH * PAGE_SIZE, 10**6])
def test_an_eager_step_reads_as_much_of_the_table_as_its_rows_reach(
    max_len: int, device: torch.device
) -> None:
    state = make_state(3, 20, torch.Generator().manual_seed(5))
    state.core[:, SEQ_LEN] = 0
    rows = Pair.of(state, 3, device).load([3, 0], max_len=max_len)
    assert rows[0].block_table.shape == (2, min(TABLE_WIDTH, -(-max_len // PAGE_SIZE)))


def test_a_position_past_the_table_goes_to_the_scratch_page(device: torch.device) -> None:
    pair = Pair.of(make_state(1, 20, torch.Generator().manual_seed(5)), 1, device)
    rows, _ = pair.load([3, 0])
    first = torch.tensor([TABLE_WIDTH * PAGE_SIZE - 1, 5], device=device)
    places = pair.fused.place(rows, first, 2)
    table = rows.block_table.tolist()
    assert places.write_slots.tolist() == [
        table[0][-1] * PAGE_SIZE + PAGE_SIZE - 1, 0, table[1][0] * PAGE_SIZE + 5, table[1][0] * PAGE_SIZE + 6
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_steps_equal_the_plain_operators(k: int, seed: int, size: str, device: torch.device) -> None:
    """Two steps over random slots, faults and all; each reads what the one before left."""
    vocab = 77
    generator = torch.Generator().manual_seed(100 * k + 10 * seed + (size == "large"))
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    state = make_state(k, vocab, generator)
    if seed == 3:
        broken = list(BREAKS.values())
        for slot in range(0, SLOTS, 2):
            broken[slot][0](state, slot) if k >= 3 else set_core(SEQ_LEN, -slot)(state, slot)
    pair = Pair.of(state, k, device)
    for _ in range(2):
        live = torch.randperm(SLOTS, generator=generator)[: 3 + seed].tolist()
        slots = [*live, SLOTS, SLOTS][: 4 + seed]
        rows = pair.load(slots, check=slots_check(slots))
        logits = tied_logits(len(slots), k + 1, vocab, generator=generator, dtype=dtype)
        logits = plant(agreeing(logits, rows[1], generator), generator)
        drafts = [tied_logits(len(slots), vocab, generator=generator, dtype=dtype) for _ in range(k)]
        pair.step(rows, logits, [plant(one, generator, 0.15) for one in drafts])


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_first_draft_phase_equals_the_plain_operators(k: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(k)
    state = make_state(k, 300, generator)
    state.core[:, FLAGS] = 0
    set_core(FLAGS, int(Flag.PREFILL_NAN))(state, 2)
    set_core(NEXT_TOKEN, 300)(state, 5)
    pair = Pair.of(state, k, device)
    slots = [2, 0, 5, SLOTS, 7, SLOTS]
    rows = pair.load(slots, check=slots_check(slots))
    logits = [tied_logits(6, 300, generator=generator) for _ in range(k)]
    logits[-1][1, 17], logits[0][4, 200] = NAN, -INF
    drafted = pair.draft(rows, logits)
    pair.fused.begin(rows[0], drafted[0])
    pair.plain.begin(rows[1], drafted[1])
    pair.same_state()
    core = pair.fused_state.core.tolist()
    assert [core[slot][NUM_DRAFTS] for slot in (0, 7)] == [0, 0]
    assert [core[slot][FLAGS] for slot in (0, 7)] == [int(Flag.DRAFT_NAN), int(Flag.DRAFT_INF)]


@pytest.mark.parametrize("values", [(NAN,), (INF,), (-INF,), (INF, -INF), (INF, NAN), (-INF, NAN)])
def test_a_fault_at_each_place_of_a_run(values: tuple[float, ...], size: str, device: torch.device) -> None:
    """Every place of the verify row in one step (a row each), all drafts accepted or none."""
    vocab = 70
    generator = torch.Generator().manual_seed(6)
    kind = Flag.TARGET_NAN if any(map(math.isnan, values)) else Flag.TARGET_INF
    for accepted in (0, 3):
        state = make_state(3, vocab, generator)
        state.core[:SLOTS, NUM_DRAFTS] = 3
        state.core[:SLOTS, FLAGS] = 0
        pair = Pair.of(state, 3, device)
        rows = pair.load([0, 1, 2, 3, 4])
        logits = tied_logits(5, 4, vocab, generator=generator)
        for row in range(5):
            for place in range(accepted):
                logits[row, place, rows[1].tokens[row, place + 1]] = 50
        for place in range(4):  # row 4 stays finite
            low = (logits[place, place] < 50).nonzero().flatten()
            spots = torch.randperm(len(low), generator=generator)[: len(values)]
            logits[place, place, low[spots]] = torch.tensor(values)
        packed = pair.step(rows, logits, [tied_logits(5, vocab, generator=generator) for _ in range(3)])
        flags = packed[:, -1].tolist()
        if accepted == 0:
            assert flags == [int(kind), *[int(Flag.IGNORED)] * 3, 0]
        elif values == (-INF,):  # the best logits are what they were
            assert flags == [int(kind)] * 4 + [0]
        assert bool(((packed[:, :4] >= 0) & (packed[:, :4] < vocab)).all())


@pytest.mark.parametrize("value", [-INF, INF, NAN, 0.0, -0.0, -7.5])
@pytest.mark.parametrize("vocab", [1, 31, 4096, 40_001])  # the last one in parts
def test_the_lowest_of_equal_logits_wins(vocab: int, value: float, device: torch.device) -> None:
    pair = Pair.of(make_state(1, vocab, torch.Generator().manual_seed(1)), 1, device)
    rows = pair.load([0, 1, 2])
    logits = torch.full((3, vocab), value)
    logits[1, vocab // 2 :] = 99.0
    logits[2, -1] = -value
    fused, _ = pair.draft(rows, [logits])
    assert int(fused.tokens[0][0]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 6, 80])
def test_parts_cover_every_token_once(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Whatever the number of parts, and with rows of a wider tensor."""
    vocab = 10_007 if rows < 80 else 1500
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab + 5, generator=generator).to(dtype)[:, :vocab]
    found = argmax.find_parts(logits.to(device), True)
    best = found.amax(dim=1).cpu()
    assert ((1 << 30) - 1 - ((best & 0xFFFFFFFF) >> 1)).equal(logits.argmax(dim=1))
    assert not (found & 1).any()


@pytest.mark.parametrize("k", [0, 3])
def test_without_checks_nothing_is_told(k: int, size: str, device: torch.device) -> None:
    vocab = 70
    generator = torch.Generator().manual_seed(8)
    state = make_state(k, vocab, generator)
    state.core[:, FLAGS] = 0
    state.core[3, FLAGS] = int(Flag.TARGET_INF)
    pair = Pair.of(state, k, device, checks=False)
    slots = [3, 1, SLOTS]
    rows = pair.load(slots, check=-1)
    logits = plant(tied_logits(3, k + 1, vocab, generator=generator), generator)
    drafts = [plant(tied_logits(3, vocab, generator=generator), generator) for _ in range(k)]
    packed = pair.step(rows, logits, drafts)
    assert packed[:, -1].tolist() == [int(Flag.TARGET_INF), 0, 0]


@pytest.mark.parametrize("k", [0, 3])
def test_an_engine_emits_the_same_tokens(k: int, f1: F1, tmp_path: Path, device: torch.device) -> None:
    prompts = [[5, 9], [3], [7, 8, 9, 10, 11]]
    for path in (f1.path, build_f2(tmp_path / "m")):
        options = {"device": device.type, "dtype": "float32", "graphs": "off", "num_speculative_tokens": k}
        expected = generate(make_engine(path, **options | {"device": "cpu"}), prompts, greedy(6))
        engine = make_engine(path, **options)
        runner = engine._runner
        runner.step.ops = step.FusedOps(runner.state, runner.pool, k)
        found = generate(engine, prompts, greedy(6))
        assert [(one.token_ids, one.steps) for one in found] == [
            (one.token_ids, one.steps) for one in expected
        ]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.slow)])
def test_kernels_compile(capability: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.test_step", str(capability)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(name in done.stdout for name in ("commit_kernel", "_find_parts", "accept_kernel"))


def compile_steps(
    k: int, vocab: int, dtype: torch.dtype, checks: bool, variants: tuple[Variant, ...] = VARIANTS
) -> None:
    """Every kernel of a step, through the functions that launch them."""
    generator = torch.Generator().manual_seed(0)
    state = make_state(k, vocab, generator)
    ops = step.FusedOps(state, make_pool(torch.device("cpu")), k)
    ops.checks = checks
    for variant in variants:
        rows = ops.load(torch.tensor([0, 1]), torch.tensor([0]) if checks else None, (9, 9), variant, k + 1)
        ops.place(rows, rows.seq_len, k + 1)
        allowed = torch.zeros(2, k + 1, mask_words(vocab), dtype=torch.int32) if variant.constrained else None
        accepted = ops.accept(rows, torch.zeros(2, k + 1, vocab, dtype=dtype), allowed)
        proposed = [
            ops.propose(rows, torch.zeros(2, vocab, dtype=dtype), rows.seq_len, accepted.history, number)
            for number in range(k)
        ]
        drafted = Drafted([one[0] for one in proposed], None, [one[2] for one in proposed]) if k else None
        ops.commit(rows, accepted, drafted)
        if drafted is not None:
            ops.begin(rows, drafted)


if __name__ == "__main__":
    from tests.engine.kernels import offline

    offline.install(int(sys.argv[1]))
    compile_steps(0, 77, torch.float32, True)
    compile_steps(3, 4096, torch.bfloat16, True)
    compile_steps(8, 102400, torch.bfloat16, True)
    compile_steps(3, 4096, torch.float16, False, (GREEDY,))
