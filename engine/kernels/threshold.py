"""top_k, top_p and min_p of a row as one threshold, without a sort.

"The fewest best tokens that together weigh so much" (their number for top_k, their probability for top_p) end at a
value that is found by narrowing an interval: each reading of the row cuts it in parts, until one token is left in
it; or, if a program is alone, until those in it fit into its registers, where it is halved. The bounds are integers
in the order of float32 (``order_of``), and tokens of equal values are kept together or not at all.

A row has float32 values, ``span`` for each member of its team, negative infinity behind the vocabulary and where a
token is impossible. The greatest one is ``top``, and finite.
"""

from __future__ import annotations

import triton.language as tl

from engine.kernels.argmax import order_of, value_of
from engine.kernels.jit import jit_function
from engine.kernels.team import FIELDS, exchanged, floats, posted

STAGES = tl.constexpr(3)
"""Pieces of a row in flight to a program, the one that it works on included."""
_PARTS = tl.constexpr(4)
"""Parts into which a reading cuts an interval."""
_VALUE_PASSES = tl.constexpr(8)
"""Readings that cut an interval of values; further ones, which only strange rows need, cut its orders."""


@jit_function
def mass_from(
    values: tl.tensor,
    least: tl.tensor,
    top: tl.tensor,
    team: tl.tuple,
    turn: tl.tensor,
    span: tl.constexpr,
    chunk: tl.constexpr,
    members: tl.constexpr,
) -> tl.tuple:
    """Sum of exp(value - top) of a row's values from ``least`` on, and the next turn."""
    total = tl.zeros([chunk], dtype=tl.float32)
    first = team[1] * span
    for start in tl.range(first, first + span, chunk, num_stages=STAGES):
        value = tl.load(values + start + tl.arange(0, chunk))
        total += tl.where(value >= least, tl.exp(value - top), 0.0)
    mass = tl.sum(total, axis=0)
    if members > 1:
        found, turn = exchanged(team, turn, posted(0, mass), members)
        mass = tl.sum(floats(found, 0), axis=0)
    return mass, turn


@jit_function
def _pivots(low: tl.tensor, high: tl.tensor, by_order: tl.tensor) -> tl.tensor:
    """Orders ``[PARTS]`` int64 that cut an interval: ``low`` itself, then others strictly inside of it."""
    number = tl.arange(0, _PARTS)
    first, last = value_of(low.to(tl.int32)), value_of((high - 1).to(tl.int32))
    by_value = order_of(first + (last - first) * (number * (1.0 / _PARTS))).to(tl.int64)
    pivot = tl.where(by_order, low + (high - low) // _PARTS * number, by_value)
    return tl.where(number == 0, low, tl.minimum(tl.maximum(pivot, low + 1), high - 1))


@jit_function
def _from_pivots(
    values: tl.tensor,
    pivots: tl.tensor,
    top: tl.tensor,
    team: tl.tuple,
    turn: tl.tensor,
    by_mass: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
    members: tl.constexpr,
) -> tl.tuple:
    """Number and weight of the tokens from each pivot on, ``[PARTS]`` each, and the next turn; one reading."""
    at = value_of(pivots.to(tl.int32))[:, None]
    number = tl.zeros([_PARTS, chunk], dtype=tl.int32)
    mass = tl.zeros([_PARTS, chunk], dtype=tl.float32)
    first = team[1] * span
    for start in tl.range(first, first + span, chunk, num_stages=STAGES):
        value = tl.load(values + start + tl.arange(0, chunk)[None, :])
        number += (value >= at).to(tl.int32)
        if by_mass:
            mass += tl.where(value >= at, tl.exp(value - top), 0.0)
    count = tl.sum(number, axis=1)
    weight = count.to(tl.float32)
    if by_mass:
        weight = tl.sum(mass, axis=1)
    if members > 1:
        both = tl.reshape(tl.join(count, weight.to(tl.int32, bitcast=True)), [FIELDS])
        found, turn = exchanged(team, turn, both, members)
        counts, weights = tl.split(tl.reshape(found, [members, _PARTS, 2]))
        count = tl.sum(counts, axis=0)
        weight = count.to(tl.float32)
        if by_mass:
            weight = tl.sum(weights.to(tl.float32, bitcast=True), axis=0)
    return count, weight, turn


@jit_function
def _cut(
    interval: tl.tuple, pivots: tl.tensor, number: tl.tensor, weight: tl.tensor, target: tl.tensor
) -> tl.tuple:
    """The part of ``interval`` that ends in the first pivot from which on less than ``target`` is weighed.

    An interval is ``low``, ``high``, and from each of them on the number of tokens and their weight.
    """
    _, high, from_low, from_high, weight_low, weight_high = interval
    place = tl.arange(0, _PARTS)
    number = tl.where(place == 0, from_low, number)
    weight = tl.where(place == 0, weight_low, weight)
    # Whatever a weight is, also none at all: the part is smaller than the interval, so a search ends
    short = (place > 0) & ((weight >= target) == 0)
    end = tl.min(tl.where(short, place, _PARTS), axis=0)
    first, last = place == end - 1, place == end
    within = end < _PARTS
    return (
        tl.sum(tl.where(first, pivots, 0), axis=0),
        tl.where(within, tl.sum(tl.where(last, pivots, 0), axis=0), high),
        tl.sum(tl.where(first, number, 0), axis=0),
        tl.where(within, tl.sum(tl.where(last, number, 0), axis=0), from_high),
        tl.sum(tl.where(first, weight, 0.0), axis=0),
        tl.where(within, tl.sum(tl.where(last, weight, 0.0), axis=0), weight_high),
    )


@jit_function
def crossing(
    values: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    weight: tl.tensor,
    target: tl.tensor,
    top: tl.tensor,
    few: tl.tensor,
    team: tl.tuple,
    turn: tl.tensor,
    by_mass: tl.constexpr,
    span: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
    members: tl.constexpr,
) -> tl.tuple:
    """An order in ``[low, high)`` from which on are the fewest best tokens that weigh ``target``; ``low`` if all do
    not. With it, what they weigh, and the next turn.

    Args:
        low, high: int64 orders of finite values; all tokens from ``low`` on weigh ``weight``.
        few: Room for ``few_size`` float32, if the program is alone.
    """
    left: tl.constexpr = few_size if members == 1 else 1
    from_low, from_high = tl.full([], span * members, tl.int32), tl.full([], 0, tl.int32)
    above = tl.full([], 0.0, tl.float32)
    passes = 0
    while (from_low - from_high > left) & (high - low > 1):
        pivots = _pivots(low, high, passes >= _VALUE_PASSES)
        number, weighs, turn = _from_pivots(values, pivots, top, team, turn, by_mass, span, chunk, members)
        interval = low, high, from_low, from_high, weight, above
        low, high, from_low, from_high, weight, above = _cut(interval, pivots, number, weighs, target)
        passes += 1
    if members == 1 and high - low > 1:
        low, weight = _searched(
            values, low, high, weight, above, target, top, few, by_mass, span, chunk, few_size
        )
    return low, weight, turn


@jit_function
def _searched(
    values: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    weight: tl.tensor,
    above: tl.tensor,
    target: tl.tensor,
    top: tl.tensor,
    few: tl.tensor,
    by_mass: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
) -> tl.tuple:
    """``crossing`` of an interval of no more than ``few_size`` tokens, above which ``above`` is weighed."""
    first, last = value_of(low.to(tl.int32)), value_of(high.to(tl.int32))
    value = _collected(values, first, last, few, padded, chunk, few_size)
    each = tl.where(value > float("-inf"), 1.0, 0.0)
    if by_mass:
        each = tl.exp(value - top)
    while high - low > 1:
        middle = low + (high - low) // 2
        weighs = above + tl.sum(tl.where(value >= value_of(middle.to(tl.int32)), each, 0.0), axis=0)
        enough = weighs >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        weight = tl.where(enough, weighs, weight)
    return low, weight


@jit_function
def _collected(
    values: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    few: tl.tensor,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
) -> tl.tensor:
    """The values ``[few_size]`` in ``[low, high)``, which are no more than that; negative infinity behind them."""
    tl.debug_barrier()  # every thread has read what an earlier search left here
    size = 0
    for start in tl.range(0, padded, chunk, num_stages=STAGES):
        value = tl.load(values + start + tl.arange(0, chunk))
        wanted = ((value >= low) & (value < high)).to(tl.int32)
        number = tl.sum(wanted, axis=0)
        if number > 0:
            place = size + tl.cumsum(wanted, axis=0) - 1
            tl.store(few + place, value, mask=(wanted > 0) & (place < few_size))
        size += number
    tl.debug_barrier()
    place = tl.arange(0, few_size)
    return tl.load(few + place, mask=place < size, other=float("-inf"))
