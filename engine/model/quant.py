"""Dequantisation of DeepSeek-V3's FP8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import FP8_BLOCK


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a weight's ``weight_scale_inv``: one scale for each block of 128 x 128."""
    return tuple(-(-size // FP8_BLOCK) for size in shape)


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """fp32 ``weight * scale``, each scale over its block.

    Args:
        weight: ``[out, in]`` float8_e4m3fn.
        scale: ``[ceil(out / 128), ceil(in / 128)]`` fp32; the file calls it ``weight_scale_inv`` although it
            multiplies.
    """
    rows, columns = weight.shape
    per_row = scale.float().repeat_interleave(FP8_BLOCK, dim=0)[:rows]
    out = weight.to(torch.float32)
    for start in range(0, columns, FP8_BLOCK):
        out[:, start : start + FP8_BLOCK] *= per_row[:, start // FP8_BLOCK, None]
    return out
