"""Absorbed MLA of few requests over the paged latent cache: their keys are split over programs, then combined.

A batch that leaves most of a GPU idle is bound by the latency of one program. So the query tokens of a request, and
its keys, are spread over as many programs as there are multiprocessors, each small; there is no schedule to be
made, as each finds its part from the request's length.
"""

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.jit import await_previous, jit_varying, precision

MAX_HEADS: Final = 16
"""Query heads of the one tile that a program multiplies its keys by."""
PROGRAMS: Final = 128
"""Programs over which a batch is spread, where it has keys enough: about one for each multiprocessor."""
MAX_SPLITS: Final = 32
KEYS: Final = 64
"""Keys that are read at once."""
_TOGETHER: Final = 16
"""Parts that are combined in one go."""
_LOG2_E: Final = 1.4426950408889634


@jit_varying("table_stride")
def _attend_part(
    query: tl.tensor,
    pages: tl.tensor,
    block_table: tl.tensor,
    table_stride: tl.tensor,
    seq_lens: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    stride: tl.constexpr,
    heads: tl.constexpr,
    head_block: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    page_size: tl.constexpr,
    keys: tl.constexpr,
    splits: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    """A query token's attention over a part of its keys, and the part's weight: log2 of its sum of exponentials."""
    await_previous()
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token // stride
    ahead = stride - 1 - (token % stride).to(tl.int32)
    length = tl.load(seq_lens + row) - ahead  # keys that the token sees
    blocks = tl.cdiv(length, keys)
    each = tl.cdiv(blocks, splits)
    start, end = split * each, tl.minimum(split * each + each, blocks)
    width: tl.constexpr = rank + rope
    head, column = tl.arange(0, head_block), tl.arange(0, rank)
    turned_column = rank + tl.arange(0, rope)
    live = (head < heads)[:, None]
    at = query + (token * heads + head)[:, None] * width
    plain = tl.load(at + column[None, :], mask=live, other=0.0)
    turned = tl.load(at + turned_column[None, :], mask=live, other=0.0)
    most = tl.full([head_block], float("-inf"), tl.float32)
    total = tl.zeros([head_block], dtype=tl.float32)
    sums = tl.zeros([head_block, rank], dtype=tl.float32)
    for block in range(start, end):
        position = block * keys + tl.arange(0, keys)
        page = tl.load(block_table + row * table_stride + block * keys // page_size).to(tl.int64)
        place = pages + (page * page_size + position % page_size)[:, None] * width
        seen = position < length
        latent = tl.load(place + column[None, :], mask=seen[:, None], other=0.0)
        key = tl.load(place + turned_column[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(plain, tl.trans(latent), input_precision=precision)
        scores = tl.dot(turned, tl.trans(key), scores, input_precision=precision) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(highest > float("-inf"), highest, 0.0)
        share, fade = tl.exp2(scores - base[:, None]), tl.exp2(most - base)
        total = total * fade + tl.sum(share, axis=1)
        sums = tl.dot(share.to(latent.dtype), latent, sums * fade[:, None], input_precision=precision)
        most = highest
    own = (token * splits + split) * head_block + head
    holds = total != 0.0  # so of a NaN, which is told
    tl.store(weights + own, tl.where(holds, most + tl.log2(total), float("-inf")))
    if start < end:
        sums = sums / tl.where(holds, total, 1.0)[:, None]
        tl.store(parts + own[:, None] * rank + column[None, :], sums, mask=live)


@jit_varying()
def _combine_parts(
    parts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    heads: tl.constexpr,
    head_block: tl.constexpr,
    rank: tl.constexpr,
    splits: tl.constexpr,
    together: tl.constexpr,
) -> None:
    """One head of one query token: its parts by their weights."""
    await_previous()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = token * splits * head_block + head
    column = tl.arange(0, rank)
    split = tl.arange(0, splits)
    weight = tl.load(weights + own + split * head_block)
    most = tl.max(weight, axis=0)
    used = tl.max(tl.where(weight != float("-inf"), split + 1, 0), axis=0)
    total = tl.sum(tl.where(weight != float("-inf"), tl.exp2(weight - most), 0.0), axis=0)
    sums = tl.zeros([rank], dtype=tl.float32)
    start = 0
    while start < used:
        here = start + tl.arange(0, together)
        part_weight = tl.load(weights + own + here * head_block, mask=here < used, other=float("-inf"))
        holds = part_weight != float("-inf")
        share = tl.where(holds, tl.exp2(part_weight - most), 0.0)
        place = parts + (own + here * head_block)[:, None] * rank + column[None, :]
        sums += tl.sum(tl.load(place, mask=holds[:, None], other=0.0) * share[:, None], axis=0)
        start += together
    tl.store(out + (token * heads + head) * rank + column, (sums / total).to(out.dtype.element_ty))


def num_splits(tokens: int) -> int:
    """Parts of the keys of each of ``tokens`` query tokens: a power of two."""
    each = max(1, PROGRAMS // tokens)
    return min(MAX_SPLITS, 1 << (each.bit_length() - 1))


def split_mla(
    query: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor, rank: int, softmax_scale: float
) -> Tensor:
    """Attention ``[B, S, H, rank]`` with fp32 sums; causal within the last S positions of each row.

    What no query may see is not read, so nothing that is not finite there can matter.

    Args:
        query: ``[B, S, H, rank + rope]``, H <= 16; rank and rope are powers of two, at least 16.
        pages: ``[num_pages, page_size, rank + rope]``, contiguous; the page size is a multiple of 64.
        block_table: ``[B, width]`` int32, rows at any distance.
        seq_lens: ``[B]`` int32, each at least S.
    """
    rows, stride, heads, width = query.shape
    tokens, page_size = rows * stride, pages.shape[1]
    assert heads <= MAX_HEADS and page_size % KEYS == 0 and pages.is_contiguous()
    splits, new = num_splits(tokens), query.new_empty
    parts = new((tokens, splits, MAX_HEADS, rank), dtype=torch.float32)
    weights = new((tokens, splits, MAX_HEADS), dtype=torch.float32)
    out = new((rows, stride, heads, rank))
    _attend_part[(tokens, splits)](
        query.contiguous(), pages, block_table, block_table.stride(0), seq_lens, parts, weights,
        softmax_scale * _LOG2_E, stride=stride, heads=heads, head_block=MAX_HEADS, rank=rank, rope=width - rank,
        page_size=page_size, keys=KEYS, splits=splits, precision=precision(query.dtype),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _combine_parts[(tokens, heads)](
        parts, weights, out, heads=heads, head_block=MAX_HEADS, rank=rank, splits=splits,
        together=min(splits, _TOGETHER), num_warps=4,
    )  # fmt: skip
    return out
