"""How many CPU threads a forward is worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

MANY_TOKENS: Final = 32
"""Tokens of a forward from which a CPU gains by more than one thread (measured: docs/performance.md)."""


@contextmanager
def threads_for(tokens: int, device: torch.device) -> Iterator[None]:
    """On a CPU, one thread for a forward of few tokens: waking others costs more than they save."""
    if device.type != "cpu" or tokens >= MANY_TOKENS:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
