"""Products of few rows with a weight that is read once, at the speed of memory.

A general matrix product splits its work for many rows; here every program owns a few outputs and streams their
weights through a deep pipeline, while the few rows of ``x`` come from the cache. An optional norm of ``x`` needs no
kernel of its own: its weight is applied to ``x`` on the way, and its scale, one number a row, to the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.jit import (
    await_previous,
    check_rows,
    jit_varying,
    power_of_two,
    precision,
    prefetch,
)

MAX_ROWS: Final = 16
"""Rows of the one tile that all of ``x`` is padded to."""
SERVED_OUTPUTS: Final = 8192
"""Most outputs of a product that ``serves`` sends here; wider ones fill the GPU in any library."""
SERVED_INPUTS: Final = 4096
"""Most inputs likewise: one program reads all of an output's weights, part after part."""
NORMED_INPUTS: Final = 1024
"""Most inputs where a norm is folded in: every program norms all of ``x`` anew."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut. Every choice sums a row in its own order, alike for 1 to 16 rows."""

    outputs: int  # outputs of one program
    inputs: int  # weights of one output read at once
    warps: int
    stages: int  # loads in flight


NORMED: Final = Tile(outputs=16, inputs=256, warps=4, stages=5)
PLAIN: Final = Tile(outputs=16, inputs=512, warps=2, stages=5)
"""Measured on an H200 at hidden sizes 256 and 2048 (docs/performance.md)."""
WIDE: Final = Tile(outputs=16, inputs=256, warps=2, stages=5)
"""Half the shared memory: for products of more programs than the GPU has SMs, which all run at once with it."""
PLAIN_OUTPUTS: Final = 132 * PLAIN.outputs
"""Most outputs for ``PLAIN``, one program of which fills an SM (an H200 has 132)."""


def serves(rows: int, inputs: int, outputs: int, dtype: torch.dtype, normed: bool) -> bool:
    """Whether this product is the faster one (a function of shapes and dtype only)."""
    most = NORMED_INPUTS if normed else SERVED_INPUTS
    return rows <= MAX_ROWS and inputs <= most and outputs <= SERVED_OUTPUTS and dtype != torch.float32


@jit_varying("rows")
def _skinny_linear(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    residual_stride: tl.tensor,
    norm_weight: tl.tensor,
    eps: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.constexpr,
    has_residual: tl.constexpr,
    has_norm: tl.constexpr,
    row_block: tl.constexpr,
    output_block: tl.constexpr,
    input_block: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    row = tl.arange(0, row_block)
    column = tl.program_id(0) * output_block + tl.arange(0, output_block)
    inner = tl.arange(0, input_block)
    first = tl.program_id(0) * output_block
    size: tl.constexpr = output_block * inputs * (weight.dtype.element_ty.primitive_bitwidth // 8)
    prefetch(weight + first.to(tl.int64) * inputs, size, first + output_block <= outputs)
    await_previous()
    live, kept = (row < rows)[:, None], (column < outputs)[:, None]
    x_tile = x + row[:, None] * x_stride + inner[None, :]
    weight_tile = weight + column[:, None].to(tl.int64) * inputs + inner[None, :]
    written = live & (column < outputs)[None, :]
    if has_residual:
        place = residual + row[:, None] * residual_stride + column[None, :]
        added = tl.load(place, mask=written, other=0.0).to(tl.float32)
    sums = tl.zeros((row_block, output_block), dtype=tl.float32)
    squares = tl.zeros((row_block, input_block), dtype=tl.float32)
    for start in range(0, inputs, input_block):
        inside = (inner < inputs - start)[None, :]
        weights = tl.load(weight_tile + start, mask=kept & inside, other=0.0)
        values = tl.load(x_tile + start, mask=live & inside, other=0.0)
        if has_norm:
            wide = values.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm_weight + start + inner, mask=inner < inputs - start, other=0.0)
            values = (wide * scale.to(tl.float32)[None, :]).to(weights.dtype)
        sums = tl.dot(values, tl.trans(weights), sums, input_precision=precision)
    if has_norm:
        sums *= tl.rsqrt(tl.sum(squares, axis=1) / inputs + eps)[:, None]
    if has_residual:
        sums += added
    place = out + row[:, None] * outputs + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=written)


def _tile_for(outputs: int, normed: bool) -> Tile:
    if normed:
        return NORMED
    return PLAIN if outputs <= PLAIN_OUTPUTS else WIDE


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """``x @ weight.T``, of ``x`` normed where ``norm`` is given, plus ``residual``, for at most 16 rows.

    Sums are fp32, of one fixed order for each output, so a row's result depends on nothing but the row. With a
    norm, the product of ``x`` and the norm's weight is rounded to the dtype of ``x`` before the row's scale is
    applied; for fp16 it must not overflow.

    Args:
        x: ``[N, inputs]``, N <= 16, rows at any distance.
        weight: ``[outputs, inputs]``, contiguous, in the dtype of ``x``.
        residual: ``[N, outputs]``, rows at any distance.
        norm: Weight ``[inputs]`` and epsilon of a root-mean-square norm.
        tile: Chosen by the number of outputs and whether there is a norm if left out. ``inputs`` count for half
            in fp32, so that its shared memory is that of 16-bit weights.

    Returns:
        ``[N, outputs]``, contiguous.
    """
    check_rows("x", x)
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert rows <= MAX_ROWS and weight.is_contiguous() and weight.shape[1] == inputs
    if residual is not None:
        check_rows("residual", residual)
    if tile is None:
        tile = _tile_for(outputs, norm is not None)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    norm_weight, eps = norm or (x, 0.0)
    _skinny_linear[(-(-outputs // tile.outputs),)](
        x,
        x.stride(0),
        weight,
        x if residual is None else residual,
        0 if residual is None else residual.stride(0),
        norm_weight,
        eps,
        out,
        rows,
        outputs,
        inputs=inputs,
        has_residual=residual is not None,
        has_norm=norm is not None,
        row_block=MAX_ROWS,
        output_block=tile.outputs,
        input_block=min(tile.inputs * 2 // x.element_size(), max(16, power_of_two(inputs))),
        precision=precision(x.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
