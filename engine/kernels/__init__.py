"""Fused kernels of the CUDA path, written in Triton; the plain torch form of each is its oracle.

A CPU-only installation has no Triton, so the modules here are imported only behind ``fused``.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor

from engine.errors import ConfigError


def fused(x: Tensor) -> bool:
    """Whether the fused kernels serve ``x``: on every CUDA device.

    Raises:
        ConfigError: They should, but Triton is missing.
    """
    if x.is_cuda:
        _require_triton()
    return x.is_cuda


def row_classes(most: int) -> list[int]:
    """Numbers of rows that together meet each variant of the kernels that any of 1 to ``most`` rows meets.

    Where the form of a kernel depends on the number of its rows (or tokens), the last number that a form serves is
    a power of two, or each form serves up to twice as many as the one before.
    """
    powers = [1 << bit for bit in range(most.bit_length())]
    return [rows for rows in powers if rows < most] + [most]


@cache
def _require_triton() -> None:
    if find_spec("triton") is None:
        raise ConfigError("CUDA needs the package triton, which is not installed; --device cpu runs without")
