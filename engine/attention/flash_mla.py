"""FlashMLA on Hopper: absorbed MLA over pages of 64, scheduled on the device.

The package ``tokenspeed-flashmla`` is an optional dependency, imported only here. Called with fresh metadata,
its first call of a phase computes the tile schedule on the device from ``seq_lens``; the later layers of the phase
share it. No host plan exists, so a captured step replays correctly with other lengths.

A decode step of few query tokens and keys is served by a kernel of our own, which needs no schedule and is sooner
done (``engine.kernels.split_mla``). Which one it is depends on the numbers of rows and heads, and on the bound of
the rows' lengths that the host knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.attention.base import AttentionSpec
from engine.layout import PackedLayout, UniformLayout
from engine.staging import stage

_LATENT_DIM, _KV_LORA_RANK, _PAGE_SIZE = 576, 512, 64
SPLIT_TOKENS = 8
"""Most query tokens of a step that are served without FlashMLA (measured: docs/performance.md)."""


def split_length(tokens: int) -> int:
    """Up to which length FlashMLA is later done with ``tokens`` query tokens, at most ``SPLIT_TOKENS``."""
    return 16384 if tokens <= SPLIT_TOKENS // 2 else 4096


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of one uniform phase share."""

    block_table: Tensor  # [rows, width] int32
    seq_lens: Tensor  # [rows] int32
    schedule: Any  # the package's tile schedule, filled by the first layer; None where its kernel is not used


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests of a prefill whose chunks have one length."""

    rows: int
    length: int
    plan: _Plan


class FlashMla:
    """``AttentionBackend`` of the FlashMLA dense decode kernel."""

    name = "flash_mla"
    reads: ClassVar[frozenset[str]] = frozenset({"block_table", "seq_lens"})
    gathers: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec) -> None:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        from engine.kernels.split_mla import MAX_HEADS, split_mla  # Triton is no part of a CPU installation

        self._kernel: Any = flash_mla_with_kvcache
        self._new_schedule: Any = get_mla_metadata
        self._scale = spec.softmax_scale
        self._split_mla = split_mla
        self._may_split = spec.num_heads <= MAX_HEADS

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda":
            return f"needs a CUDA device, the engine runs on {spec.device.type}"
        capability = torch.cuda.get_device_capability(spec.device)
        if capability != (9, 0):
            return f"needs compute capability 9.0 (Hopper), this GPU has {capability[0]}.{capability[1]}"
        if find_spec("flash_mla") is None:
            return "needs the package tokenspeed-flashmla, which is not installed"
        if spec.dtype not in (torch.bfloat16, torch.float16):
            return f"needs bfloat16 or float16, the engine runs in {str(spec.dtype).removeprefix('torch.')}"
        if spec.latent_dim != _LATENT_DIM or spec.kv_lora_rank != _KV_LORA_RANK:
            return (
                f"needs kv_lora_rank {_KV_LORA_RANK} and latent rows of {_LATENT_DIM}, the checkpoint has "
                f"{spec.kv_lora_rank} and {spec.latent_dim}"
            )
        if spec.page_size != _PAGE_SIZE:
            return f"needs kv_page_size {_PAGE_SIZE}, not {spec.page_size}"
        return None

    def short_length(self, rows: int, stride: int) -> int | None:
        """Of the step's largest phase that may be split: verify, or a draft's single tokens."""
        tokens = rows * stride if rows * stride <= SPLIT_TOKENS else rows
        return split_length(tokens) if self._may_split and tokens <= SPLIT_TOKENS else None

    def prepare(
        self, layout: UniformLayout, block_table: Tensor, seq_lens: Tensor, max_seq_lens: tuple[int, ...]
    ) -> _Plan:
        tokens = layout.sum_seq_lens_q
        if self._may_split and tokens <= SPLIT_TOKENS and max(max_seq_lens) <= split_length(tokens):
            return _Plan(block_table, seq_lens.to(torch.int32), None)
        schedule, _ = self._new_schedule()
        return _Plan(block_table.contiguous(), seq_lens.to(torch.int32), schedule)

    def attend(self, query: Tensor, pages: Tensor, plan: _Plan) -> Tensor:
        if plan.schedule is None:
            return self._split_mla(query, pages, plan.block_table, plan.seq_lens, _KV_LORA_RANK, self._scale)
        out: Tensor = self._kernel(
            query.contiguous(),
            pages[:, :, None],
            plan.block_table,
            plan.seq_lens,
            _KV_LORA_RANK,
            plan.schedule,
            softmax_scale=self._scale,
            causal=True,
        )[0]
        return out

    def prepare_packed(self, layout: PackedLayout, block_table: Tensor) -> list[_Part]:
        """A chunk is a row of as many query tokens; neighbours of one length are rows of one call."""
        pairs = zip(layout.query_lens, layout.context_lens, strict=True)
        seq_lens = stage([length + context for length, context in pairs], torch.int32, block_table.device)
        parts: list[_Part] = []
        row = 0
        for length, group in groupby(layout.query_lens):
            rows = slice(row, row + len(list(group)))
            schedule, _ = self._new_schedule()
            plan = _Plan(block_table[rows].contiguous(), seq_lens[rows], schedule)
            parts.append(_Part(rows.stop - rows.start, length, plan))
            row = rows.stop
        return parts

    def attend_packed(self, query: Tensor, pages: Tensor, plan: list[_Part]) -> Tensor:
        tokens = query.split([part.rows * part.length for part in plan])
        outs = [
            self.attend(own.view(part.rows, part.length, *own.shape[1:]), pages, part.plan).flatten(0, 1)
            for own, part in zip(tokens, plan, strict=True)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
