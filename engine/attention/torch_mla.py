"""Absorbed MLA attention in plain torch operators: any device, any page size; the oracle of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionSpec
from engine.layout import PackedLayout, UniformLayout

_UNIT = 16
"""Positions gathered at once: a part of a page, so that little is gathered past the longest row."""
_MAX_SCORES = 1 << 25
"""Most attention scores of a prefill held at once (float32: 128 MiB)."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of one uniform phase share."""

    unit_ids: Tensor  # [rows * units] int32
    mask: Tensor  # [rows, stride * heads, units * unit] float32: 0 where visible, -inf elsewhere


class TorchMla:
    """``AttentionBackend`` of plain operators."""

    name = "torch_mla"

    def __init__(self, spec: AttentionSpec) -> None:
        self._heads = spec.num_heads
        self._rank = spec.kv_lora_rank
        self._scale = spec.softmax_scale
        self._page_size = spec.page_size
        self._unit = math.gcd(spec.page_size, _UNIT)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        return None

    def prepare(
        self, layout: UniformLayout, block_table: Tensor, seq_lens: Tensor, max_seq_len: int
    ) -> _Plan:
        device, per_page = block_table.device, self._page_size // self._unit
        units = -(-max_seq_len // self._unit)
        parts = torch.arange(per_page, dtype=torch.int32, device=device)
        unit_ids = (block_table[:, :, None] * per_page + parts).flatten(1)[:, :units]  # [B, units]
        keys = torch.arange(unit_ids.shape[1] * self._unit, device=device)  # [L]
        last = (seq_lens - layout.stride)[:, None] + layout.offsets  # [B, S]: last visible key of each token
        hidden = keys > last[:, :, None]  # [B, S, L]
        mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
        mask = mask.repeat_interleave(self._heads, dim=1)  # [B, S * H, L]
        return _Plan(unit_ids=unit_ids.flatten(), mask=mask)

    def attend(self, query: Tensor, pages: Tensor, plan: _Plan) -> Tensor:
        rows, stride, heads, dim = query.shape
        gathered = pages.view(-1, self._unit * dim).index_select(0, plan.unit_ids)
        latent = gathered.view(rows, -1, dim).float()  # [B, L, D]
        flat_query = query.reshape(rows, stride * heads, dim).float()
        scores = torch.baddbmm(plan.mask, flat_query, latent.transpose(1, 2), alpha=self._scale)
        out = torch.bmm(scores.softmax(dim=-1), latent[:, :, : self._rank])  # [B, S * H, C]
        return out.view(rows, stride, heads, self._rank).to(query.dtype)

    def attend_packed(
        self, query: Tensor, pages: Tensor, layout: PackedLayout, block_table: Tensor
    ) -> Tensor:
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
