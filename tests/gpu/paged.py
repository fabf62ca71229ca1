"""Paged cases for the attention kernels of a GPU, and what they should give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention import AttentionBackend, AttentionSpec
from engine.attention.torch_mla import TorchMla
from engine.layout import PackedLayout, uniform_layout

RANK, DIM = 512, 576
MAX_ERROR = 5e-3
"""Relative, of bf16 kernels against float32: 1.8e-3 was measured on an H200."""


@dataclass(frozen=True)
class Paged:
    """``rows`` requests on permuted pages, every position of which holds something."""

    spec: AttentionSpec
    pages: Tensor
    """[num_pages, page_size, DIM] bf16; page 0 is zero."""
    table: Tensor
    """[rows, width] int32; 0 behind the pages that a row owns."""

    def query(self, *leading: int, seed: int = 0) -> Tensor:
        """``[*leading, H, DIM]`` bf16."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(*leading, self.spec.num_heads, DIM, generator=generator)
        return values.to(self.spec.device, self.spec.dtype)

    def expected(self, query: Tensor, lengths: Sequence[int]) -> Tensor:
        """``[rows, stride, H, RANK]`` float32 of ``query`` ``[rows, stride, H, DIM]``, by the float32 oracle."""
        oracle = TorchMla(replace(self.spec, dtype=torch.float32))
        layout = uniform_layout(query.shape[0], query.shape[1], self.spec.device)
        plan = oracle.prepare(layout, self.table, self.lengths(lengths), tuple(lengths))
        return oracle.attend(query.float(), self.pages.float(), plan)

    def lengths(self, lengths: Sequence[int]) -> Tensor:
        """``[rows]`` int64 on the device."""
        return torch.tensor(list(lengths), dtype=torch.int64, device=self.spec.device)


def paged_case(
    lengths: Sequence[int],
    *,
    heads: int = 16,
    page_size: int = 64,
    spare_pages: int = 2,
    seed: int = 0,
    device: torch.device | None = None,
) -> Paged:
    """Rows of ``lengths`` positions; the table is ``spare_pages`` wider than the longest needs."""
    device = device or torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    total = sum(counts)
    owned = (torch.randperm(total, generator=generator) + 1).int()
    table = torch.zeros((len(counts), max(counts) + spare_pages), dtype=torch.int32)
    for row, ids in enumerate(owned.split(counts)):
        table[row, : len(ids)] = ids
    pages = torch.randn((1 + total, page_size, DIM), generator=generator)
    pages[0] = 0
    spec = AttentionSpec(
        device=device,
        dtype=torch.bfloat16,
        num_heads=heads,
        kv_lora_rank=RANK,
        latent_dim=DIM,
        softmax_scale=192**-0.5,
        page_size=page_size,
        qk_nope_head_dim=128,
    )
    return Paged(spec, pages.to(device, torch.bfloat16), table.to(device))


def row_errors(out: Tensor, expected: Tensor) -> Tensor:
    """Relative error of each query row over heads and columns, ``[rows, stride]``; NaN where it is not finite."""
    difference = (out.float() - expected).flatten(2).norm(dim=-1)
    errors: Tensor = difference / expected.flatten(2).norm(dim=-1)
    return errors.cpu()


def packed(
    backend: AttentionBackend, query: Tensor, pages: Tensor, layout: PackedLayout, block_table: Tensor
) -> Tensor:
    """A ragged prefill's attention, planned and run."""
    return backend.attend_packed(query, pages, backend.prepare_packed(layout, block_table))
