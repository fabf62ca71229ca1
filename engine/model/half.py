"""fp32 products with weights held in fp16, the fast path of a CPU.

With few rows a product costs what reading its weights costs, so half the bytes are half the time; the library
behind PyTorch's fp16-weight product (FBGEMM) also reads them several times faster than its BLAS does, and a
row's result does not depend on the other rows, bit for bit. Activations and sums are fp32.

Weights are packed only if what fp16 makes of them costs no more than an fp32 sum does (``is_exact``). fp16 has the
bits of a bf16 checkpoint's values but not their range, so a matrix whose magnitudes lie below it is packed times a
power of two for each input, which the activations are divided by: that is exact.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

TOP_EXPONENT = 15
"""Scaled magnitudes stay below 2^15: fp16 ends at 2^16."""
MAX_SHIFT = 126
"""Largest exponent of a scale: its reciprocal is a normal fp32 number."""
FEW_ROWS = 8
"""Most rows for the call with the smallest overhead; above, the one that uses several threads wins."""


class HalfWeight:
    """A packed ``[out, in]`` weight.

    Args:
        weight: fp32 on a CPU, where ``is_available``.
        scale: ``[in]`` powers of two that its columns are multiplied by; with them it ``is_exact``.
    """

    __slots__ = ("_few", "_inverse", "_many", "_no_bias")

    def __init__(self, weight: Tensor, scale: Tensor | None = None) -> None:
        self._inverse = None if scale is None else scale.reciprocal()
        weight = (weight if scale is None else weight * scale).contiguous()
        self._no_bias = torch.zeros(weight.shape[0])
        self._few: Tensor = torch.fbgemm_pack_gemm_matrix_fp16(weight)
        self._many: Any = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[N, in]`` fp32 to ``[N, out]`` fp32."""
        if self._inverse is not None:
            x = x * self._inverse
        if is_in_torch_dispatch_mode():
            # A tracer would look inside the cheap call, whose kernel it cannot see, and record nothing; and it
            # cannot name the other's weight, which is no tensor.
            bias = self._no_bias
            traced: Tensor = torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(
                x, self._few, bias, bias.shape[0]
            )
            return traced
        if x.shape[0] <= FEW_ROWS:
            return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self._few, None)
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._many)
        return out


def pack(weight: Tensor) -> HalfWeight | None:
    """``weight`` ``[out, in]`` packed, or ``None`` where this device, machine or weight does not allow it."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    if not is_available():
        return None
    if is_exact(weight):
        return HalfWeight(weight)
    scale = column_scale(weight)
    return HalfWeight(weight, scale) if is_exact(weight, scale) else None


def column_scale(weight: Tensor) -> Tensor:
    """``[in]`` powers of two that bring each column's largest magnitude to fp16's top, 1 where that is 0."""
    exponents = torch.frexp(weight.abs().amax(dim=0))[1]
    shifts = (TOP_EXPONENT - exponents).clamp(-MAX_SHIFT, MAX_SHIFT)
    return torch.exp2(torch.where(weight.any(dim=0), shifts, 0).float())


def is_exact(weight: Tensor, scale: Tensor | None = None) -> bool:
    """Whether products with ``weight``, held in fp16 multiplied by ``scale``, are as good as fp32 sums of it.

    Such a sum of n products errs by some ``sqrt(n) * 2^-24`` of their magnitudes, so that is how far a value may be
    off, relative to its row's and column's: a column may meet a large activation and a row feed a large weight. An
    absolute bound would lose a small matrix as a whole.
    """
    if not bool(weight.isfinite().all()):
        return False
    columns = column_scale(weight)
    scale = torch.ones_like(columns) if scale is None else scale
    error = (weight - (weight * scale).half().float() / scale).abs() * columns
    rows = (weight * columns).abs().amax(dim=1, keepdim=True)
    tolerance = math.sqrt(weight.shape[1]) * 2.0**-24
    return bool((error <= tolerance * rows).all())


@cache
def is_available() -> bool:
    """Whether this PyTorch and processor have the products, tried on a small one."""
    weight = torch.arange(64.0).view(4, 16) / 64
    x = torch.arange(16.0 * (FEW_ROWS + 1)).view(-1, 16) / 16
    try:
        with warnings.catch_warnings():
            # The small-overhead call is marked as deprecated; should it go, the plain product remains.
            warnings.simplefilter("ignore")
            packed = HalfWeight(weight)
            few, many = packed(x[:1]), packed(x)
    except (RuntimeError, AttributeError, TypeError):
        return False
    expected = x @ weight.t()
    return torch.allclose(few, expected[:1]) and torch.allclose(many, expected)
