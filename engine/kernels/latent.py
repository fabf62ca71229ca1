"""What lies between a layer's down-projection and its attention, as one kernel.

It norms the compressed KV, rotates the shared rope key and every head's rope query, stores the latent rows in the
pool and the rotated queries where attention reads them. For few rows, further programs of the same launch make the
absorbed part of the queries, which depends on none of that.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.heads import MAX_ROWS, NARROW, head_product, product_options
from engine.kernels.jit import (
    await_previous,
    check_rows,
    jit_function,
    jit_varying,
    power_of_two,
    prefetch,
)
from engine.kernels.norm import normed

_HEADS = 8
"""Heads that one program rotates: few, so that one token already occupies several programs."""


@jit_function
def _finite(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Rounded to ``dtype``; what is not finite then is zero. (A comparison with NaN is false.)"""
    rounded = values.to(dtype).to(tl.float32)
    return tl.where(tl.abs(rounded) < float("inf"), rounded, 0.0)


@jit_function
def _store_rotated(
    source: tl.tensor, angles: tl.tensor, place: tl.tensor, dtype: tl.constexpr, rope: tl.constexpr
) -> None:
    """A key ``[rope]`` at ``source``, turned and made finite in ``dtype``, to ``place``."""
    half: tl.constexpr = rope // 2
    pairs = tl.arange(0, triton.next_power_of_2(half))
    inside = pairs < half
    first = tl.load(source + pairs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + pairs, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(angles + pairs, mask=inside, other=0.0)
    sin = tl.load(angles + rope + half + pairs, mask=inside, other=0.0)
    stored = place.dtype.element_ty
    tl.store(place + pairs, _finite(first * cos - second * sin, dtype).to(stored), mask=inside)
    tl.store(place + half + pairs, _finite(second * cos + first * sin, dtype).to(stored), mask=inside)


@jit_function
def _store_normed(
    source: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    place: tl.tensor,
    dtype: tl.constexpr,
    rank: tl.constexpr,
) -> None:
    """Compressed KV ``[rank]`` at ``source``, normed and made finite in ``dtype``, to ``place``."""
    columns = tl.arange(0, triton.next_power_of_2(rank))
    inside = columns < rank
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    latent = _finite(normed(values, scale, eps, rank), dtype)
    tl.store(place + columns, latent.to(place.dtype.element_ty), mask=inside)


@jit_function
def _store_queries(
    source: tl.tensor,
    angles: tl.tensor,
    place: tl.tensor,
    head: tl.tensor,
    heads: tl.constexpr,
    rope: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """One token's queries of ``head`` ``[block]``, turned, to rows of ``width`` at ``place``."""
    half: tl.constexpr = rope // 2
    pairs = tl.arange(0, triton.next_power_of_2(half))
    paired = pairs < half
    cos = tl.load(angles + pairs, mask=paired, other=0.0)[None, :]
    sin = tl.load(angles + rope + half + pairs, mask=paired, other=0.0)[None, :]
    inside = (head < heads)[:, None] & paired[None, :]
    source += head[:, None] * rope + pairs[None, :]
    place += head[:, None] * width + pairs[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    dtype = place.dtype.element_ty
    tl.store(place, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(place + half, (second * cos + first * sin).to(dtype), mask=inside)


@jit_varying("slots", "rows")
def _write_latent(
    q_rope: tl.tensor,
    q_stride: tl.tensor,
    k_rope: tl.tensor,
    k_stride: tl.tensor,
    compressed: tl.tensor,
    compressed_stride: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    pool: tl.tensor,
    slots: tl.tensor,
    query: tl.tensor,
    q_nope: tl.tensor,
    nope_stride: tl.tensor,
    w_uk: tl.tensor,
    rows: tl.tensor,
    heads: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    nope: tl.constexpr,
    absorbs: tl.constexpr,
    head_block: tl.constexpr,
    row_block: tl.constexpr,
    output_block: tl.constexpr,
    input_block: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    """Part 0 of a token is its latent row, each further part ``head_block`` heads' queries; then come the
    absorbed products' tiles, head by head."""
    parts: tl.constexpr = 1 + (heads + head_block - 1) // head_block
    width: tl.constexpr = rank + rope
    tiles: tl.constexpr = (rank + output_block - 1) // output_block
    tile = tl.program_id(0) - rows * parts
    if absorbs:
        share: tl.constexpr = nope * rank // tiles
        size: tl.constexpr = share * (w_uk.dtype.element_ty.primitive_bitwidth // 8)
        prefetch(w_uk + tl.maximum(tile, 0).to(tl.int64) * share, size, tile >= 0)
    # FlashMLA's kernel comes next: it may start early, and fetches queries before it waits (seen on an H200)
    await_previous(trigger=False)
    token = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    if token < rows:
        angles = table + tl.load(positions + token) * (2 * rope)
        if part == 0:
            row = pool + tl.load(slots + token) * width
            dtype: tl.constexpr = compressed.dtype.element_ty
            _store_normed(compressed + token * compressed_stride, weight, eps, row, dtype, rank)
            _store_rotated(k_rope + token * k_stride, angles, row + rank, dtype, rope)
        else:
            head = (part - 1) * head_block + tl.arange(0, head_block)
            place = query + token * heads * width + rank
            _store_queries(q_rope + token * q_stride, angles, place, head, heads, rope, width)
    elif absorbs:
        one = tile // tiles
        head_product(
            q_nope + one * nope,
            nope_stride,
            w_uk + one.to(tl.int64) * (nope * rank),
            query + one * width,
            heads * width,
            rows,
            (tile % tiles) * output_block,
            nope,
            rank,
            row_block,
            output_block,
            input_block,
            precision,
        )


def write_latent(
    q_nope: Tensor,
    q_rope: Tensor,
    k_rope: Tensor,
    compressed: Tensor,
    *,
    weight: Tensor,
    eps: float,
    table: Tensor,
    positions: Tensor,
    pool_rows: Tensor,
    slots: Tensor,
    query: Tensor,
    w_uk: Tensor,
) -> bool:
    """Store each token's latent row in the pool and its queries in ``query``.

    A latent row is the normed compressed KV, then the rotated key. As ``LatentPool.write`` does, non-finite values
    are stored as zero.

    Args:
        q_nope: ``[N, H * nope]``, head by head. This and the next three may be slices: rows at any distance.
        q_rope: ``[N, H * rope]``.
        k_rope: ``[N, rope]``.
        compressed: ``[N, kv_lora_rank]``, before its norm.
        weight: ``[kv_lora_rank]``, of the norm. eps: Likewise.
        table: ``[positions, 2 * rope]`` fp32, see ``RotaryTable``.
        positions: ``[N]`` int64 rows of ``table``.
        pool_rows: ``[R, kv_lora_rank + rope]``, contiguous. slots: ``[N]`` int64 rows of it to write.
        query: ``[N, H, kv_lora_rank + rope]``, contiguous. Its last ``rope`` columns are written, the others only
            for at most ``MAX_ROWS`` tokens.
        w_uk: ``[H, nope, kv_lora_rank]``, contiguous.

    Returns:
        Whether the absorbed columns are written too; if not, ``q_nope @ w_uk`` belongs there.
    """
    for name, piece in (("q_nope", q_nope), ("q_rope", q_rope), ("k_rope", k_rope), ("KV", compressed)):
        check_rows(name, piece)
    assert query.is_contiguous() and pool_rows.is_contiguous() and table.is_contiguous()
    assert positions.is_contiguous() and slots.is_contiguous() and w_uk.is_contiguous()
    rows, heads = query.shape[:2]
    nope, rank = w_uk.shape[1:]
    head_block = min(_HEADS, power_of_two(heads))
    programs = rows * (1 + triton.cdiv(heads, head_block))
    absorbs = rows <= MAX_ROWS
    if absorbs:
        programs += heads * triton.cdiv(rank, NARROW.outputs)
    _write_latent[(programs,)](
        q_rope,
        q_rope.stride(0),
        k_rope,
        k_rope.stride(0),
        compressed,
        compressed.stride(0),
        weight,
        eps,
        table,
        positions,
        pool_rows,
        slots,
        query,
        q_nope,
        q_nope.stride(0),
        w_uk,
        rows,
        heads=heads,
        rank=rank,
        rope=k_rope.shape[1],
        nope=nope,
        absorbs=absorbs,
        head_block=head_block,
        **product_options(nope, query.dtype),
    )
    return absorbs
