"""Absorbed MLA attention in plain torch operators: any device, any page size; the oracle of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.base import AttentionSpec
from engine.layout import PackedLayout, UniformLayout

_UNIT = 16
"""Positions gathered at once: a part of a page, so that little is gathered past the longest row."""
_MAX_SCORES = 1 << 25
"""Most attention scores of a prefill held at once (float32: 128 MiB)."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of similar length, which attend together over as many keys as the longest of them has."""

    rows: Tensor | None  # [R] int64; None: all rows
    unit_ids: Tensor  # [R * units] int32
    mask: Tensor  # [R, stride * heads, units * unit] float32: 0 where visible, -inf elsewhere


class TorchMla:
    """``AttentionBackend`` of plain operators."""

    name = "torch_mla"
    reads: ClassVar[frozenset[str]] = frozenset({"block_table", "seq_lens"})
    gathers: ClassVar[bool] = True

    def __init__(self, spec: AttentionSpec) -> None:
        self._heads = spec.num_heads
        self._rank = spec.kv_lora_rank
        self._scale = spec.softmax_scale
        self._page_size = spec.page_size
        self._unit = math.gcd(spec.page_size, _UNIT)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        return None

    def short_length(self, rows: int, stride: int) -> None:
        return None

    def prepare(
        self, layout: UniformLayout, block_table: Tensor, seq_lens: Tensor, max_seq_lens: tuple[int, ...]
    ) -> list[_Group]:
        device, per_page = block_table.device, self._page_size // self._unit
        parts = torch.arange(per_page, dtype=torch.int32, device=device)
        unit_ids = (block_table[:, :, None] * per_page + parts).flatten(1)  # [B, units]
        last = (seq_lens - layout.stride)[:, None] + layout.offsets  # [B, S]: last visible key of each token
        groups = []
        for rows, units in self._group([-(-length // self._unit) for length in max_seq_lens]):
            index = None if rows is None else torch.tensor(rows, device=device)
            ids = unit_ids if index is None else unit_ids.index_select(0, index)
            visible = last if index is None else last.index_select(0, index)
            ids = ids[:, :units]
            keys = torch.arange(ids.shape[1] * self._unit, device=device)  # [L]
            hidden = keys > visible[:, :, None]  # [R, S, L]
            mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
            mask = mask.repeat_interleave(self._heads, dim=1)  # [R, S * H, L]
            groups.append(_Group(index, ids.flatten(), mask))
        return groups

    @staticmethod
    def _group(units: list[int]) -> list[tuple[list[int] | None, int]]:
        """Rows, and the keys that they attend over: by powers of two, if that saves a third; else all as one."""
        buckets: dict[int, list[int]] = {}
        for row, count in enumerate(units):
            buckets.setdefault((count - 1).bit_length(), []).append(row)
        groups = [(rows, max(units[row] for row in rows)) for _, rows in sorted(buckets.items())]
        longest = max(units)
        if 3 * sum(len(rows) * count for rows, count in groups) > 2 * len(units) * longest:
            return [(None, longest)]
        return [*groups]

    def attend(self, query: Tensor, pages: Tensor, plan: list[_Group]) -> Tensor:
        if plan[0].rows is None:
            return self._attend_group(query, pages, plan[0])
        out = query.new_empty((*query.shape[:3], self._rank))
        for group in plan:
            assert group.rows is not None, "either all rows are grouped or none is"
            out.index_copy_(
                0, group.rows, self._attend_group(query.index_select(0, group.rows), pages, group)
            )
        return out

    def _attend_group(self, query: Tensor, pages: Tensor, group: _Group) -> Tensor:
        rows, stride, heads, dim = query.shape
        gathered = pages.view(-1, self._unit * dim).index_select(0, group.unit_ids)
        latent = gathered.view(rows, -1, dim).float()  # [R, L, D]
        flat_query = query.reshape(rows, stride * heads, dim).float()
        scores = torch.baddbmm(group.mask, flat_query, latent.transpose(1, 2), alpha=self._scale)
        out = torch.bmm(scores.softmax(dim=-1), latent[:, :, : self._rank])  # [R, S * H, C]
        return out.view(rows, stride, heads, self._rank).to(query.dtype)

    def prepare_packed(self, layout: PackedLayout, block_table: Tensor) -> tuple[PackedLayout, Tensor]:
        return layout, block_table

    def attend_packed(self, query: Tensor, pages: Tensor, plan: tuple[PackedLayout, Tensor]) -> Tensor:
        layout, block_table = plan
        out = query.new_empty((query.shape[0], query.shape[1], self._rank))
        start = 0
        for row, (length, context) in enumerate(zip(layout.query_lens, layout.context_lens, strict=True)):
            total = context + length
            page_ids = block_table[row, : -(-total // self._page_size)]
            latent = pages[page_ids].flatten(0, 1)[:total].float()  # [L, D]
            end = start + length
            self._attend_one(query[start:end], latent, context, out[start:end])
            start = end
        return out

    def _attend_one(self, query: Tensor, latent: Tensor, context: int, out: Tensor) -> None:
        """One request's tokens, in blocks whose scores fit in ``_MAX_SCORES``."""
        length, heads, _ = query.shape
        keys = torch.arange(latent.shape[0], device=latent.device)
        block = max(1, _MAX_SCORES // (heads * latent.shape[0]))
        for first in range(0, length, block):
            part = query[first : first + block].float()  # [T, H, D]
            visible = context + first + part.shape[0]
            last = torch.arange(context + first, visible, device=latent.device)
            scores = torch.matmul(part, latent[:visible].T) * self._scale  # [T, H, L]
            scores.masked_fill_(keys[:visible] > last[:, None, None], float("-inf"))
            weights = scores.softmax(dim=-1)
            out[first : first + block] = torch.matmul(weights, latent[:visible, : self._rank]).to(out.dtype)
