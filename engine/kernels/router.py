"""Routing of a MoE layer: fp32 scores, the choice of experts, and the list of blocks that the products work off.

Every row is scored and chosen for by itself, and equal preferences go to the lower expert, so a row's experts
depend on no other row. Its logits are summed in an order that follows from the shape of the router alone up to
``MAX_STREAMED_ROWS`` rows; above, they come from one ordinary product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.blocks import Blocks, empty_blocks, list_blocks, write_blocks
from engine.kernels.jit import await_previous, check_rows, jit_function, jit_varying, power_of_two

MAX_STREAMED_ROWS = 256
"""Most rows for which our own kernel computes the logits, split over the hidden dimension."""
MAX_LISTING_ROWS = 32
"""Most rows for which the program that chooses also lists the blocks; above, rows are chosen for in parallel."""
MAX_SPLITS = 16
"""Most parts of the hidden dimension, and the least width of one."""
MIN_SPLIT = 128
MAX_ALONE = 256 * 64
"""Largest router (hidden x experts) whose logits one program computes on the way to the choice."""
LOGIT_ROWS = tl.constexpr(16)
"""Rows of a logits tile: the least that a matrix product takes."""
CHOOSING_ROWS = 4
"""Rows of a program that chooses without listing."""
NEVER = tl.constexpr(-(2**63))
"""The key of what may not be chosen: below every key of a preference."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How scores become a choice: the fixed part of a router."""

    num_experts: int
    top_k: int
    num_groups: int
    top_groups: int
    best_of_group: int
    """Experts whose preferences rank a group: its best one or the sum of its best two."""
    sigmoid: bool
    normalise: bool
    scale: float


def route(x: Tensor, projection: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Experts ``[N, top_k]`` int64, best first, and their weights ``[N, top_k]`` fp32.

    Args:
        x: ``[N, hidden]``, any float dtype, rows contiguous.
        projection: ``[hidden, experts]`` fp32, contiguous.
        bias: ``[experts]`` fp32, added for the choice and not for the weights.
    """
    return _choose(x, projection, bias, routing, None)


def route_blocks(
    x: Tensor, projection: Tensor, bias: Tensor | None, routing: Routing, *, block_rows: int, num_shared: int
) -> tuple[Tensor, Blocks]:
    """Weights ``[N, top_k]`` fp32 as ``route`` gives them, and the chosen experts as blocks of ``block_rows``.

    Args:
        num_shared: Experts behind the routed ones, for which a token has slots too; they are in no block.
    """
    blocks = empty_blocks(
        x.shape[0],
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        slots=routing.top_k + num_shared,
        block_rows=block_rows,
        device=x.device,
    )
    chosen, weights = _choose(x, projection, bias, routing, blocks)
    if x.shape[0] > MAX_LISTING_ROWS:
        list_blocks(chosen, blocks)
    return weights, blocks


def _choose(
    x: Tensor, projection: Tensor, bias: Tensor | None, routing: Routing, blocks: Blocks | None
) -> tuple[Tensor, Tensor]:
    """Experts and weights; fills ``blocks`` too where one program does all rows."""
    rows, hidden = x.shape
    check_rows("x", x)
    assert projection.is_contiguous() and projection.dtype == torch.float32
    alone = rows <= LOGIT_ROWS.value and projection.numel() <= MAX_ALONE
    logits, splits = (x, 0) if alone else _logits(x, projection)
    chosen = torch.empty(rows, routing.top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32, device=x.device)
    listed = blocks if rows <= MAX_LISTING_ROWS else None
    tile_rows = power_of_two(rows) if listed is not None else min(CHOOSING_ROWS, power_of_two(rows))
    tile_rows = LOGIT_ROWS.value if alone else tile_rows
    _choose_kernel[(triton.cdiv(rows, tile_rows),)](
        logits,
        x.stride(0),
        projection,
        projection if bias is None else bias,
        chosen,
        weights,
        chosen if listed is None else listed.entries,
        chosen if listed is None else listed.pairs,
        rows,
        0 if listed is None else listed.entries.shape[0],
        hidden=hidden,
        num_splits=splits,
        experts=routing.num_experts,
        expert_block=max(16, power_of_two(routing.num_experts)),
        tile_rows=tile_rows,
        top_k=routing.top_k,
        slots=0 if listed is None else listed.slots,
        slot_block=power_of_two(routing.top_k),
        num_groups=routing.num_groups,
        group_block=power_of_two(routing.num_groups),
        top_groups=routing.top_groups,
        best_of_group=routing.best_of_group,
        sigmoid=routing.sigmoid,
        has_bias=bias is not None,
        normalise=routing.normalise,
        scale=routing.scale,
        listing=listed is not None,
        most=power_of_two(tile_rows * routing.top_k),
        block_rows=1 if listed is None else listed.size,
        num_warps=4 if tile_rows * routing.num_experts <= 2048 else 8,
    )
    return chosen, weights


def _logits(x: Tensor, projection: Tensor) -> tuple[Tensor, int]:
    """Partial logits ``[splits, N, experts]`` fp32 and the number of splits."""
    (rows, hidden), experts = x.shape, projection.shape[1]
    if rows > MAX_STREAMED_ROWS:
        return torch.mm(x.float(), projection), 1
    split = max(MIN_SPLIT, power_of_two(triton.cdiv(hidden, MAX_SPLITS)))
    splits = triton.cdiv(hidden, split)
    partial = torch.empty(splits, rows, experts, dtype=torch.float32, device=x.device)
    tile = max(16, min(64, power_of_two(experts)))
    grid = (triton.cdiv(rows, LOGIT_ROWS.value), splits, triton.cdiv(experts, tile))
    _logits_kernel[grid](
        x,
        x.stride(0),
        projection,
        partial,
        rows,
        hidden=hidden,
        experts=experts,
        expert_block=tile,
        split=split,
        width=MIN_SPLIT,
        num_warps=4,
    )
    return partial, splits


@jit_function
def _product(
    x: tl.tensor,
    x_stride: tl.tensor,
    projection: tl.tensor,
    row: tl.tensor,
    expert: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    depth: tl.constexpr,
    hidden: tl.constexpr,
    experts: tl.constexpr,
    width: tl.constexpr,
) -> Any:
    """fp32 ``x @ projection`` over ``depth`` inputs from ``first``, ``row`` ``[R, 1]``, ``expert`` ``[1, E]``."""
    total = tl.zeros([row.shape[0], expert.shape[1]], dtype=tl.float32)
    place = tl.arange(0, width)
    for start in range(0, depth, width):
        here = first + start + place
        values = tl.load(
            x + row * x_stride + here[None, :], mask=(row < rows) & (here[None, :] < hidden), other=0.0
        )
        weight = tl.load(
            projection + here[:, None] * experts + expert,
            mask=(here[:, None] < hidden) & (expert < experts),
            other=0.0,
        )
        total = tl.dot(values.to(tl.float32), weight, total, input_precision="tf32x3")
    return total


@jit_varying("rows")
def _logits_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    projection: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    hidden: tl.constexpr,
    experts: tl.constexpr,
    expert_block: tl.constexpr,
    split: tl.constexpr,
    width: tl.constexpr,
) -> None:
    await_previous()
    row = (tl.program_id(0) * LOGIT_ROWS + tl.arange(0, LOGIT_ROWS))[:, None]
    part = tl.program_id(1)
    expert = (tl.program_id(2) * expert_block + tl.arange(0, expert_block))[None, :]
    total = _product(x, x_stride, projection, row, expert, rows, part * split, split, hidden, experts, width)
    tl.store(partial + (part * rows + row) * experts + expert, total, mask=(row < rows) & (expert < experts))


@jit_function
def _key(preference: tl.tensor, index: tl.tensor, size: tl.constexpr) -> Any:
    """int64 that orders as the preferences do (NaN as infinity), then by lower index; all keys differ."""
    preference = tl.where(
        preference == preference, preference + 0.0, float("inf")
    )  # no negative zero, no NaN
    bits = preference.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (size - 1 - index).to(tl.int64)


@jit_function
def _index(key: tl.tensor, size: tl.constexpr) -> Any:
    return size - 1 - (key & 0x7FFFFFFF).to(tl.int32)


@jit_function
def _preference(key: tl.tensor) -> Any:
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit_function
def _only_best_groups(
    key: tl.tensor,
    expert: tl.tensor,
    experts: tl.constexpr,
    num_groups: tl.constexpr,
    group_block: tl.constexpr,
    top_groups: tl.constexpr,
    best_of_group: tl.constexpr,
) -> Any:
    """``key`` ``[R, E]`` with ``NEVER`` outside each row's best groups."""
    group_of = expert // (experts // num_groups)
    group = tl.arange(0, group_block)[None, :]
    rank = tl.full([key.shape[0], group_block], NEVER, dtype=tl.int64)
    for number in tl.static_range(num_groups):
        inside = tl.where((group_of == number) & (expert < experts), key, NEVER)
        best = tl.max(inside, axis=1)
        total = _preference(best)
        if best_of_group == 2:
            second = tl.max(tl.where(inside == best[:, None], NEVER, inside), axis=1)
            total += _preference(second)
        rank = tl.where(group == number, _key(total[:, None], group, group_block), rank)
    kept = tl.full(key.shape, NEVER, dtype=tl.int64)
    for _ in tl.static_range(top_groups):
        best = tl.max(rank, axis=1)[:, None]
        kept = tl.where(group_of == _index(best, group_block), key, kept)
        rank = tl.where(rank == best, NEVER, rank)
    return kept


@jit_varying("rows", "bound")
def _choose_kernel(
    logits: tl.tensor,
    x_stride: tl.tensor,
    projection: tl.tensor,
    bias: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    entries: tl.tensor,
    pairs: tl.tensor,
    rows: tl.tensor,
    bound: tl.tensor,
    hidden: tl.constexpr,
    num_splits: tl.constexpr,
    experts: tl.constexpr,
    expert_block: tl.constexpr,
    tile_rows: tl.constexpr,
    top_k: tl.constexpr,
    slots: tl.constexpr,
    slot_block: tl.constexpr,
    num_groups: tl.constexpr,
    group_block: tl.constexpr,
    top_groups: tl.constexpr,
    best_of_group: tl.constexpr,
    sigmoid: tl.constexpr,
    has_bias: tl.constexpr,
    normalise: tl.constexpr,
    scale: tl.constexpr,
    listing: tl.constexpr,
    most: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    """``logits`` are partial ones, or ``x`` itself where there are no splits."""
    await_previous()
    row = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows))[:, None]
    expert = tl.arange(0, expert_block)[None, :]
    inside = (row < rows) & (expert < experts)
    if num_splits == 0:
        total = _product(logits, x_stride, projection, row, expert, rows, 0, hidden, hidden, experts, 128)
    else:
        total = tl.zeros([tile_rows, expert_block], dtype=tl.float32)
        for split in tl.static_range(num_splits):
            total += tl.load(logits + (split * rows + row) * experts + expert, mask=inside, other=0.0)
    if sigmoid:
        score = 1.0 / (1.0 + tl.exp(-total))
    else:
        total = tl.where(expert < experts, total, float("-inf"))
        score = tl.exp(total - tl.max(total, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    preference = score
    if has_bias:
        preference += tl.load(bias + expert, mask=expert < experts, other=0.0)
    key = tl.where(expert < experts, _key(preference, expert, expert_block), NEVER)
    if top_groups < num_groups:
        key = _only_best_groups(key, expert, experts, num_groups, group_block, top_groups, best_of_group)
    slot = tl.arange(0, slot_block)[None, :]
    slot_of = tl.zeros([tile_rows, expert_block], dtype=tl.int32)
    best_experts = tl.zeros([tile_rows, slot_block], dtype=tl.int32)
    best_scores = tl.zeros([tile_rows, slot_block], dtype=tl.float32)
    for number in tl.static_range(top_k):
        best = tl.max(key, axis=1)[:, None]
        hit = key == best
        key = tl.where(hit, NEVER, key)
        slot_of = tl.where(hit & (row < rows), number + 1, slot_of)
        best_experts = tl.where(slot == number, _index(best, expert_block), best_experts)
        best_score = tl.sum(tl.where(hit, score, 0.0), axis=1)[:, None]
        best_scores = tl.where(slot == number, best_score, best_scores)
    if normalise:
        best_scores = best_scores / (tl.sum(best_scores, axis=1)[:, None] + 1e-20)
    kept = (row < rows) & (slot < top_k)
    tl.store(chosen + row * top_k + slot, best_experts.to(tl.int64), mask=kept)
    tl.store(weights + row * top_k + slot, best_scores * scale, mask=kept)
    if listing:
        write_blocks(slot_of, row, entries, pairs, bound, tile_rows, expert_block, most, slots, block_rows)
