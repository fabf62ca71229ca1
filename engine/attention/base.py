"""The contract between the model and the kernels that read the paged latent cache (absorbed MLA).

The model sees ``Attention``: an object of one forward. A backend sees uniform forwards (``prepare`` once a
phase, ``attend`` once a layer) and ragged prefill (``prepare_packed``, ``attend_packed``). The contract of
``attend`` is that of flashinfer's ``trtllm_batch_decode_with_kv_cache_mla``: query ``[B, S, H, latent_dim]``,
output ``[B, S, H, kv_lora_rank]``, causal within the last S positions of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from engine.kv.pool import LatentPool
from engine.layout import PackedLayout, UniformLayout


class Attention(Protocol):
    """Attention of one forward, as the model calls it."""

    def attend(self, layer: int, query: Tensor, latent: Tensor) -> Tensor:
        """Write ``latent`` ``[N, latent_dim]`` of this forward's tokens, then attend over each token's context.

        Args:
            layer: Plane of the pool; the draft layer's is the number of target layers.
            query: ``[N, H, latent_dim]``, absorbed no-rope part first, roped part behind.

        Returns:
            ``[N, H, kv_lora_rank]``.
        """
        ...

    def destination(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where ``attend`` writes, for a kernel that does so itself and then calls ``read``.

        Returns:
            The plane's rows ``[R, latent_dim]``, and which of them belong to this forward's tokens: ``[N]`` int64.
        """
        ...

    def read(self, layer: int, query: Tensor) -> Tensor:
        """``attend`` without the write."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention has to serve."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    """Query heads H."""
    kv_lora_rank: int
    """Leading columns of a latent row that are also its value."""
    latent_dim: int
    """``kv_lora_rank + qk_rope_head_dim``."""
    softmax_scale: float
    page_size: int
    qk_nope_head_dim: int
    """Columns of an unabsorbed query head without positions: a kernel may want to know which model it serves."""


class AttentionBackend(Protocol):
    """Kernels over the paged latent cache."""

    name: str
    reads: ClassVar[frozenset[str]]
    """What the kernels of a uniform forward read on the device besides query and pages: ``block_table``,
    ``seq_lens``, ``cu_seqlens_q``. The replay contract is derived from it: what is not read is not checked."""
    gathers: ClassVar[bool]
    """Whether each row's keys are copied, in a capture as many as the longest row can have: then a row a token, as
    captured prefills have it, is dear."""

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        """Why this backend cannot serve ``spec`` here; ``None`` if it can."""
        ...

    def short_length(self, rows: int, stride: int) -> int | None:
        """Up to which length steps of ``rows`` have kernels of their own, that longer rows are not served by.

        A capture freezes which kernels run, so such a step is captured for rows up to this length, and for all.
        ``None`` where the length decides nothing.
        """
        ...

    def prepare(
        self, layout: UniformLayout, block_table: Tensor, seq_lens: Tensor, max_seq_lens: tuple[int, ...]
    ) -> Any:
        """What the layers of one phase share (masks, tile schedules), from device values without a sync.

        Args:
            block_table: ``[rows, width]`` int32 page ids; 0 where a row owns no page.
            seq_lens: ``[rows]`` int32 key positions of each row, its own S included (so >= S).
            max_seq_lens: Bound of each row's length that the host knows; frozen by a capture.
        """
        ...

    def attend(self, query: Tensor, pages: Tensor, plan: Any) -> Tensor:
        """``query`` ``[rows, stride, H, latent_dim]`` over ``pages`` ``[num_pages, page_size, latent_dim]``."""
        ...

    def prepare_packed(self, layout: PackedLayout, block_table: Tensor) -> Any:
        """What the layers of a ragged prefill share; ``block_table`` ``[requests, width]`` int32."""
        ...

    def attend_packed(self, query: Tensor, pages: Tensor, plan: Any) -> Tensor:
        """``query`` ``[N, H, latent_dim]`` of a ragged prefill."""
        ...


class UniformAttention:
    """``Attention`` of a ``[rows, stride]`` forward.

    Args:
        write_slots: ``[rows * stride]`` int64 pool rows of this forward's tokens.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        pool: LatentPool,
        layout: UniformLayout,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_lens: tuple[int, ...],
        write_slots: Tensor,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._layout = layout
        self._write_slots = write_slots
        self._plan = backend.prepare(layout, block_table, seq_lens, max_seq_lens)

    def attend(self, layer: int, query: Tensor, latent: Tensor) -> Tensor:
        self._pool.write(layer, latent, self._write_slots)
        return self.read(layer, query)

    def destination(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.rows[layer], self._write_slots

    def read(self, layer: int, query: Tensor) -> Tensor:
        query = query.view(self._layout.rows, self._layout.stride, *query.shape[1:])
        return self._backend.attend(query, self._pool.layers[layer], self._plan).flatten(0, 1)


class PackedAttention:
    """``Attention`` of a ragged prefill."""

    def __init__(
        self,
        backend: AttentionBackend,
        pool: LatentPool,
        layout: PackedLayout,
        block_table: Tensor,
        write_slots: Tensor,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._write_slots = write_slots
        self._plan = backend.prepare_packed(layout, block_table)

    def attend(self, layer: int, query: Tensor, latent: Tensor) -> Tensor:
        self._pool.write(layer, latent, self._write_slots)
        return self.read(layer, query)

    def destination(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.rows[layer], self._write_slots

    def read(self, layer: int, query: Tensor) -> Tensor:
        return self._backend.attend_packed(query, self._pool.layers[layer], self._plan)
