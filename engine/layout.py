"""Query layouts: values that only one function each can make.

A captured forward is ``[rows, stride]``: every row owns ``stride`` query tokens, accepted or not. The historical
fault (query offsets captured as ``[0, S, 2S, ...]`` and replayed as ``cumsum(accept_length + 1)``) cannot be
written here: a ``UniformLayout`` is a pure function of ``(rows, stride)``, is made only by ``uniform_layout`` and
carries no accept length. Ragged forwards (eager prefill) use ``PackedLayout``, another type, which nothing that
captures or replays accepts.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from engine.guard import Flag

_MINT: Final = object()


@dataclass(frozen=True, slots=True, eq=False)
class UniformLayout:
    """``rows`` requests of ``stride`` query tokens each. Make it with ``uniform_layout``.

    Attributes:
        cu_seqlens_q: ``[rows + 1]`` int32, ``[0, S, 2S, ...]``.
        seq_lens_q: ``[rows]`` int32, each ``stride``.
        offsets: ``[stride]`` int64, ``0 .. stride - 1``: a token's place in its row.
        row_starts: ``[rows]`` int64, flat index of each row's first token.
    """

    rows: int
    stride: int
    cu_seqlens_q: Tensor
    seq_lens_q: Tensor
    offsets: Tensor
    row_starts: Tensor
    mint: InitVar[object]

    def __post_init__(self, mint: object) -> None:
        if mint is not _MINT:
            raise TypeError("a UniformLayout is made by uniform_layout() and by nothing else")

    @property
    def max_seq_len_q(self) -> int:
        return self.stride

    @property
    def sum_seq_lens_q(self) -> int:
        return self.rows * self.stride


@cache
def uniform_layout(rows: int, stride: int, device: torch.device) -> UniformLayout:
    """The layout of a ``[rows, stride]`` forward; the same object for the same arguments."""
    assert rows >= 1 and stride >= 1, f"a layout needs rows and stride >= 1, got {rows} and {stride}"
    starts = torch.arange(rows + 1, dtype=torch.int64, device=device) * stride
    return UniformLayout(
        rows=rows,
        stride=stride,
        cu_seqlens_q=starts.to(torch.int32),
        seq_lens_q=torch.full((rows,), stride, dtype=torch.int32, device=device),
        offsets=torch.arange(stride, dtype=torch.int64, device=device),
        row_starts=starts[:-1].clone(),
        mint=_MINT,
    )


def layout_verdict(layout: UniformLayout, reads: frozenset[str]) -> Tensor | None:
    """``[]`` int64 flags: whether the query offsets still are what ``uniform_layout`` made, by value.

    Only for kernels that read them, as ``AttentionBackend.reads`` says: for the others there is no such input.
    """
    if "cu_seqlens_q" not in reads:
        return None
    offsets = layout.cu_seqlens_q
    expected = torch.arange(layout.rows + 1, dtype=offsets.dtype, device=offsets.device) * layout.stride
    return (offsets != expected).any() * int(Flag.CU_SEQLENS_Q)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Ragged query tokens of an eager prefill, request after request. Make it with ``packed_layout``.

    Attributes:
        query_lens: Query tokens of each request, >= 1.
        context_lens: Positions already written before those tokens, >= 0.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    mint: InitVar[object]

    def __post_init__(self, mint: object) -> None:
        if mint is not _MINT:
            raise TypeError("a PackedLayout is made by packed_layout() and by nothing else")

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


def packed_layout(query_lens: list[int], context_lens: list[int]) -> PackedLayout:
    """The layout of a ragged forward over ``query_lens[i]`` tokens behind ``context_lens[i]`` written ones."""
    assert len(query_lens) == len(context_lens) and query_lens, (
        "a packed layout needs one context per request"
    )
    assert min(query_lens) >= 1 and min(context_lens) >= 0, f"impossible lengths {query_lens}, {context_lens}"
    return PackedLayout(tuple(query_lens), tuple(context_lens), mint=_MINT)
