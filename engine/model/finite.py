"""Looks for NaN and infinity in the files of a checkpoint, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.model.reader import CheckpointReader

SLICE: Final = 1 << 24
"""Elements looked at together: what that needs beside the tensor itself stays small, however large the tensor."""
_FP8_NAN: Final = 0x7F
"""Of ``float8_e4m3fn``, without the sign; it has no infinity."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor with values that are not finite."""

    file: str
    key: str
    """Its name in the file."""
    num_nan: int
    num_infinite: int
    num_values: int

    def __str__(self) -> str:
        found = ((self.num_nan, "NaN"), (self.num_infinite, "infinite"))
        counts = ", ".join(f"{count:,} {kind}" for count, kind in found if count)
        return f"{self.key} in {self.file}: {counts} of {self.num_values:,} values"


def find_non_finite(
    path: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[NonFinite]:
    """Read every tensor of a checkpoint as it is stored, scales of FP8 ones included.

    Args:
        progress: Called before each tensor with how many are done, and of how many.

    Returns:
        The tensors that are not finite, in the order of the files.

    Raises:
        CheckpointError: A file that is damaged or unreadable, by name.
    """
    reader = CheckpointReader(path)
    found = []
    for done, (name, info) in enumerate(reader.tensors.items()):
        progress(done, len(reader.tensors))
        num_nan, num_infinite = _count(reader.raw(name))  # not kept: the next one takes its place
        if num_nan or num_infinite:
            size = torch.Size(info.shape).numel()
            found.append(NonFinite(info.file, info.key, num_nan, num_infinite, size))
    return found


def _count(tensor: Tensor) -> tuple[int, int]:
    """How many values are NaN, and how many infinite."""
    if tensor.dtype == torch.float8_e4m3fn:
        parts = tensor.flatten().view(torch.uint8).split(SLICE)
        return sum(int(((part & 0x7F) == _FP8_NAN).sum()) for part in parts), 0
    num_nan = num_infinite = 0
    for part in tensor.flatten().split(SLICE):
        if not bool(part.isfinite().all()):
            num_nan += int(part.isnan().sum())
            num_infinite += int(part.isinf().sum())
    return num_nan, num_infinite
