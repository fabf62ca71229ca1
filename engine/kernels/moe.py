"""Products of a MoE layer that stream the chosen experts' weights, each once, whatever the rows chose.

Rows that chose an expert are gathered in blocks; a block and a tile of output columns is one program. Grids follow
from the number of tokens alone (unused blocks end at once), nothing waits for the host and no sum is atomic: the
slots of a token are added in their order. A row's result depends on the other rows only through the tile sizes,
which are chosen by the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.blocks import Blocks
from engine.kernels.jit import (
    await_previous,
    check_rows,
    jit,
    jit_function,
    jit_varying,
    power_of_two,
    precision,
    prefetch,
)


@dataclass(frozen=True, slots=True)
class Tile:
    """Extents of one program: output columns, depth of one step along the sum, and how it is run."""

    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles of both products for up to ``max_tokens`` tokens."""

    max_tokens: int
    block_rows: int
    gate_up: Tile
    down: Tile


PLANS = (
    Plan(32, 16, Tile(32, 128, 4, 4), Tile(32, 128, 4, 4)),
    Plan(2**31, 64, Tile(64, 64, 4, 4), Tile(128, 64, 8, 4)),
)
"""For 16-bit weights, by number of tokens."""
FP32_PLANS = (
    Plan(64, 16, Tile(32, 32, 4, 3), Tile(32, 32, 4, 3)),
    Plan(2**31, 64, Tile(32, 32, 8, 2), Tile(64, 32, 8, 2)),
)
COMBINE_COLUMNS = 512
FETCHERS = tl.constexpr(128)
"""Programs that prefetch the shared experts' weights: about one on each SM, as more may not run before the wait."""
MOST_FETCHED = tl.constexpr(24 << 20)
"""Most bytes of them: what stays in the L2 cache until it is read."""


def plan_for(tokens: int, dtype: torch.dtype) -> Plan:
    """The tiles for a forward of ``tokens``."""
    plans = FP32_PLANS if dtype == torch.float32 else PLANS
    return next(plan for plan in plans if tokens <= plan.max_tokens)


def mix(
    x: Tensor, residual: Tensor, weights: Tensor, blocks: Blocks, gate_up: Tensor, down: Tensor
) -> Tensor:
    """``residual`` plus each token's weighted routed experts plus the shared ones: ``[N, hidden]`` as ``x``.

    Sums are fp32 throughout; only the gated activations are rounded to the dtype of ``x`` on the way.

    Args:
        x: ``[N, hidden]``, rows contiguous, in the dtype of the weights.
        residual: ``[N, hidden]``, rows contiguous.
        weights: ``[N, top_k]`` fp32 of the routed experts.
        blocks: The routed experts' pairs.
        gate_up: ``[experts, hidden, 2 * inner]`` in any memory order, the shared experts behind the routed ones.
        down: ``[experts, inner, hidden]``, likewise.
    """
    check_rows("x", x)
    check_rows("residual", residual)
    plan = plan_for(x.shape[0], x.dtype)
    gated = run_gate_up(x, gate_up, blocks, plan.gate_up)
    return combine(run_down(gated, down, blocks, plan.down), weights, residual)


def run_gate_up(x: Tensor, gate_up: Tensor, blocks: Blocks, tile: Tile) -> Tensor:
    """``silu(gate) * up`` of each pair: ``[N * slots, inner]`` in the dtype of ``x``."""
    (tokens, hidden), inner = x.shape, gate_up.shape[2] // 2
    gated = torch.empty(tokens * blocks.slots, inner, dtype=x.dtype, device=x.device)
    sizes = {"hidden": hidden, "inner": inner}
    _launch(_gate_up_kernel, (x, x.stride(0)), gate_up, gated, blocks, tile, tokens, sizes)
    return gated


def run_down(gated: Tensor, down: Tensor, blocks: Blocks, tile: Tile) -> Tensor:
    """Each pair's result, not weighted yet: ``[N, slots, hidden]`` fp32."""
    inner, hidden = down.shape[1:]
    tokens = gated.shape[0] // blocks.slots
    parts = torch.empty(tokens, blocks.slots, hidden, dtype=torch.float32, device=gated.device)
    sizes = {"hidden": hidden, "inner": inner}
    _launch(_down_kernel, (gated,), down, parts, blocks, tile, tokens, sizes)
    return parts


def combine(parts: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
    """``residual`` plus the weighted sum of ``parts`` ``[N, slots, hidden]`` in slot order, cast once."""
    tokens, slots, hidden = parts.shape
    out = torch.empty(tokens, hidden, dtype=residual.dtype, device=residual.device)
    columns = min(COMBINE_COLUMNS, power_of_two(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, columns))](
        parts,
        weights,
        residual,
        residual.stride(0),
        out,
        hidden=hidden,
        top_k=weights.shape[1],
        slots=slots,
        columns=columns,
        num_warps=4,
    )
    return out


def _launch(
    kernel: Any,
    source: tuple[Any, ...],
    weight: Tensor,
    out: Tensor,
    blocks: Blocks,
    tile: Tile,
    tokens: int,
    sizes: dict[str, int],
) -> None:
    """A product over every block and every tile of columns of ``out``.

    Args:
        source: The factor ``[rows, depth]``, then its row stride if the kernel takes one.
        out: ``[..., columns]``, contiguous.
        sizes: The kernel's names for depth and columns.
    """
    num_shared = blocks.slots - blocks.top_k
    assert weight.shape[0] == blocks.num_experts + num_shared, (weight.shape, blocks.num_experts, num_shared)
    columns = _fitting(tile.columns, out.shape[-1])
    # Blocks run fastest: several of one expert then read the same tile of its weights at the same time.
    num_blocks = num_shared * triton.cdiv(tokens, blocks.size) + blocks.entries.shape[0]
    kernel[num_blocks, triton.cdiv(out.shape[-1], columns)](
        *source,
        weight,
        *weight.stride(),
        blocks.entries,
        blocks.pairs,
        out,
        tokens,
        **sizes,
        experts=blocks.num_experts,
        top_k=blocks.top_k,
        slots=blocks.slots,
        block_rows=blocks.size,
        columns=columns,
        depth=_fitting(tile.depth, source[0].shape[-1]),
        precision=precision(source[0].dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _fitting(extent: int, size: int) -> int:
    """A tile's extent, cut down to a small matrix; a product takes at least 16."""
    return min(extent, max(16, power_of_two(size)))


@jit_function
def _fetch_shared(
    weight: tl.tensor,
    expert_stride: tl.tensor,
    size: tl.constexpr,
    experts: tl.constexpr,
    shared: tl.constexpr,
) -> None:
    """Prefetches the shared experts' weights, of ``size`` elements each: known before anyone has chosen."""
    width: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    whole: tl.constexpr = shared * size * width
    part: tl.constexpr = (whole if whole < MOST_FETCHED else MOST_FETCHED) // FETCHERS // width
    if part > 0:
        program = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
        place = weight + experts * expert_stride.to(tl.int64) + program * part
        prefetch(place, part * width, program < FETCHERS)


@jit_function
def _block(
    entries: tl.tensor,
    pairs: tl.tensor,
    tokens: tl.tensor,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    slots: tl.constexpr,
    block_rows: tl.constexpr,
) -> Any:
    """Expert, number of pairs (0: unused) and pair ids ``[block_rows]`` of this program's block.

    The shared experts' blocks come first and are known without the list: every token chooses them.
    """
    lane = tl.arange(0, block_rows)
    per_expert = tl.cdiv(tokens, block_rows)
    block = tl.program_id(0)
    routed = block - (slots - top_k) * per_expert
    entry = tl.load(entries + routed, mask=routed >= 0, other=0)
    listed = tl.load(pairs + routed * block_rows + lane, mask=(lane >= 0) & (routed >= 0), other=0)
    shared = block // per_expert
    first = block % per_expert * block_rows
    is_shared = routed < 0
    expert = tl.where(is_shared, experts + shared, entry >> 8)
    count = tl.where(is_shared, tl.minimum(tokens - first, block_rows), entry & 255)
    pair = tl.where(is_shared, (first + lane) * slots + top_k + shared, listed)
    return expert, count, tl.where(lane < count, pair, 0)


@jit_function
def _load(place: tl.tensor, inside: tl.tensor, even: tl.constexpr) -> Any:
    """A tile; without a mask where the sizes need none."""
    return tl.load(place) if even else tl.load(place, mask=inside, other=0.0)


@jit_varying("tokens")
def _gate_up_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    expert_stride: tl.tensor,
    in_stride: tl.tensor,
    out_stride: tl.tensor,
    entries: tl.tensor,
    pairs: tl.tensor,
    gated: tl.tensor,
    tokens: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    slots: tl.constexpr,
    block_rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    _fetch_shared(weight, expert_stride, 2 * hidden * inner, experts, slots - top_k)
    await_previous()
    expert, count, pair = _block(entries, pairs, tokens, experts, top_k, slots, block_rows)
    if count == 0:
        return
    even: tl.constexpr = hidden % depth == 0 and inner % columns == 0
    live = tl.arange(0, block_rows)[:, None] < count
    k = tl.arange(0, depth)
    column = (tl.program_id(1) * columns + tl.arange(0, columns))[None, :]
    source = x + (pair // slots).to(tl.int64)[:, None] * x_stride
    tile = weight + expert.to(tl.int64) * expert_stride + column * out_stride
    gate = tl.zeros([block_rows, columns], dtype=tl.float32)
    up = tl.zeros([block_rows, columns], dtype=tl.float32)
    for start in range(0, hidden, depth):
        here = start + k
        a = tl.load(source + here[None, :], mask=live & (here[None, :] < hidden), other=0.0)
        rows = tile + here[:, None] * in_stride
        inside = (here[:, None] < hidden) & (column < inner)
        gate = tl.dot(a, _load(rows, inside, even), gate, input_precision=precision)
        up = tl.dot(a, _load(rows + inner * out_stride, inside, even), up, input_precision=precision)
    value = gate / (1.0 + tl.exp(-gate)) * up
    place = gated + pair.to(tl.int64)[:, None] * inner + column
    tl.store(place, value.to(gated.dtype.element_ty), mask=live & (column < inner))


@jit_varying("tokens")
def _down_kernel(
    gated: tl.tensor,
    weight: tl.tensor,
    expert_stride: tl.tensor,
    in_stride: tl.tensor,
    out_stride: tl.tensor,
    entries: tl.tensor,
    pairs: tl.tensor,
    parts: tl.tensor,
    tokens: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    slots: tl.constexpr,
    block_rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    _fetch_shared(weight, expert_stride, hidden * inner, experts, slots - top_k)
    await_previous()
    expert, count, pair = _block(entries, pairs, tokens, experts, top_k, slots, block_rows)
    if count == 0:
        return
    even: tl.constexpr = inner % depth == 0 and hidden % columns == 0
    live = tl.arange(0, block_rows)[:, None] < count
    k = tl.arange(0, depth)
    column = (tl.program_id(1) * columns + tl.arange(0, columns))[None, :]
    source = gated + pair.to(tl.int64)[:, None] * inner
    tile = weight + expert.to(tl.int64) * expert_stride + column * out_stride
    total = tl.zeros([block_rows, columns], dtype=tl.float32)
    for start in range(0, inner, depth):
        here = start + k
        a = tl.load(source + here[None, :], mask=live & (here[None, :] < inner), other=0.0)
        inside = (here[:, None] < inner) & (column < hidden)
        rows = _load(tile + here[:, None] * in_stride, inside, even)
        total = tl.dot(a, rows, total, input_precision=precision)
    tl.store(parts + pair.to(tl.int64)[:, None] * hidden + column, total, mask=live & (column < hidden))


@jit
def _combine_kernel(
    parts: tl.tensor,
    weights: tl.tensor,
    residual: tl.tensor,
    residual_stride: tl.tensor,
    out: tl.tensor,
    hidden: tl.constexpr,
    top_k: tl.constexpr,
    slots: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    await_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < hidden
    total = tl.zeros([columns], dtype=tl.float32)
    for slot in tl.static_range(slots):
        part = tl.load(parts + (token * slots + slot) * hidden + column, mask=inside, other=0.0)
        if slot < top_k:
            part *= tl.load(weights + token * top_k + slot)
        total += part
    total += tl.load(residual + token * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
