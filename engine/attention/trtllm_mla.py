"""trtllm-gen MLA on Blackwell (SM100, SM103), through flashinfer. Unverified on B200.

The package ``flashinfer-python`` is an optional dependency, imported only here. At uniform stride the kernel gets
no query offsets: it places rows by ``[rows, stride]`` alone, and is causal within a row's last ``stride``
positions. It schedules by shapes and by ``max_seq_len``, a plain number that a capture freezes; so that number is
the room of the page table, which the captured step has whole, and never a length that the host knows of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from engine.attention.base import AttentionSpec
from engine.kv.pool import SCRATCH_PAGE
from engine.layout import PackedLayout, UniformLayout
from engine.staging import stage

_CAPABILITIES: Final = ((10, 0), (10, 3))
_LATENT_DIMS: Final = ((512, 64), (256, 64))
"""(kv_lora_rank, qk_rope_head_dim) that have kernels."""
_NOPE_DIMS: Final = (64, 128)
_PAGE_SIZES: Final = (32, 64)
_TABLE_POSITIONS: Final = 128
"""A page table covers a multiple of as many positions."""
_MAX_ROWS: Final = 8192
"""Rows of one call that the workspace's counters serve."""
_WORKSPACE_BYTES: Final = 128 << 20
"""8 MiB of counters, which have to be zero before each launch, then the partial results of rows whose keys are
split over several SMs: a tile of at most 64 heads x 512 float32 an SM, 20 MiB on a B200."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What the layers of one forward share."""

    block_table: Tensor  # [rows, width] int32, contiguous; width * page_size is a multiple of 128
    seq_lens: Tensor  # [rows] int32
    max_seq_len: int  # positions that the table has room for


class TrtllmMla:
    """``AttentionBackend`` of flashinfer's trtllm-gen MLA decode kernels."""

    name = "trtllm_mla"
    reads: ClassVar[frozenset[str]] = frozenset({"block_table", "seq_lens"})
    gathers: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec) -> None:
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

        self._kernel: Any = trtllm_batch_decode_with_kv_cache_mla
        self._spec = spec
        self._workspace = _workspace(spec.device)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda":
            return f"needs a CUDA device, the engine runs on {spec.device.type}"
        capability = torch.cuda.get_device_capability(spec.device)
        if capability not in _CAPABILITIES:
            return (
                f"needs compute capability 10.0 or 10.3 (B200, B300), this GPU has "
                f"{capability[0]}.{capability[1]}"
            )
        if find_spec("flashinfer") is None:
            return "needs the package flashinfer-python, which is not installed"
        return _unsupported_model(spec)

    def short_length(self, rows: int, stride: int) -> None:
        return None

    def prepare(
        self, layout: UniformLayout, block_table: Tensor, seq_lens: Tensor, max_seq_lens: tuple[int, ...]
    ) -> DecodePlan:
        return plan_decode(self._spec, block_table, seq_lens)

    def attend(self, query: Tensor, pages: Tensor, plan: DecodePlan) -> Tensor:
        out: Tensor = self._kernel(**decode_arguments(self._spec, query, pages, self._workspace, plan))
        return out

    def prepare_packed(self, layout: PackedLayout, block_table: Tensor) -> list[DecodePlan]:
        """Every token is a row of stride 1 with its own length, so that a ragged prefill is one call.

        The kernel works on one token of a row at a time anyway, and a row of one token needs no mask.
        """
        owners, seq_lens = _token_rows(layout, block_table.device)
        return [
            plan_decode(self._spec, block_table.index_select(0, owned), lengths)
            for owned, lengths in zip(owners.split(_MAX_ROWS), seq_lens.split(_MAX_ROWS), strict=True)
        ]

    def attend_packed(self, query: Tensor, pages: Tensor, plan: list[DecodePlan]) -> Tensor:
        parts = zip(query.split(_MAX_ROWS), plan, strict=True)
        outs = [self.attend(tokens[:, None], pages, part)[:, 0] for tokens, part in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def plan_decode(spec: AttentionSpec, block_table: Tensor, seq_lens: Tensor) -> DecodePlan:
    """The table ``[rows, width]`` at a width that the kernel takes, filled up with the scratch page.

    Its shape depends on the shape of ``block_table`` alone. ``seq_lens`` ``[rows]``: any integer type.
    """
    missing = -block_table.shape[1] % (_TABLE_POSITIONS // spec.page_size)
    if missing:
        block_table = torch.nn.functional.pad(block_table, (0, missing), value=SCRATCH_PAGE)
    return DecodePlan(
        block_table=block_table.to(torch.int32).contiguous(),
        seq_lens=seq_lens.to(torch.int32),
        max_seq_len=block_table.shape[1] * spec.page_size,
    )


def decode_arguments(
    spec: AttentionSpec, query: Tensor, pages: Tensor, workspace: Tensor, plan: DecodePlan
) -> dict[str, Any]:
    """Keyword arguments of flashinfer's ``trtllm_batch_decode_with_kv_cache_mla`` (0.6.13).

    Args:
        query: ``[rows, stride, H, latent_dim]``.
        pages: ``[num_pages, page_size, latent_dim]``.
        workspace: ``[bytes]`` uint8: the library zeroes its first 8 Mi elements, so they have to be bytes.
    """
    return {
        "query": query.contiguous(),
        "kv_cache": pages[:, None],  # one key head
        "workspace_buffer": workspace,
        "qk_nope_head_dim": spec.qk_nope_head_dim,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_rope_head_dim": spec.latent_dim - spec.kv_lora_rank,
        "block_tables": plan.block_table,
        "seq_lens": plan.seq_lens,
        "max_seq_len": plan.max_seq_len,
        "bmm1_scale": spec.softmax_scale,
        "bmm2_scale": 1.0,
        "backend": "trtllm-gen",  # "auto" may choose another kernel, which leaves the workspace dirty
    }


@cache
def _workspace(device: torch.device) -> Tensor:
    """One workspace a device, for trtllm-gen kernels only; made with the backend, before any capture."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _token_rows(layout: PackedLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each token's request, and the keys that it sees: ``[N]`` int64 and ``[N]`` int32."""
    owners = torch.repeat_interleave(torch.arange(len(layout.query_lens)), torch.tensor(layout.query_lens))
    spans = zip(layout.query_lens, layout.context_lens, strict=True)
    lengths = torch.cat([torch.arange(context + 1, context + length + 1) for length, context in spans])
    return stage(owners, torch.int64, device), stage(lengths, torch.int32, device)


def _unsupported_model(spec: AttentionSpec) -> str | None:
    """Why the kernels cannot serve the checkpoint or the pool's layout."""
    if spec.dtype != torch.bfloat16:
        return f"needs bfloat16, the engine runs in {str(spec.dtype).removeprefix('torch.')}"
    dims = (spec.kv_lora_rank, spec.latent_dim - spec.kv_lora_rank)
    if dims not in _LATENT_DIMS:
        return f"needs kv_lora_rank 512 or 256 and qk_rope_head_dim 64, the checkpoint has {dims[0]} and {dims[1]}"
    if spec.qk_nope_head_dim not in _NOPE_DIMS:
        return f"needs qk_nope_head_dim 64 or 128, the checkpoint has {spec.qk_nope_head_dim}"
    if not _has_kernels(spec.num_heads, spec.kv_lora_rank):
        more = " or 32" if spec.kv_lora_rank == 256 else ", 32, 48 or a multiple of 64 up to 256"
        return f"needs up to 16 attention heads{more}, the checkpoint has {spec.num_heads}"
    if spec.page_size not in _PAGE_SIZES:
        return f"needs kv_page_size 32 or 64, not {spec.page_size}"
    return None


def _has_kernels(num_heads: int, kv_lora_rank: int) -> bool:
    """Whether every kernel that flashinfer 0.6.13 may choose, by rows and lengths, exists and divides the heads.

    Few rows take tiles of 16 heads, many rows tiles of 64 above 32 heads; the latter exist for rank 512 alone.
    """
    if num_heads <= 16 or num_heads == 32:
        return True
    return kv_lora_rank == 512 and (num_heads == 48 or num_heads in range(64, 257, 64))
