"""The experts' work as a list of blocks, built on the device: pairs (token, slot) sorted by expert.

The order is that of the tokens and needs no atomics; it would not matter, for each pair has its own result row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.jit import await_previous, jit_function, jit_varying, power_of_two

PAIR_CHUNK = 1024
"""Pairs that the listing kernel looks at in one go."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs (token, slot) of the routed experts, by expert, in blocks of ``size``.

    ``entries`` ``[bound]`` int32: ``expert * 256 + pairs in the block``, 0 for an unused block behind the used
    ones. ``pairs`` ``[bound, size]`` int32: ``token * slots + slot`` of each, garbage past the block's number.
    """

    size: int
    num_experts: int
    """Routed experts."""
    top_k: int
    slots: int
    """Results of one token: ``top_k`` routed ones, then the shared experts'."""
    entries: Tensor
    pairs: Tensor


def most_blocks(rows: int, num_experts: int, top_k: int, block_rows: int) -> int:
    """Most blocks that ``rows`` tokens can need, whatever they choose: the length of the list."""
    pairs = rows * top_k
    return min(pairs, min(num_experts, pairs) + pairs // block_rows)


def empty_blocks(
    rows: int, *, num_experts: int, top_k: int, slots: int, block_rows: int, device: torch.device
) -> Blocks:
    """A list with room for whatever ``rows`` tokens choose; ``block_rows`` at most 128."""
    assert 1 <= block_rows <= 128 and slots >= top_k, (block_rows, slots, top_k)
    bound = most_blocks(rows, num_experts, top_k, block_rows)
    entries = torch.empty(bound, dtype=torch.int32, device=device)
    pairs = torch.empty(bound, block_rows, dtype=torch.int32, device=device)
    return Blocks(block_rows, num_experts, top_k, slots, entries, pairs)


def list_blocks(chosen: Tensor, blocks: Blocks) -> None:
    """Fill ``blocks`` from the experts ``chosen`` ``[N, top_k]``, contiguous, any number of rows."""
    _list_kernel[(blocks.num_experts,)](
        chosen,
        blocks.entries,
        blocks.pairs,
        chosen.numel(),
        blocks.entries.shape[0],
        experts=blocks.num_experts,
        expert_block=power_of_two(blocks.num_experts),
        top_k=blocks.top_k,
        slots=blocks.slots,
        block_rows=blocks.size,
        chunk=PAIR_CHUNK,
        num_warps=4,
    )


@jit_function
def write_blocks(
    slot_of: tl.tensor,
    row: tl.tensor,
    entries: tl.tensor,
    pairs: tl.tensor,
    bound: tl.tensor,
    tile_rows: tl.constexpr,
    expert_block: tl.constexpr,
    most: tl.constexpr,
    slots: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    """Lists ``slot_of`` ``[R, E]``: 1 + the slot in which the row chose the expert, 0 where it did not.

    For a kernel of one program, which has all rows. ``most``: a power of two that ``bound`` never exceeds.
    """
    hit = (slot_of > 0).to(tl.int32)
    count = tl.sum(hit, axis=0)
    blocks = (count + block_rows - 1) // block_rows
    first = tl.cumsum(blocks, axis=0) - blocks
    place = first[None, :] * block_rows + tl.cumsum(hit, axis=0) - hit
    tl.store(pairs + place, row * slots + slot_of - 1, mask=slot_of > 0)
    expert = tl.arange(0, expert_block)
    for block in tl.static_range((tile_rows + block_rows - 1) // block_rows):
        size = tl.minimum(count - block * block_rows, block_rows)
        tl.store(entries + first + block, expert * 256 + size, mask=size > 0)
    place = tl.arange(0, most)
    tl.store(entries + place, 0, mask=(place >= tl.sum(blocks, axis=0)) & (place < bound))


@jit_varying("num_pairs", "bound")
def _list_kernel(
    chosen: tl.tensor,
    entries: tl.tensor,
    pairs: tl.tensor,
    num_pairs: tl.tensor,
    bound: tl.tensor,
    experts: tl.constexpr,
    expert_block: tl.constexpr,
    top_k: tl.constexpr,
    slots: tl.constexpr,
    block_rows: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """One program an expert; each counts all experts, so none waits for another."""
    await_previous()
    expert = tl.program_id(0)
    every = tl.arange(0, expert_block)
    here = tl.arange(0, chunk)
    counts = tl.zeros([expert_block], dtype=tl.int32)
    start = 0
    while start < num_pairs:
        inside = start + here < num_pairs
        choice = tl.load(chosen + start + here, mask=inside, other=0).to(tl.int32)
        counts += tl.histogram(choice, expert_block, mask=inside)
        start += chunk
    blocks = (counts + block_rows - 1) // block_rows
    first = tl.sum(tl.where(every < expert, blocks, 0), axis=0)
    count = tl.sum(tl.where(every == expert, counts, 0), axis=0)
    seen = 0
    start = 0
    while start < num_pairs:
        flat = start + here
        hit = tl.load(chosen + flat, mask=flat < num_pairs, other=-1) == expert
        place = first * block_rows + seen + tl.cumsum(hit.to(tl.int32), axis=0) - 1
        tl.store(pairs + place, flat // top_k * slots + flat % top_k, mask=hit)
        seen += tl.sum(hit.to(tl.int32), axis=0)
        start += chunk
    start = 0
    while start * block_rows < count:
        size = tl.minimum(count - (start + here) * block_rows, block_rows)
        tl.store(entries + first + start + here, expert * 256 + size, mask=size > 0)
        start += chunk
    if expert == experts - 1:
        start = tl.sum(blocks, axis=0)
        while start < bound:
            tl.store(entries + start + every, 0, mask=start + every < bound)
            start += expert_block
