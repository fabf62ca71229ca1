"""Kernels that choose tokens by a request's parameters: ``engine.sampler``, one program a row of logits.

A row pays for what its own request asks: its vocabulary-wide tables are read if it has some, a threshold is
searched if it has top_k, top_p or min_p, and a greedy row's token is its best one. A draw adds up probabilities in
fixed point, whose sums do not depend on an order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.argmax import (
    LAST,
    MINUS_INF,
    NAN,
    NOTHING,
    draft_flags,
    finding_of,
    order_of,
    run_flags,
    token_of,
    value_of,
)
from engine.kernels.jit import await_previous, jit_function, jit_varying
from engine.kernels.rng import random_bits, unit
from engine.kernels.threshold import STAGES, crossing, mass_from
from engine.rng import Purpose, purpose_offset
from engine.sampler import FREQUENCY, MIN_P, PRESENCE, REPETITION, TEMPERATURE, TOP_P
from engine.state import NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN, SlotState

_TEMPERATURE, _TOP_P, _MIN_P = tl.constexpr(TEMPERATURE), tl.constexpr(TOP_P), tl.constexpr(MIN_P)
_PRESENCE, _FREQUENCY = tl.constexpr(PRESENCE), tl.constexpr(FREQUENCY)
_REPETITION = tl.constexpr(REPETITION)
_FLOATS = tl.constexpr(REPETITION + 1)
"""Columns of ``SlotState.floats``."""
_SEQ_LEN, _NUM_DRAFTS, _NEXT_TOKEN = tl.constexpr(SEQ_LEN), tl.constexpr(NUM_DRAFTS), tl.constexpr(NEXT_TOKEN)
_ACCEPT = tl.constexpr(purpose_offset(Purpose.ACCEPT))
_TOKEN = tl.constexpr(purpose_offset(Purpose.TOKEN))
_DRAFT = tl.constexpr(purpose_offset(Purpose.DRAFT))
_UNITS = tl.constexpr(float(1 << 40))
"""What a probability of 1 weighs in a draw."""
FIGURES = tl.constexpr(3)
"""Of a weighed row, float32: its greatest value, the least one that is kept, and the sum of exp(value - greatest)
of those that are kept. A value is a processed logit over the temperature; sampled rows keep theirs."""


def tables_of(state: SlotState) -> tuple[object, ...]:
    """What the kernels read of the slots' parameters and history, in the order that ``_read_row`` has it."""
    return (
        state.floats, state.top_k, state.keys, state.has_tables, state.min_position,
        state.logit_bias, state.stop_mask, state.output_counts, state.prompt_seen,
    )  # fmt: skip


@jit_function
def _processed(
    value: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    slot: tl.tensor,
    tables: tl.tuple,
    history: tl.tuple,
    vocab: tl.constexpr,
) -> tl.tensor:
    """``engine.sampler.process_logits``.

    ``history``: tokens that count beside the slot's, their number, and the position that is decided.
    """
    run, length, position = history
    own = tables[0] + slot * _FLOATS
    at = slot * vocab + token
    count = tl.load(tables[7] + at, mask=inside, other=0)
    place = 0
    while place < length:
        count += (token == tl.load(run + place)).to(tl.int32)
        place += 1
    value += tl.load(tables[5] + at, mask=inside, other=0.0)
    stop = tl.load(tables[6] + at, mask=inside, other=0) != 0
    value = tl.where(stop & (position < tl.load(tables[4] + slot)), float("-inf"), value)
    seen = (count > 0) | (tl.load(tables[8] + at, mask=inside, other=0) != 0)
    repetition = tl.full(value.shape, 1.0, tl.float32) * tl.load(own + _REPETITION)
    repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value = tl.where(seen, repeated, value)
    return value - tl.load(own + _FREQUENCY) * count - tl.load(own + _PRESENCE) * (count > 0).to(tl.float32)


@jit_function
def _survey(
    logits: tl.tensor,
    values: tl.tensor,
    slot: tl.tensor,
    tables: tl.tuple,
    history: tl.tuple,
    allowed: tl.tensor,
    vocab: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    has_mask: tl.constexpr,
) -> tl.tuple:
    """The first reading of a row: its best token, the greatest and the least finite value, and whether all logits
    are finite as they came. The values of a sampled row are written down."""
    temperature = tl.load(tables[0] + slot * _FLOATS + _TEMPERATURE)
    sampled = temperature > 0
    scale = 1.0 / tl.where(sampled, temperature, 1.0)
    has_tables = tl.load(tables[3] + slot) != 0
    best, first = tl.full([chunk], float("-inf"), tl.float32), tl.full([chunk], LAST, tl.int32)
    least, fault = tl.full([chunk], float("inf"), tl.float32), tl.zeros([chunk], dtype=tl.float32)
    for start in tl.range(0, padded, chunk, num_stages=STAGES):
        here = start + tl.arange(0, chunk)
        inside = here < vocab
        value = tl.load(logits + here, mask=inside, other=0.0).to(tl.float32)
        fault += value * 0.0
        if has_tables:
            value = _processed(value, here, inside, slot, tables, history, vocab)
        if has_mask:
            word = tl.load(allowed + here // 32, mask=inside, other=0)
            value = tl.where(((word >> (here % 32)) & 1) != 0, value, float("-inf"))
        value = tl.where(inside, value * scale, float("-inf"))
        if sampled:
            tl.store(values + here, value)
        first = tl.where(value > best, here, first)
        best = tl.where(value > best, value, best)
        least = tl.where((value < least) & (value > float("-inf")), value, least)
    tl.debug_barrier()  # values are read by other threads than those that wrote them
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, first, LAST), axis=0)
    return token, top, tl.min(least, axis=0), tl.sum(fault, axis=0) == 0.0


@jit_function
def _fault_order(
    logits: tl.tensor, vocab: tl.constexpr, padded: tl.constexpr, chunk: tl.constexpr
) -> tl.tuple:
    """The greatest order of a row's logits, and whether the least is a negative infinity; of rows with a fault."""
    greatest = tl.full([chunk], NOTHING, tl.int32)
    lowest = tl.full([chunk], NAN, tl.int32)
    for start in tl.range(0, padded, chunk, num_stages=STAGES):
        here = start + tl.arange(0, chunk)
        order = order_of(tl.load(logits + here, mask=here < vocab, other=0.0).to(tl.float32))
        greatest, lowest = tl.maximum(greatest, order), tl.minimum(lowest, order)
    return tl.max(greatest, axis=0), (tl.min(lowest, axis=0) == MINUS_INF).to(tl.int32)


@jit_function
def _weighed(
    values: tl.tensor,
    top: tl.tensor,
    least: tl.tensor,
    slot: tl.tensor,
    tables: tl.tuple,
    few: tl.tensor,
    vocab: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
) -> tl.tuple:
    """``engine.sampler.truncate``: the least value that is kept, and the sum of exp(value - top) of all kept."""
    own = tables[0] + slot * _FLOATS
    top_k, top_p, min_p = tl.load(tables[1] + slot), tl.load(own + _TOP_P), tl.load(own + _MIN_P)
    low, high = order_of(least).to(tl.int64), order_of(top).to(tl.int64) + 1
    if min_p > 0:
        # p / p_max >= min_p, compared in the log domain
        low = tl.minimum(tl.maximum(low, order_of(top + tl.log(min_p)).to(tl.int64)), high - 1)
    if top_k < vocab:
        number = tl.full([], vocab, tl.float32)
        low, number = crossing(
            values, low, high, number, top_k.to(tl.float32), top, few, False, padded, chunk, few_size
        )
    total = mass_from(values, value_of(low.to(tl.int32)), top, padded, chunk)
    if top_p < 1:
        low, total = crossing(
            values, low, high, total, top_p * total, top, few, True, padded, chunk, few_size
        )
    return value_of(low.to(tl.int32)), total


@jit_function
def _look(
    logits: tl.tensor,
    values: tl.tensor,
    slot: tl.tensor,
    tables: tl.tuple,
    history: tl.tuple,
    allowed: tl.tensor,
    few: tl.tensor,
    vocab: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
    has_mask: tl.constexpr,
) -> tl.tuple:
    """A row's finding and figures; of a greedy or faulty one nothing is kept.

    The finding's token is the best of the processed logits; whether it tells of a fault depends on the logits as
    they came.
    """
    token, top, least, finite = _survey(
        logits, values, slot, tables, history, allowed, vocab, padded, chunk, has_mask
    )
    order, low = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    kept, total = tl.full([], float("inf"), tl.float32), tl.full([], 1.0, tl.float32)
    if finite == 0:
        order, low = _fault_order(logits, vocab, padded, chunk)
    elif (tl.load(tables[0] + slot * _FLOATS + _TEMPERATURE) > 0) & (tl.abs(top) < float("inf")):
        kept, total = _weighed(values, top, least, slot, tables, few, vocab, padded, chunk, few_size)
    return finding_of(order, tl.minimum(token, vocab - 1), low), top, kept, total


@jit_function
def _units(share: tl.tensor) -> tl.tensor:
    """Probabilities in fixed point, int64; none where there is less than nothing."""
    return (tl.maximum(share, 0.0) * _UNITS).to(tl.int64)


@jit_function
def _draw(
    bits: tl.tensor,
    values: tl.tensor,
    figures: tl.tuple,
    other: tl.tensor,
    subtract: tl.tensor,
    written: tl.tensor,
    writes: tl.constexpr,
    vocab: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    """A token of a weighed row by its inverse distribution function, less ``other`` if ``subtract``.

    If that leaves nothing, then of the row itself. ``writes``: the row's probabilities go to ``written``.
    """
    amounts = _amounts(values, figures, other, subtract, written, writes, vocab, padded, chunk)
    if subtract & (tl.sum(amounts, axis=0) == 0):
        subtract = subtract & False
        amounts = _amounts(values, figures, other, subtract, written, writes, vocab, padded, chunk)
    # Uniform in 0 .. amount - 1, and the piece of the row that it falls into
    target = tl.umulhi(bits, tl.sum(amounts, axis=0).to(tl.uint64)).to(tl.int64)
    piece = tl.arange(0, amounts.shape[0])
    found = tl.sum((tl.cumsum(amounts, axis=0) <= target).to(tl.int32), axis=0)
    target -= tl.sum(tl.where(piece < found, amounts, 0), axis=0)
    here = found * chunk + tl.arange(0, chunk)
    inside = here < vocab
    share = _share(tl.load(values + here, mask=inside, other=float("-inf")), figures)
    units = _units(share - tl.load(other + here, mask=inside & subtract, other=0.0))
    chosen = tl.where(tl.cumsum(units, axis=0) > target, here, LAST)
    # A row that is not finite has nothing to draw: any token will do, for the guard has seen it
    return tl.minimum(tl.min(chosen, axis=0), vocab - 1)


@jit_function
def _share(value: tl.tensor, figures: tl.tuple) -> tl.tensor:
    """Probabilities of a weighed row's values."""
    top, least, total = figures
    return tl.where(value >= least, tl.exp(value - top) * (1.0 / total), 0.0)


@jit_function
def _amounts(
    values: tl.tensor,
    figures: tl.tuple,
    other: tl.tensor,
    subtract: tl.tensor,
    written: tl.tensor,
    writes: tl.constexpr,
    vocab: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    """What each piece of a row weighs in ``_draw``, in fixed point: ``[pieces]`` int64, a power of two of them."""
    pieces: tl.constexpr = triton.next_power_of_2(padded // chunk)
    amounts = tl.zeros([pieces], dtype=tl.int64)
    for start in tl.range(0, padded, chunk, num_stages=STAGES):
        here = start + tl.arange(0, chunk)
        share = _share(tl.load(values + here), figures)
        if writes:
            tl.store(written + here, share, mask=here < vocab)
        share -= tl.load(other + here, mask=(here < vocab) & subtract, other=0.0)
        amount = tl.sum(_units(share), axis=0)
        amounts = tl.where(tl.arange(0, pieces) == start // chunk, amount, amounts)
    return amounts


@jit_varying("places")
def weigh_kernel(
    logits: tl.tensor,
    values: tl.tensor,
    few: tl.tensor,
    findings: tl.tensor,
    figures: tl.tensor,
    slots: tl.tensor,
    core: tl.tensor,
    tables: tl.tuple,
    allowed: tl.tensor,
    places: tl.tensor,
    columns: tl.constexpr,
    words: tl.constexpr,
    vocab: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
    has_mask: tl.constexpr,
) -> None:
    """Findings and figures of verify rows, ``places`` a request; a place's history are the drafts before it."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    request, place = row // places, row % places
    slot = tl.load(slots + request)
    own = core + request * columns
    history = own + _NEXT_TOKEN + 1, place.to(tl.int32), tl.load(own + _SEQ_LEN) + 1 + place
    finding, top, least, total = _look(
        logits + row * vocab, values + row * padded, slot, tables, history, allowed + row * words,
        few + row * few_size, vocab, padded, chunk, few_size, has_mask,
    )  # fmt: skip
    tl.store(findings + row, finding)
    tl.store(figures + row * FIGURES, top)
    tl.store(figures + row * FIGURES + 1, least)
    tl.store(figures + row * FIGURES + 2, total)


@jit_varying("width", "accepted", "seq_len", "last", "flags")
def accept_kernel(
    values: tl.tensor,
    findings: tl.tensor,
    figures: tl.tensor,
    slots: tl.tensor,
    core: tl.tensor,
    tables: tl.tuple,
    draft_probs: tl.tensor,
    emitted: tl.tensor,
    history: tl.tensor,
    accepted: tl.tensor,
    seq_len: tl.tensor,
    last: tl.tensor,
    flags: tl.tensor,
    width: tl.tensor,
    k: tl.constexpr,
    place_block: tl.constexpr,
    vocab: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    checks: tl.constexpr,
) -> None:
    """``StepOps.accept`` of weighed rows, one program a request."""
    await_previous()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    place = tl.arange(0, place_block)
    inside = place < width
    row = request * width + place
    finding = tl.load(findings + row, mask=inside, other=0)
    own = core + request * (4 + k)
    start, num_drafts = tl.load(own + _SEQ_LEN) + 1, tl.minimum(tl.load(own + _NUM_DRAFTS), width - 1)
    draft = tl.load(own + _NEXT_TOKEN + 1 + place, mask=place < width - 1, other=0)
    token = token_of(finding)
    stands = (place < num_drafts) & (token == draft)
    sampled = tl.load(tables[0] + slot * _FLOATS + _TEMPERATURE) > 0
    proposed = draft_probs + slot * (k * vocab)
    key = tl.load(tables[2] + slot)
    if sampled:
        valid = place < num_drafts
        value = tl.load(values + row * padded + draft, mask=valid, other=float("-inf"))
        share = _share(value, _figures_at(figures, row, valid))
        asked = tl.load(proposed + place * vocab + draft, mask=valid, other=0.0)
        chance = unit(random_bits(key, start + place, _ACCEPT))
        stands = valid & (chance * asked.to(tl.float64) < share.to(tl.float64))
    count = tl.min(tl.where(stands, place_block, place), axis=0)  # the last place never stands
    if sampled:
        drawn = _draw(
            random_bits(key, start + count, _TOKEN), values + (request * width + count) * padded,
            _figures_at(figures, request * width + count, count >= 0), proposed + count * vocab,
            count < num_drafts, values, False, vocab, padded, chunk,
        )  # fmt: skip
        token = tl.where(place < count, draft, drawn)
    tl.store(emitted + row, token, mask=inside)
    tl.store(history + row, tl.where(place <= count, token, -1), mask=inside)
    tl.store(accepted + request, count.to(tl.int64))
    tl.store(seq_len + request, start + count)
    tl.store(last + request, request * width + count)
    tl.store(flags + request + tl.arange(0, 1), run_flags(finding, place, inside, count, checks))


@jit_function
def _figures_at(figures: tl.tensor, row: tl.tensor, inside: tl.tensor) -> tl.tuple:
    """Greatest value, least kept one and sum of weighed rows."""
    own = figures + row * FIGURES
    top, least = tl.load(own, mask=inside, other=0.0), tl.load(own + 1, mask=inside, other=float("inf"))
    return top, least, tl.load(own + 2, mask=inside, other=1.0)


@jit_varying("first", "first_stride", "history", "length", "number")
def propose_kernel(
    logits: tl.tensor,
    values: tl.tensor,
    few: tl.tensor,
    slots: tl.tensor,
    tables: tl.tuple,
    draft_probs: tl.tensor,
    first: tl.tensor,
    first_stride: tl.tensor,
    history: tl.tensor,
    length: tl.tensor,
    number: tl.tensor,
    token: tl.tensor,
    flags: tl.tensor,
    k: tl.constexpr,
    vocab: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
    checks: tl.constexpr,
) -> None:
    """``StepOps.propose`` of draft ``number``, one program a request; what it was drawn from goes to the slot."""
    await_previous()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    values += request * padded
    position = tl.load(first + request * first_stride) + 1 + number
    run = history + request * length, length, position
    finding, top, least, total = _look(
        logits + request * vocab, values, slot, tables, run, slots, few + request * few_size,
        vocab, padded, chunk, few_size, False,
    )  # fmt: skip
    chosen = token_of(finding)
    if tl.load(tables[0] + slot * _FLOATS + _TEMPERATURE) > 0:
        own = draft_probs + (slot * k + number) * vocab
        bits = random_bits(tl.load(tables[2] + slot), position, _DRAFT)
        figures = top, least, total
        chosen = _draw(bits, values, figures, own, number < 0, own, True, vocab, padded, chunk).to(tl.int64)
    tl.store(token + request, chosen)
    tl.store(flags + request, draft_flags(finding, checks))
