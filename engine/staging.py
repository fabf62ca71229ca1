"""Host values to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stage(
    values: Sequence[int] | Sequence[float] | Tensor, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """``values`` as a tensor on ``device``.

    A copy from pageable memory waits for everything that was launched; one from pinned memory is only ordered after
    it. The pinned copy lives until the device has read it (torch's caching host allocator sees to that).
    """
    host = values.to(dtype) if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def fetch(values: Tensor) -> Tensor:
    """A host twin of ``values``, filled once the device gets there (an event or synchronisation tells)."""
    if not values.is_cuda:
        return values
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    return host.copy_(values, non_blocking=True)
