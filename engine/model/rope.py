"""Rotary position embedding in the half-split layout: dimension ``i`` pairs with ``i + dim / 2``.

Interleaved checkpoints are brought into this layout when they are loaded (``half_split_rows``), so queries
and cached keys have one layout whatever the checkpoint's.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor, nn

from engine.config import ModelConfig, YarnScaling


def half_split_rows(dim: int) -> Tensor:
    """[dim] int64: which interleaved row (2i, 2i+1 pairing) stands at each place of the half-split layout."""
    return torch.arange(dim).view(-1, 2).t().flatten()


def inverse_frequencies(dim: int, theta: float, scaling: YarnScaling | None) -> Tensor:
    """[dim / 2] fp32 radians per position; YaRN (arXiv:2309.00071) blends stretched and original ones."""
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    original = 1.0 / wavelengths
    if scaling is None:
        return original

    def dimension_of(rotations: float) -> float:
        """The (fractional) frequency index that turns so often over the original length."""
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return original / scaling.factor * stretched + original * (1 - stretched)


def table_bytes(dim: int, max_positions: int) -> int:
    """Bytes of the host that making a ``RotaryTable`` takes: angles and three parts beside the table itself."""
    return 16 * dim * max_positions


class RotaryTable(nn.Module):
    """Cosines and signed sines of every position, shared by all layers of target and draft."""

    table: Tensor

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device) -> None:
        super().__init__()
        self.dim = config.qk_rope_head_dim
        frequencies = inverse_frequencies(self.dim, config.rope_theta, config.rope_scaling)
        # The product is rounded to fp32 as in training, where it is computed so.
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        table = torch.cat((cos, cos, -sin, sin), dim=-1)
        if config.rope_scaling is not None:
            table *= config.rope_scaling.table_scale
        self.register_buffer("table", table.to(device), persistent=False)

    def at(self, positions: Tensor) -> Angles:
        """The rows of ``positions`` ``[N]`` int64, for all layers of one forward."""
        return Angles(self, positions)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines ``[N, 1, dim]`` fp32 at ``positions`` ``[N]`` int64."""
        rows = self.table.index_select(0, positions)[:, None]
        return rows[..., : self.dim], rows[..., self.dim :]


class Angles:
    """One forward's positions in the table: kernels read the table in place, operators share the rows.

    Attributes:
        table: ``[max_positions, 2 * dim]`` fp32: cosines, then signed sines.
        positions: ``[N]`` int64.
    """

    def __init__(self, rotary: RotaryTable, positions: Tensor) -> None:
        self._rotary = rotary
        self.table, self.positions = rotary.table, positions

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines ``[N, 1, dim]`` fp32, gathered once."""
        rows: tuple[Tensor, Tensor] = self._rotary(self.positions)
        return rows


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[N, heads, dim]`` (half-split) by one position's angles a row."""
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)
