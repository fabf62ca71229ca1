"""One small product for each head, of few rows: the weights are read once, by many programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.jit import (
    await_previous,
    check_rows,
    jit_function,
    jit_varying,
    power_of_two,
    precision,
)

MAX_ROWS: Final = 16
"""Rows of the one tile that a head's ``x`` is padded to; more are left to the library."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a head's product is cut. Every choice sums a row in its own order, alike for 1 to 16 rows."""

    outputs: int  # outputs of one program
    inputs: int  # inputs read at once


NARROW: Final = Tile(outputs=32, inputs=128)


@jit_function
def head_product(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    row_block: tl.constexpr,
    output_block: tl.constexpr,
    input_block: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    """Outputs ``first`` to ``first + output_block`` of one head, whose ``x``, weight and ``out`` are given."""
    row = tl.arange(0, row_block)
    column = first + tl.arange(0, output_block)
    inner = tl.arange(0, input_block)
    live, kept = (row < rows)[:, None], (column < outputs)[None, :]
    sums = tl.zeros((row_block, output_block), dtype=tl.float32)
    for start in range(0, inputs, input_block):
        place = start + inner
        weights = tl.load(
            weight + place[:, None] * outputs + column[None, :],
            mask=(place < inputs)[:, None] & kept,
            other=0.0,
        )
        values = tl.load(
            x + row[:, None] * x_stride + place[None, :], mask=live & (place < inputs)[None, :], other=0.0
        )
        sums = tl.dot(values, weights, sums, input_precision=precision)
    written = out + row[:, None] * out_stride + column[None, :]
    tl.store(written, sums.to(out.dtype.element_ty), mask=live & kept)


@jit_varying("rows", early=False)  # it reads what attention made, by kernels that are not ours
def _head_linear(
    x: tl.tensor,
    x_stride: tl.tensor,
    x_head_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    rows: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    row_block: tl.constexpr,
    output_block: tl.constexpr,
    input_block: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    await_previous()
    head = tl.program_id(0)
    head_product(
        x + head * x_head_stride,
        x_stride,
        weight + head.to(tl.int64) * (inputs * outputs),
        out + head * out_head_stride,
        out_stride,
        rows,
        tl.program_id(1) * output_block,
        inputs,
        outputs,
        row_block,
        output_block,
        input_block,
        precision,
    )


def product_options(inputs: int, dtype: torch.dtype, tile: Tile = NARROW) -> dict[str, Any]:
    """What a kernel that calls ``head_product`` over ``inputs`` of ``dtype`` is launched with."""
    return {
        "row_block": MAX_ROWS,
        "output_block": tile.outputs,
        # A power of two, at least the 16 that a matrix unit takes
        "input_block": min(tile.inputs, max(16, power_of_two(inputs))),
        "precision": precision(dtype),
        "num_warps": 4,
    }


def head_linear(x: Tensor, weight: Tensor, out: Tensor, tile: Tile = NARROW) -> None:
    """``out[:, h] = x[:, h] @ weight[h]`` with fp32 sums, for at most 16 rows.

    Args:
        x: ``[N, H, inputs]``, N <= 16; rows and heads at any distance.
        weight: ``[H, inputs, outputs]``, contiguous.
        out: ``[N, H, outputs]``, rows and heads at any distance; only these columns are written.
    """
    check_rows("x", x)
    check_rows("out", out)
    rows, heads, inputs = x.shape
    outputs = weight.shape[2]
    assert rows <= MAX_ROWS and weight.is_contiguous() and out.shape == (rows, heads, outputs)
    _head_linear[(heads, triton.cdiv(outputs, tile.outputs))](
        x,
        x.stride(0),
        x.stride(1),
        weight,
        out,
        out.stride(0),
        out.stride(1),
        rows,
        inputs=inputs,
        outputs=outputs,
        **product_options(inputs, x.dtype, tile),
        num_stages=4,
    )
