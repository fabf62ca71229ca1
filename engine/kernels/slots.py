"""Kernels over the slots' state: a step's rows out of it, where they stand, and what it leaves there.

A program has one row of the step (``place_kernel``: some tokens), and writes nothing that another one reads.
"""

from __future__ import annotations

import triton.language as tl

from engine.guard import HALTING, Flag
from engine.kernels.jit import await_previous, jit, jit_function, jit_varying
from engine.kernels.rng import mixed, position_term
from engine.kv.pool import SCRATCH_PAGE
from engine.state import FLAGS, NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN

_HALTING = tl.constexpr(int(HALTING))
_BAD_SLOTS = tl.constexpr(int(Flag.SLOTS))
_BAD_LENGTH = tl.constexpr(int(Flag.SEQ_LENS))
_BAD_TOKEN = tl.constexpr(int(Flag.TARGET_OOV))
_BAD_PAGE = tl.constexpr(int(Flag.BLOCK_TABLE))
_SEQ_LEN = tl.constexpr(SEQ_LEN)
_NUM_DRAFTS = tl.constexpr(NUM_DRAFTS)
_FLAGS = tl.constexpr(FLAGS)
_NEXT_TOKEN = tl.constexpr(NEXT_TOKEN)
_SCRATCH_PAGE = tl.constexpr(SCRATCH_PAGE)


@jit_function
def _are_bad(
    slots: tl.tensor,
    check: tl.tensor,
    rows: tl.tensor,
    padding_slot: tl.constexpr,
    chunk: tl.constexpr,
    has_check: tl.constexpr,
) -> tl.tensor:
    """Whether a step's slots are not those that the host wrote: each program sums them, so that none waits."""
    place = tl.arange(0, chunk)
    outside = tl.zeros([chunk], dtype=tl.int32)
    total = tl.zeros([chunk], dtype=tl.int64)
    start = 0
    while start < rows:
        here = start + place
        slot = tl.load(slots + here, mask=here < rows, other=-1)
        outside = outside | ((here < rows) & ((slot < 0) | (slot > padding_slot))).to(tl.int32)
        weight = mixed(position_term((here + 1).to(tl.int64)))
        total += tl.where(here < rows, weight.to(tl.int64, bitcast=True) * (slot + 1), 0)
        start += chunk
    bad = tl.max(outside, axis=0) > 0
    if has_check:
        bad = bad | (tl.sum(total, axis=0) != tl.load(check))
    return bad


@jit_function
def _verdict(
    owned: tl.tensor,
    seq_len: tl.tensor,
    token: tl.tensor,
    is_token: tl.tensor,
    pages: tl.tensor,
    furthest: tl.tensor,
    vocab: tl.constexpr,
    num_pages: tl.constexpr,
    page_size: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    """Flags of state that no step can have left behind.

    ``owned``: the slot's row of the block table; ``furthest``: the greatest length.
    """
    place = tl.arange(0, chunk)
    bad_page = tl.zeros([chunk], dtype=tl.int32)
    start = 0
    while start < pages:
        here = start + place
        page = tl.load(owned + here, mask=here < pages, other=1)
        # Written positions have pages; the scratch page stands only where a row owns none yet
        lowest = (here.to(tl.int64) * page_size < seq_len).to(tl.int32)
        bad_page = bad_page | ((here < pages) & ((page < lowest) | (page >= num_pages))).to(tl.int32)
        start += chunk
    bad_token = (is_token & ((token < 0) | (token >= vocab))).to(tl.int32)
    flags = tl.where((seq_len < 0) | (seq_len > furthest), _BAD_LENGTH, 0)
    flags = flags | tl.where(tl.max(bad_token, axis=0) > 0, _BAD_TOKEN, 0)
    return flags | tl.where(tl.max(bad_page, axis=0) > 0, _BAD_PAGE, 0)


@jit_varying("rows", "pages", "furthest", "width")
def load_kernel(
    slots: tl.tensor,
    check: tl.tensor,
    state_core: tl.tensor,
    state_table: tl.tensor,
    checked: tl.tensor,
    core: tl.tensor,
    flags: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    pages: tl.tensor,
    furthest: tl.tensor,
    width: tl.tensor,
    padding_slot: tl.constexpr,
    vocab: tl.constexpr,
    num_pages: tl.constexpr,
    page_size: tl.constexpr,
    table_width: tl.constexpr,
    columns: tl.constexpr,
    column_block: tl.constexpr,
    chunk: tl.constexpr,
    checks: tl.constexpr,
    has_check: tl.constexpr,
) -> None:
    """``StepOps.load`` into ``checked`` (the slots), ``core``, ``flags`` and ``table``, ``pages`` columns of it."""
    await_previous()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    verdict = 0
    if checks:
        bad = _are_bad(slots, check, rows, padding_slot, chunk, has_check)
        slot = tl.where(bad, padding_slot, slot)
        verdict = tl.where(bad, _BAD_SLOTS, 0)
    tl.store(checked + row, slot)
    own = state_core + slot * columns
    owned = state_table + slot * table_width
    column = tl.arange(0, column_block)
    values = tl.load(own + column, mask=column < columns, other=0)
    if checks:
        seq_len = tl.load(own + _SEQ_LEN)
        is_token = (column >= _NEXT_TOKEN) & (column < _NEXT_TOKEN + tl.maximum(width, 1))
        verdict = verdict | _verdict(
            owned, seq_len, values, is_token, pages, furthest, vocab, num_pages, page_size, chunk
        )
    found = tl.load(own + _FLAGS) | verdict
    stopped = (found & _HALTING) != 0
    tl.store(flags + row, found)
    # At width 1 the drafts, if there are any, are left out
    idle = stopped | ((column == _NUM_DRAFTS) & (width == 1))
    tl.store(core + row * columns + column, tl.where(idle, 0, values), mask=column < columns)
    start = 0
    while start < pages:
        here = start + tl.arange(0, chunk)
        page = tl.load(owned + here, mask=here < pages, other=0)
        tl.store(table + row * pages + here, tl.where(stopped, _SCRATCH_PAGE, page), mask=here < pages)
        start += chunk


@jit_varying("first", "first_stride", "write_slots", "tokens", "pages", "ahead")
def place_kernel(
    first: tl.tensor,
    first_stride: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    write_slots: tl.tensor,
    seq_lens: tl.tensor,
    tokens: tl.tensor,
    pages: tl.tensor,
    ahead: tl.tensor,
    stride: tl.constexpr,
    page_size: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """``StepOps.place`` of ``tokens``; ``pages`` columns of the block table."""
    await_previous()
    token = tl.program_id(0) * chunk + tl.arange(0, chunk)
    inside = token < tokens
    row, offset = token // stride, token % stride
    start = tl.load(first + row * first_stride, mask=inside, other=0) + ahead
    position = start + offset
    index = position // page_size
    reached = inside & (index >= 0) & (index < pages)
    page = tl.load(table + row * pages + index, mask=reached, other=_SCRATCH_PAGE).to(tl.int64)
    tl.store(positions + token, position, mask=inside)
    tl.store(write_slots + token, page * page_size + position % page_size, mask=inside)
    tl.store(seq_lens + row, (start + stride).to(tl.int32), mask=inside & (offset == 0))


@jit_function
def _with_drafts(
    values: tl.tensor, column: tl.tensor, row: tl.tensor, tokens: tl.tuple, k: tl.constexpr
) -> tl.tensor:
    """A slot's columns ``values`` with the drafts ``tokens``."""
    for number in tl.static_range(k):
        values = tl.where(column == _NEXT_TOKEN + 1 + number, tl.load(tokens[number] + row), values)
    return values


@jit_function
def _any_of(row: tl.tensor, found: tl.tuple, k: tl.constexpr) -> tl.tensor:
    """Bitwise or of a row's ``found``."""
    flags = row.to(tl.int64) * 0
    for number in tl.static_range(k):
        flags = flags | tl.load(found[number] + row)
    return flags


@jit_function
def _unless_halted(
    state_core: tl.tensor,
    slot: tl.tensor,
    flags: tl.tensor,
    values: tl.tensor,
    column: tl.tensor,
    columns: tl.constexpr,
    padding_slot: tl.constexpr,
) -> tl.tensor:
    """A slot's columns ``values``; what it has where ``flags`` halt it."""
    known = (slot >= 0) & (slot <= padding_slot) & (column < columns)
    kept = tl.load(state_core + slot * columns + column, mask=known, other=0)
    return tl.where((flags & _HALTING) != 0, kept, values)


@jit_function
def _store_slot(
    state_core: tl.tensor,
    slot: tl.tensor,
    values: tl.tensor,
    column: tl.tensor,
    columns: tl.constexpr,
    padding_slot: tl.constexpr,
) -> None:
    """Write a live slot's columns; the padding slot's are what it was made with."""
    live = (slot >= 0) & (slot < padding_slot)
    tl.store(state_core + slot * columns + column, values, mask=live & (column < columns))
    if tl.program_id(0) == 0:
        tl.store(state_core + padding_slot * columns + column, column.to(tl.int64) * 0, mask=column < columns)


@jit_varying("accepted", "seq_len", "target_flags", "history", "width")
def commit_kernel(
    state_core: tl.tensor,
    output_counts: tl.tensor,
    slots: tl.tensor,
    core: tl.tensor,
    row_flags: tl.tensor,
    emitted: tl.tensor,
    accepted: tl.tensor,
    seq_len: tl.tensor,
    target_flags: tl.tensor,
    history: tl.tensor,
    tokens: tl.tuple,
    found: tl.tuple,
    packed: tl.tensor,
    width: tl.tensor,
    k: tl.constexpr,
    vocab: tl.constexpr,
    padding_slot: tl.constexpr,
    column_block: tl.constexpr,
    has_history: tl.constexpr,
) -> None:
    """``StepOps.commit`` of the drafts ``tokens`` with the verdicts ``found``, K of each.

    The tokens ``history`` join those that the slot counts.
    """
    await_previous()
    row = tl.program_id(0)
    columns: tl.constexpr = 4 + k
    column = tl.arange(0, column_block)
    slot, count = tl.load(slots + row), tl.load(accepted + row)
    draft_flags = _any_of(row, found, k)
    flags = tl.load(row_flags + row) | tl.load(target_flags + row) | draft_flags
    run = tl.load(emitted + row * width + column, mask=column < width, other=0)
    values = tl.where(column == _SEQ_LEN, tl.load(seq_len + row), 0)
    values = tl.where(column == _NUM_DRAFTS, tl.where(draft_flags > 0, 0, k), values)
    values = tl.where(column == _NEXT_TOKEN, tl.load(emitted + row * width + count), values)
    values = _with_drafts(values, column, row, tokens, k)
    values = _unless_halted(state_core, slot, flags, values, column, columns, padding_slot)
    values = tl.where(column == _FLAGS, flags & _HALTING, values)
    _store_slot(state_core, slot, values, column, columns, padding_slot)
    if has_history:
        token = tl.load(history + row * width + column, mask=column < width, other=-1)
        live = (slot >= 0) & (slot < padding_slot) & ((flags & _HALTING) == 0)
        tl.atomic_add(output_counts + slot * vocab + token, 1, mask=live & (token >= 0), sem="relaxed")
    own = packed + row * (width + 3)
    tl.store(own + column, run, mask=column < width)
    tl.store(own + width, count)
    tl.store(own + width + 1, tl.load(core + row * columns + _NUM_DRAFTS))
    tl.store(own + width + 2, flags)


@jit
def begin_kernel(
    state_core: tl.tensor,
    slots: tl.tensor,
    core: tl.tensor,
    row_flags: tl.tensor,
    tokens: tl.tuple,
    found: tl.tuple,
    k: tl.constexpr,
    padding_slot: tl.constexpr,
    column_block: tl.constexpr,
) -> None:
    """``StepOps.begin`` of the drafts ``tokens`` with the verdicts ``found``, K of each."""
    await_previous()
    row = tl.program_id(0)
    columns: tl.constexpr = 4 + k
    column = tl.arange(0, column_block)
    slot, draft_flags = tl.load(slots + row), _any_of(row, found, k)
    flags = tl.load(row_flags + row) | draft_flags
    values = tl.load(core + row * columns + column, mask=column < columns, other=0)
    values = tl.where(column == _NUM_DRAFTS, tl.where(draft_flags > 0, 0, k), values)
    values = _with_drafts(values, column, row, tokens, k)
    values = _unless_halted(state_core, slot, flags, values, column, columns, padding_slot)
    values = tl.where(column == _FLAGS, flags, values)
    _store_slot(state_core, slot, values, column, columns, padding_slot)
