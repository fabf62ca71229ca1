"""Kernels that accept and draw tokens by the requests' parameters: ``engine.sampler``, one team a request.

A draw adds up probabilities in fixed point, whose sums do not depend on an order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.argmax import LAST, draft_flags, run_flags, token_of
from engine.kernels.jit import await_previous, jit_function, jit_varying
from engine.kernels.rng import random_bits, unit
from engine.kernels.team import LOW, column, disband, exchanged, posted, team_of
from engine.kernels.threshold import STAGES
from engine.kernels.weigh import FIGURES, KEYS, look, temperature_of
from engine.rng import Purpose, purpose_offset
from engine.state import NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN

_SEQ_LEN, _NUM_DRAFTS, _NEXT_TOKEN = tl.constexpr(SEQ_LEN), tl.constexpr(NUM_DRAFTS), tl.constexpr(NEXT_TOKEN)
_ACCEPT = tl.constexpr(purpose_offset(Purpose.ACCEPT))
_TOKEN = tl.constexpr(purpose_offset(Purpose.TOKEN))
_DRAFT = tl.constexpr(purpose_offset(Purpose.DRAFT))
_UNITS = tl.constexpr(float(1 << 40))
"""What a probability of 1 weighs in a draw."""


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
    team: tl.tuple,
    turn: tl.tensor,
    writes: tl.constexpr,
    vocab: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
    members: tl.constexpr,
) -> tl.tuple:
    """A token of a weighed row by its inverse distribution function, less ``other`` if ``subtract``.

    If that leaves nothing, then of the row itself. ``writes``: the row's probabilities go to ``written``. With the
    token, which only one member finds, that member's number, and the next turn.
    """
    amounts = _amounts(values, figures, other, subtract, written, team, writes, vocab, span, chunk)
    each, turn = _of_all(tl.sum(amounts, axis=0), team, turn, members)
    if subtract & (tl.sum(each, axis=0) == 0):
        subtract = subtract & False
        amounts = _amounts(values, figures, other, subtract, written, team, writes, vocab, span, chunk)
        each, turn = _of_all(tl.sum(amounts, axis=0), team, turn, members)
    # Uniform in 0 .. amount - 1, the part of the row that it falls into, and the piece of that
    target = tl.umulhi(bits, tl.sum(each, axis=0).to(tl.uint64)).to(tl.int64)
    member = tl.minimum(_passed(each, target), members - 1)
    target -= _before(each, member)
    found = _passed(amounts, target)
    target -= _before(amounts, found)
    here = team[1] * span + found * chunk + tl.arange(0, chunk)
    inside = here < vocab
    share = _share(tl.load(values + here, mask=inside, other=float("-inf")), figures)
    units = _units(share - tl.load(other + here, mask=inside & subtract, other=0.0))
    chosen = tl.where(tl.cumsum(units, axis=0) > target, here, LAST)
    # A row that is not finite has nothing to draw: any token will do, for the guard has seen it
    return tl.minimum(tl.min(chosen, axis=0), vocab - 1), member, turn


@jit_function
def _of_all(amount: tl.tensor, team: tl.tuple, turn: tl.tensor, members: tl.constexpr) -> tl.tuple:
    """The amounts (int64) of all members, ``[members]``, and the next turn."""
    each = amount + tl.zeros([members], dtype=tl.int64)
    if members > 1:
        mine = posted(0, amount.to(tl.int32))
        mine += posted(1, (amount >> 32).to(tl.int32))
        found, turn = exchanged(team, turn, mine, members)
        each = (column(found, 1).to(tl.int64) << 32) | (column(found, 0).to(tl.int64) & LOW)
    return each, turn


@jit_function
def _passed(amounts: tl.tensor, target: tl.tensor) -> tl.tensor:
    """How many of ``amounts`` in a row end at ``target`` or before it."""
    return tl.sum((tl.cumsum(amounts, axis=0) <= target).to(tl.int32), axis=0)


@jit_function
def _before(amounts: tl.tensor, number: tl.tensor) -> tl.tensor:
    """The sum of the first ``number`` of ``amounts``."""
    return tl.sum(tl.where(tl.arange(0, amounts.shape[0]) < number, amounts, 0), axis=0)


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
    team: tl.tuple,
    writes: tl.constexpr,
    vocab: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    """What each piece of a member's part weighs in ``_draw``, in fixed point: ``[pieces]`` int64."""
    pieces: tl.constexpr = triton.next_power_of_2(span // chunk)
    amounts = tl.zeros([pieces], dtype=tl.int64)
    for start in tl.range(0, span, chunk, num_stages=STAGES):
        here = team[1] * span + start + tl.arange(0, chunk)
        share = _share(tl.load(values + here), figures)
        if writes:
            tl.store(written + here, share, mask=here < vocab)
        share -= tl.load(other + here, mask=(here < vocab) & subtract, other=0.0)
        amount = tl.sum(_units(share), axis=0)
        amounts = tl.where(tl.arange(0, pieces) == start // chunk, amount, amounts)
    return amounts


@jit_function
def _figures_at(figures: tl.tensor, row: tl.tensor, inside: tl.tensor) -> tl.tuple:
    """Greatest value, least kept one and sum of weighed rows."""
    own = figures + row * FIGURES
    top, least = tl.load(own, mask=inside, other=0.0), tl.load(own + 1, mask=inside, other=float("inf"))
    return top, least, tl.load(own + 2, mask=inside, other=1.0)


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
    board: tl.tensor,
    turns: tl.tensor,
    width: tl.tensor,
    k: tl.constexpr,
    place_block: tl.constexpr,
    vocab: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
    members: tl.constexpr,
    checks: tl.constexpr,
) -> None:
    """``StepOps.accept`` of weighed rows, one team a request: all of it decides, one member tells."""
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
    sampled = temperature_of(tables, slot) > 0
    team, turn = team_of(board, turns, request, members)
    padded: tl.constexpr = span * members
    teller = tl.full([], 0, tl.int32)
    proposed = draft_probs + slot * (k * vocab)
    key = tl.load(tables[KEYS] + slot)
    if sampled:
        valid = place < num_drafts
        value = tl.load(values + row * padded + draft, mask=valid, other=float("-inf"))
        share = _share(value, _figures_at(figures, row, valid))
        asked = tl.load(proposed + place * vocab + draft, mask=valid, other=0.0)
        chance = unit(random_bits(key, start + place, _ACCEPT))
        stands = valid & (chance * asked.to(tl.float64) < share.to(tl.float64))
    count = tl.min(tl.where(stands, place_block, place), axis=0)  # the last place never stands
    if sampled:
        drawn, teller, turn = _draw(
            random_bits(key, start + count, _TOKEN), values + (request * width + count) * padded,
            _figures_at(figures, request * width + count, count >= 0), proposed + count * vocab,
            count < num_drafts, values, team, turn, False, vocab, span, chunk, members,
        )  # fmt: skip
        token = tl.where(place < count, draft, drawn)
    verdict = run_flags(finding, place, inside, count, checks)
    if team[1] == teller:
        tl.store(emitted + row, token, mask=inside)
        tl.store(history + row, tl.where(place <= count, token, -1), mask=inside)
        tl.store(accepted + request, count.to(tl.int64))
        tl.store(seq_len + request, start + count)
        tl.store(last + request, request * width + count)
        tl.store(flags + request + tl.arange(0, 1), verdict)
    disband(turns, request, team, turn, members)


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
    board: tl.tensor,
    turns: tl.tensor,
    k: tl.constexpr,
    vocab: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
    members: tl.constexpr,
    checks: tl.constexpr,
) -> None:
    """``StepOps.propose`` of draft ``number``, one team a request; what it was drawn from goes to the slot."""
    await_previous()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    values += request * (span * members)
    position = tl.load(first + request * first_stride) + 1 + number
    run = history + request * length, length, position
    team, turn = team_of(board, turns, request, members)
    teller = tl.full([], 0, tl.int32)
    finding, top, least, total, turn = look(
        logits + request * vocab, values, slot, tables, run, slots, few + request * few_size,
        team, turn, vocab, span, chunk, few_size, members, False,
    )  # fmt: skip
    chosen = token_of(finding)
    if temperature_of(tables, slot) > 0:
        own = draft_probs + (slot * k + number) * vocab
        bits = random_bits(tl.load(tables[KEYS] + slot), position, _DRAFT)
        figures = top, least, total
        drawn, teller, turn = _draw(
            bits, values, figures, own, number < 0, own, team, turn, True, vocab, span, chunk, members
        )
        chosen = drawn.to(tl.int64)
    if team[1] == teller:
        tl.store(token + request, chosen)
        tl.store(flags + request, draft_flags(finding, checks))
    disband(turns, request, team, turn, members)
