"""top_k, top_p and min_p of a row as one threshold, without a sort.

"The fewest best tokens that together weigh so much" (their number for top_k, their probability for top_p) end at a
value that is found by narrowing an interval: each reading of the row quarters it, until the tokens in it fit into
one program's registers, where it is halved. The bounds are integers in the order of float32 (``order_of``), so the
threshold is exactly a token's value, and tokens of equal values are kept together or not at all.

A row has ``padded`` float32 values, negative infinity behind the vocabulary and where a token is impossible. The
greatest one is ``top``, and finite.
"""

from __future__ import annotations

import triton.language as tl

from engine.kernels.argmax import order_of, value_of
from engine.kernels.jit import jit_function

STAGES = tl.constexpr(3)
"""Pieces of a row in flight to a program, the one that it works on included."""
_VALUE_PASSES = tl.constexpr(8)
"""Readings that quarter an interval of values; further ones, which only strange rows need, quarter its orders."""


@jit_function
def mass_from(
    values: tl.tensor, least: tl.tensor, top: tl.tensor, padded: tl.constexpr, chunk: tl.constexpr
) -> tl.tensor:
    """Sum of exp(value - top) of a row's values from ``least`` on."""
    total = tl.zeros([chunk], dtype=tl.float32)
    for start in tl.range(0, padded, chunk, num_stages=STAGES):
        value = tl.load(values + start + tl.arange(0, chunk))
        total += tl.where(value >= least, tl.exp(value - top), 0.0)
    return tl.sum(total, axis=0)


@jit_function
def _pivot(low: tl.tensor, high: tl.tensor, number: tl.constexpr, by_order: tl.tensor) -> tl.tensor:
    """The order ``number`` quarters of the way through an interval, strictly inside of it; int64, as they are."""
    first, last = value_of(low.to(tl.int32)), value_of((high - 1).to(tl.int32))
    by_value = order_of(first + (last - first) * (number * 0.25)).to(tl.int64)
    pivot = tl.where(by_order, low + (high - low) // 4 * number, by_value)
    return tl.minimum(tl.maximum(pivot, low + 1), high - 1)


@jit_function
def _cut(
    interval: tl.tuple, pivot: tl.tensor, weight: tl.tensor, number: tl.tensor, target: tl.tensor
) -> tl.tuple:
    """``interval`` less what is on the wrong side of ``pivot``, from which on ``number`` tokens weigh ``weight``.

    An interval is ``low``, ``high``, and from each of them on the number of tokens and their weight.
    """
    low, high, from_low, from_high, weight_low, weight_high = interval
    inside = (pivot > low) & (pivot < high)
    enough = weight >= target
    rises, falls = inside & enough, inside & (enough == 0)  # one of them, whatever a weight is: a search ends
    return (
        tl.where(rises, pivot, low),
        tl.where(falls, pivot, high),
        tl.where(rises, number, from_low),
        tl.where(falls, number, from_high),
        tl.where(rises, weight, weight_low),
        tl.where(falls, weight, weight_high),
    )


@jit_function
def _narrowed(
    values: tl.tensor,
    interval: tl.tuple,
    target: tl.tensor,
    top: tl.tensor,
    by_order: tl.tensor,
    by_mass: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tuple:
    """A quarter of ``interval``, or less, after one reading of the row."""
    low, high = interval[0], interval[1]
    first, second = _pivot(low, high, 1, by_order), _pivot(low, high, 2, by_order)
    third = _pivot(low, high, 3, by_order)
    at_1, at_2 = value_of(first.to(tl.int32)), value_of(second.to(tl.int32))
    at_3 = value_of(third.to(tl.int32))
    number_1 = tl.zeros([chunk], dtype=tl.int32)
    number_2, number_3 = number_1, number_1
    mass_1 = tl.zeros([chunk], dtype=tl.float32)
    mass_2, mass_3 = mass_1, mass_1
    for start in tl.range(0, padded, chunk, num_stages=STAGES):
        value = tl.load(values + start + tl.arange(0, chunk))
        number_1 += (value >= at_1).to(tl.int32)
        number_2 += (value >= at_2).to(tl.int32)
        number_3 += (value >= at_3).to(tl.int32)
        if by_mass:
            mass = tl.exp(value - top)
            mass_1 += tl.where(value >= at_1, mass, 0.0)
            mass_2 += tl.where(value >= at_2, mass, 0.0)
            mass_3 += tl.where(value >= at_3, mass, 0.0)
    interval = _cut(interval, first, *_weighs(number_1, mass_1, by_mass), target)
    interval = _cut(interval, second, *_weighs(number_2, mass_2, by_mass), target)
    return _cut(interval, third, *_weighs(number_3, mass_3, by_mass), target)


@jit_function
def _weighs(number: tl.tensor, mass: tl.tensor, by_mass: tl.constexpr) -> tl.tuple:
    """Weight and number of tokens, from every thread's."""
    count = tl.sum(number, axis=0)
    weight = count.to(tl.float32)
    if by_mass:
        weight = tl.sum(mass, axis=0)
    return weight, count


@jit_function
def crossing(
    values: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    weight: tl.tensor,
    target: tl.tensor,
    top: tl.tensor,
    few: tl.tensor,
    by_mass: tl.constexpr,
    padded: tl.constexpr,
    chunk: tl.constexpr,
    few_size: tl.constexpr,
) -> tl.tuple:
    """The greatest order in ``[low, high)`` from which on a row's tokens weigh ``target`` or more; ``low`` if none.

    Unless it is ``low``, it is the order of one of them. With it, what those tokens weigh.

    Args:
        low, high: int64 orders of finite values; all tokens from ``low`` on weigh ``weight``.
        few: Room for ``few_size`` float32.
    """
    from_low, from_high = tl.full([], padded, tl.int32), tl.full([], 0, tl.int32)
    above = tl.full([], 0.0, tl.float32)
    passes = 0
    while (from_low - from_high > few_size) & (high - low > 1):
        interval = low, high, from_low, from_high, weight, above
        by_order = passes >= _VALUE_PASSES
        low, high, from_low, from_high, weight, above = _narrowed(
            values, interval, target, top, by_order, by_mass, padded, chunk
        )
        passes += 1
    if high - low > 1:
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
