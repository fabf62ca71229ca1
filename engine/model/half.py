"""fp32 products with weights held in fp16, the fast path of a CPU.

With few rows a product costs what reading its weights costs, so half the bytes are half the time; the library
behind PyTorch's fp16-weight product (FBGEMM) also reads them several times faster than its BLAS does, and a
row's result does not depend on the other rows, bit for bit. Activations and sums are fp32.

Weights are packed only if fp16 holds them: what a bf16 checkpoint stores it does (bf16 has fewer bits), up to
magnitudes below fp16's normal range, whose error is at most ``MAX_ERROR`` and less than that of an fp32 sum.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

MAX_ERROR = 2.0**-25
"""Half of fp16's smallest step: the rounding of magnitudes below 2^-14. Larger ones must be exact."""
FEW_ROWS = 8
"""Most rows for the call with the smallest overhead; above, the one that uses several threads wins."""


class HalfWeight:
    """A packed ``[out, in]`` weight.

    Args:
        weight: fp32 on a CPU, ``is_exact`` and where ``is_available``.
    """

    __slots__ = ("_few", "_many", "_no_bias")

    def __init__(self, weight: Tensor) -> None:
        weight = weight.contiguous()
        self._no_bias = torch.zeros(weight.shape[0])
        self._few: Tensor = torch.fbgemm_pack_gemm_matrix_fp16(weight)
        self._many: Any = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[N, in]`` fp32 to ``[N, out]`` fp32."""
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
    return HalfWeight(weight) if is_available() and is_exact(weight) else None


def is_exact(weight: Tensor) -> bool:
    """Whether fp16 holds every value of ``weight`` to ``MAX_ERROR``."""
    return bool(((weight - weight.half().float()).abs() <= MAX_ERROR).all())


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
