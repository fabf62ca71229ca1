"""The paged latent pool: storage that target and draft share, addressed by the same page ids."""

from __future__ import annotations

import torch
from torch import Tensor

SCRATCH_PAGE = 0
"""Never owned by a request. Padding rows, and positions without a page, write here."""


class LatentPool:
    """Latent KV of every layer in pages.

    Args:
        num_layers: Planes: the target's layers, then one for the draft layer.
        num_pages: Pages of each plane, the scratch page included.
        page_size: Positions a page.
        latent_dim: ``kv_lora_rank + qk_rope_head_dim``.

    Attributes:
        pages: ``[num_layers, num_pages, page_size, latent_dim]``, zeroed.
        layers: Each plane's pages.
        rows: Each plane as ``[num_pages * page_size, latent_dim]``.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        latent_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.pages = torch.zeros((num_layers, num_pages, page_size, latent_dim), dtype=dtype, device=device)
        self.layers = list(self.pages.unbind(0))
        self.rows = [plane.view(num_pages * page_size, latent_dim) for plane in self.layers]

    def write(self, layer: int, latent: Tensor, slots: Tensor) -> None:
        """Store ``latent`` ``[N, latent_dim]`` at ``slots`` ``[N]`` int64 (page * page_size + offset).

        Non-finite values are stored as zero: the kernels multiply masked positions by a weight of zero, which
        would make a NaN of them. The guard sees the fault in the logits of the same position.
        """
        finite = latent.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        self.rows[layer].index_copy_(0, slots, finite.to(self.pages.dtype))

    def scrub(self, page_ids: list[int]) -> None:
        """Zero pages in every plane, so that no later reader meets what they held."""
        self.pages[:, torch.tensor(page_ids, device=self.pages.device)] = 0


def rows_of(pages: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Rows of a plane, int64, for int64 ``positions`` that stand on ``pages``, of the same shape."""
    return pages.to(torch.int64) * page_size + positions % page_size


def pool_bytes_per_token(num_layers: int, latent_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one position takes over all planes."""
    return num_layers * latent_dim * dtype.itemsize
