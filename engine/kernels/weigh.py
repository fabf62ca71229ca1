"""What a row of logits is to sampling: processed, weighed, and cut to what its request keeps; one team a row.

A row pays for what its own request asks: its vocabulary-wide tables are read if it has some, a threshold is
searched if it has top_k, top_p or min_p, and of a greedy row only the best token is wanted.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from engine.kernels.argmax import (
    LAST,
    MINUS_INF,
    NAN,
    NOTHING,
    finding_of,
    order_of,
    value_of,
)
from engine.kernels.jit import await_previous, jit_function, jit_varying
from engine.kernels.team import column, disband, exchanged, floats, posted, team_of
from engine.kernels.threshold import STAGES, crossing, mass_from
from engine.sampler import FREQUENCY, MIN_P, PRESENCE, REPETITION, TEMPERATURE, TOP_P
from engine.state import NEXT_TOKEN, SEQ_LEN, SlotState

_TOP_P, _MIN_P = tl.constexpr(TOP_P), tl.constexpr(MIN_P)
_PRESENCE, _FREQUENCY = tl.constexpr(PRESENCE), tl.constexpr(FREQUENCY)
_REPETITION, _TEMPERATURE = tl.constexpr(REPETITION), tl.constexpr(TEMPERATURE)
_COLUMNS = tl.constexpr(REPETITION + 1)
"""Columns of ``SlotState.floats``."""
_SEQ_LEN, _NEXT_TOKEN = tl.constexpr(SEQ_LEN), tl.constexpr(NEXT_TOKEN)
FIGURES = tl.constexpr(3)
"""Of a weighed row, float32: its greatest value, the least one that is kept, and the sum of exp(value - greatest)
of those that are kept. A value is a processed logit over the temperature; sampled rows keep theirs."""


_TABLES = (
    "floats", "top_k", "keys", "has_tables", "min_position",
    "logit_bias", "stop_mask", "output_counts", "prompt_seen",
)  # fmt: skip
"""Attributes of ``SlotState``: what kernels read of a slot's parameters and history, in this order."""
FLOATS, TOP_K, KEYS, HAS_TABLES, MIN_POSITION = (tl.constexpr(_TABLES.index(name)) for name in _TABLES[:5])
LOGIT_BIAS, STOP_MASK, OUTPUT_COUNTS, PROMPT_SEEN = (
    tl.constexpr(_TABLES.index(name)) for name in _TABLES[5:]
)


def tables_of(state: SlotState) -> tuple[Tensor, ...]:
    """The slots' ``tables``."""
    return tuple(getattr(state, name) for name in _TABLES)


@jit_function
def temperature_of(tables: tl.tuple, slot: tl.tensor) -> tl.tensor:
    """A slot's temperature, 0 where it is greedy."""
    return tl.load(tables[FLOATS] + slot * _COLUMNS + _TEMPERATURE)


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
    own = tables[FLOATS] + slot * _COLUMNS
    at = slot * vocab + token
    count = tl.load(tables[OUTPUT_COUNTS] + at, mask=inside, other=0)
    place = 0
    while place < length:
        count += (token == tl.load(run + place)).to(tl.int32)
        place += 1
    value += tl.load(tables[LOGIT_BIAS] + at, mask=inside, other=0.0)
    stop = tl.load(tables[STOP_MASK] + at, mask=inside, other=0) != 0
    value = tl.where(stop & (position < tl.load(tables[MIN_POSITION] + slot)), float("-inf"), value)
    seen = (count > 0) | (tl.load(tables[PROMPT_SEEN] + at, mask=inside, other=0) != 0)
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
    team: tl.tuple,
    turn: tl.tensor,
    vocab: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
    members: tl.constexpr,
    has_mask: tl.constexpr,
) -> tl.tuple:
    """The first reading of a row: its best token, the greatest and the least finite value, whether all logits are
    finite as they came, and the next turn. The values of a sampled row are written down."""
    temperature = temperature_of(tables, slot)
    sampled = temperature > 0
    scale = 1.0 / tl.where(sampled, temperature, 1.0)
    has_tables = tl.load(tables[HAS_TABLES] + slot) != 0
    best, first = tl.full([chunk], float("-inf"), tl.float32), tl.full([chunk], LAST, tl.int32)
    least, fault = tl.full([chunk], float("inf"), tl.float32), tl.zeros([chunk], dtype=tl.float32)
    begin = team[1] * span
    for start in tl.range(begin, begin + span, chunk, num_stages=STAGES):
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
    lowest, faulty = tl.min(least, axis=0), tl.sum(fault, axis=0)
    if members > 1:
        mine = posted(0, top) + posted(1, token)
        mine += posted(2, lowest) + posted(3, faulty)
        found, turn = exchanged(team, turn, mine, members)
        tops = floats(found, 0)
        top = tl.max(tops, axis=0)
        token = tl.min(tl.where(tops == top, column(found, 1), LAST), axis=0)
        lowest, faulty = tl.min(floats(found, 2), axis=0), tl.sum(floats(found, 3), axis=0)
    return token, top, lowest, faulty == 0.0, turn


@jit_function
def _fault_order(
    logits: tl.tensor,
    team: tl.tuple,
    turn: tl.tensor,
    vocab: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
    members: tl.constexpr,
) -> tl.tuple:
    """Of a row with a fault: the greatest order of its logits, whether the least is -infinity, and the next
    turn."""
    greatest = tl.full([chunk], NOTHING, tl.int32)
    lowest = tl.full([chunk], NAN, tl.int32)
    begin = team[1] * span
    for start in tl.range(begin, begin + span, chunk, num_stages=STAGES):
        here = start + tl.arange(0, chunk)
        order = order_of(tl.load(logits + here, mask=here < vocab, other=0.0).to(tl.float32))
        greatest, lowest = tl.maximum(greatest, order), tl.minimum(lowest, order)
    most, least = tl.max(greatest, axis=0), tl.min(lowest, axis=0)
    if members > 1:
        mine = posted(0, most) + posted(1, least)
        found, turn = exchanged(team, turn, mine, members)
        most, least = tl.max(column(found, 0), axis=0), tl.min(column(found, 1), axis=0)
    return most, (least == MINUS_INF).to(tl.int32), turn


@jit_function
def _weighed(
    values: tl.tensor,
    top: tl.tensor,
    least: tl.tensor,
    slot: tl.tensor,
    tables: tl.tuple,
    few: tl.tensor,
    team: tl.tuple,
    turn: tl.tensor,
    vocab: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
    members: tl.constexpr,
) -> tl.tuple:
    """``engine.sampler.truncate``: the least value that is kept, the sum of exp(value - top) of all kept, and the
    next turn."""
    own = tables[FLOATS] + slot * _COLUMNS
    top_k, top_p, min_p = tl.load(tables[TOP_K] + slot), tl.load(own + _TOP_P), tl.load(own + _MIN_P)
    low, high = order_of(least).to(tl.int64), order_of(top).to(tl.int64) + 1
    if min_p > 0:
        # p / p_max >= min_p, compared in the log domain
        low = tl.minimum(tl.maximum(low, order_of(top + tl.log(min_p)).to(tl.int64)), high - 1)
    if top_k < vocab:
        number = tl.full([], vocab, tl.float32)
        low, number, turn = crossing(
            values, low, high, number, top_k.to(tl.float32), top, few, team, turn,
            False, span, chunk, few_size, members,
        )  # fmt: skip
    total, turn = mass_from(values, value_of(low.to(tl.int32)), top, team, turn, span, chunk, members)
    if top_p < 1:
        low, total, turn = crossing(
            values, low, high, total, top_p * total, top, few, team, turn,
            True, span, chunk, few_size, members,
        )  # fmt: skip
    return value_of(low.to(tl.int32)), total, turn


@jit_function
def look(
    logits: tl.tensor,
    values: tl.tensor,
    slot: tl.tensor,
    tables: tl.tuple,
    history: tl.tuple,
    allowed: tl.tensor,
    few: tl.tensor,
    team: tl.tuple,
    turn: tl.tensor,
    vocab: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
    members: tl.constexpr,
    has_mask: tl.constexpr,
) -> tl.tuple:
    """A row's finding, its figures and the next turn; of a greedy or faulty one nothing is kept.

    The finding's token is the best of the processed logits; whether it tells of a fault depends on the logits as
    they came.
    """
    token, top, least, finite, turn = _survey(
        logits, values, slot, tables, history, allowed, team, turn, vocab, span, chunk, members, has_mask
    )
    order, low = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    kept, total = tl.full([], float("inf"), tl.float32), tl.full([], 1.0, tl.float32)
    if finite == 0:
        order, low, turn = _fault_order(logits, team, turn, vocab, span, chunk, members)
    elif (temperature_of(tables, slot) > 0) & (tl.abs(top) < float("inf")):
        kept, total, turn = _weighed(
            values, top, least, slot, tables, few, team, turn, vocab, span, chunk, few_size, members
        )
    return finding_of(order, tl.minimum(token, vocab - 1), low), top, kept, total, turn


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
    board: tl.tensor,
    turns: tl.tensor,
    places: tl.tensor,
    columns: tl.constexpr,
    words: tl.constexpr,
    vocab: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
    members: tl.constexpr,
    has_mask: tl.constexpr,
) -> None:
    """Findings and figures of verify rows, ``places`` a request; a place's history are the drafts before it."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    request, place = row // places, row % places
    slot = tl.load(slots + request)
    own = core + request * columns
    history = own + _NEXT_TOKEN + 1, place.to(tl.int32), tl.load(own + _SEQ_LEN) + 1 + place
    team, turn = team_of(board, turns, row, members)
    finding, top, least, total, turn = look(
        logits + row * vocab, values + row * (span * members), slot, tables, history, allowed + row * words,
        few + row * few_size, team, turn, vocab, span, chunk, few_size, members, has_mask,
    )  # fmt: skip
    if team[1] == 0:
        tl.store(findings + row, finding)
        tl.store(figures + row * FIGURES, top)
        tl.store(figures + row * FIGURES + 1, least)
        tl.store(figures + row * FIGURES + 2, total)
    disband(turns, row, team, turn, members)
