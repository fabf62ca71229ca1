"""A backend that reads query offsets, as flashinfer's varlen kernels do, and the historical fault built on it.

For tests only. The shipped kernels take no query offsets at uniform stride.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.attention import AttentionSpec, UniformAttention
from engine.attention.torch_mla import TorchMla
from engine.layout import UniformLayout, uniform_layout
from engine.spec import Accepted, Places, SpeculativeStep


class TorchVarlen(TorchMla):
    """Absorbed MLA whose queries belong to requests by ``cu_seqlens_q``, read on the device.

    Query ``t`` is number ``j`` of the ``n`` queries of the request that owns it, and sees the keys up to
    ``seq_len - n + j``. What no request owns is never written: here a NaN.
    """

    name = "torch_varlen"
    reads: ClassVar[frozenset[str]] = frozenset({"block_table", "seq_lens", "cu_seqlens_q"})
    gathers: ClassVar[bool] = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._dim = spec.latent_dim
        self._page = spec.page_size

    def short_length(self, rows: int, stride: int) -> None:
        return None

    def prepare(
        self, layout: UniformLayout, block_table: Tensor, seq_lens: Tensor, max_seq_lens: tuple[int, ...]
    ) -> Any:
        return layout.cu_seqlens_q, block_table, seq_lens

    def attend(self, query: Tensor, pages: Tensor, plan: Any) -> Tensor:
        offsets, table, seq_lens = plan
        rows, stride, heads, _ = query.shape
        flat = torch.arange(rows * stride, dtype=torch.int32, device=query.device)
        owner = torch.searchsorted(offsets[1:].contiguous(), flat, right=True)
        owned = owner < rows
        owner = owner.clamp_max(rows - 1)
        starts, ends = offsets[:-1][owner], offsets[1:][owner]
        last = seq_lens[owner] - (ends - starts) + (flat - starts)  # last visible key of each query
        latent = pages[table.long()].flatten(1, 2)[owner].float()  # [B * S, L, D]
        keys = torch.arange(latent.shape[1], device=query.device)
        scores = torch.einsum("thd,tld->thl", query.flatten(0, 1).float(), latent) * self._scale
        scores = scores.masked_fill((keys > last[:, None])[:, None], float("-inf"))
        out = torch.einsum("thl,tlc->thc", scores.softmax(dim=-1), latent[:, :, : self._rank])
        out = out.masked_fill(~owned[:, None, None], float("nan"))
        return out.view(rows, stride, heads, self._rank).to(query.dtype)


class HistoricalFault(SpeculativeStep):
    """The draft-extend of the fault: its replay writes packed offsets, from accept lengths, into the bound buffer.

    Attributes:
        packed: ``[]`` bool on the device: False while capturing, so that capture and replay disagree.
        extended: ``[max rows, H]``: the draft's state at each row's last accepted token.
    """

    contract_on = True

    def _check_layout(self, layout: UniformLayout) -> Tensor | None:
        return super()._check_layout(layout) if self.contract_on else None

    def arm(self, max_rows: int, hidden_size: int) -> None:
        self.packed = torch.zeros((), dtype=torch.bool)
        self.extended = torch.zeros(max_rows, hidden_size)

    def _extend(
        self, hidden: Tensor, accepted: Accepted, places: Places, attention: Any
    ) -> tuple[Tensor, Tensor | None]:
        assert self._draft_model is not None
        rows, stride = accepted.emitted.shape
        layout = uniform_layout(rows, stride, hidden.device)
        uniform = torch.arange(rows + 1, dtype=torch.int32) * stride
        lengths = torch.nn.functional.pad((accepted.count + 1).cumsum(0), (1, 0)).to(torch.int32)
        layout.cu_seqlens_q.copy_(torch.where(self.packed, lengths, uniform))
        # Packed rows end at their own last token
        seq_lens = torch.where(self.packed, accepted.seq_len.to(torch.int32), places.seq_lens)
        table = attention._plan[1]
        faulty = UniformAttention(self._backend, self._pool, layout, table, seq_lens, (), places.write_slots)
        out = self._draft_model(hidden, accepted.emitted.flatten(), places.positions, faulty)
        verdict = self._check_layout(layout)
        layout.cu_seqlens_q.copy_(uniform)
        chosen = out.index_select(0, accepted.last)
        self.extended[:rows].copy_(chosen)
        return chosen, verdict
