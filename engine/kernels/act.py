"""The gated activation of a dense MLP."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.jit import await_previous, check_rows, jit, power_of_two

_MAX_BLOCK = 1024


@jit
def _silu_mul(
    gate_up: tl.tensor, stride: tl.tensor, out: tl.tensor, inner: tl.constexpr, block: tl.constexpr
) -> None:
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < inner
    source = gate_up + row * stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * inner + columns, (silu * up).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up`` ``[N, 2 * inner]`` (gates first, rows at any distance): ``[N, inner]``.

    In fp32, rounded after each of the two products as ``F.silu(gate) * up`` is in the same dtype. The exponentials
    may differ in their last bit, and so the result by a last place of ``silu(gate)``: at most two of its own.
    """
    check_rows("gate_up", gate_up)
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_MAX_BLOCK, power_of_two(inner))
    _silu_mul[(rows, -(-inner // block))](gate_up, gate_up.stride(0), out, inner=inner, block=block)
    return out
