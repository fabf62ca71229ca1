"""FlashMLA on Hopper: absorbed MLA over pages of 64, scheduled on the device.

The package ``tokenspeed-flashmla`` is an optional dependency, imported only here. Called with fresh metadata,
its first call of a phase computes the tile schedule on the device from ``seq_lens``; the later layers of the phase
share it. No host plan exists, so a captured step replays correctly with other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from engine.attention.base import AttentionSpec
from engine.layout import PackedLayout, UniformLayout

_LATENT_DIM, _KV_LORA_RANK, _PAGE_SIZE = 576, 512, 64


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of one uniform phase share."""

    block_table: Tensor  # [rows, width] int32
    seq_lens: Tensor  # [rows] int32
    schedule: Any  # the package's tile schedule, filled by the first layer


class FlashMla:
    """``AttentionBackend`` of the FlashMLA dense decode kernel."""

    name = "flash_mla"

    def __init__(self, spec: AttentionSpec) -> None:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        self._kernel: Any = flash_mla_with_kvcache
        self._new_schedule: Any = get_mla_metadata
        self._scale = spec.softmax_scale

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

    def prepare(
        self, layout: UniformLayout, block_table: Tensor, seq_lens: Tensor, max_seq_lens: tuple[int, ...]
    ) -> _Plan:
        schedule, _ = self._new_schedule()
        return _Plan(block_table.contiguous(), seq_lens.to(torch.int32), schedule)

    def attend(self, query: Tensor, pages: Tensor, plan: _Plan) -> Tensor:
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

    def attend_packed(
        self, query: Tensor, pages: Tensor, layout: PackedLayout, block_table: Tensor
    ) -> Tensor:
        """One call a request: a chunk is a row of as many query tokens."""
        outs = []
        start = 0
        for row, (length, context) in enumerate(zip(layout.query_lens, layout.context_lens, strict=True)):
            seq_lens = torch.tensor([context + length], dtype=torch.int32, device=query.device)
            schedule, _ = self._new_schedule()
            plan = _Plan(block_table[row : row + 1].contiguous(), seq_lens, schedule)
            outs.append(self.attend(query[None, start : start + length], pages, plan)[0])
            start += length
        return torch.cat(outs)
