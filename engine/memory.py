"""How much memory is left. What takes more must be refused before it is made: the kernel ends who takes it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

import torch

from engine.errors import ConfigError

_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Of versions 2 and 1, as a container sees its own."""


def check_fits(what: str, num_bytes: int, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Refuse what needs more memory than ``device`` has left.

    Args:
        what: The setting at fault and what it makes, up to the verb, to begin the message with.
        dtype: To be named, where the size follows from it.

    Raises:
        ConfigError: It does not fit.
    """
    free = free_bytes(device)
    if num_bytes > free:
        held = "" if dtype is None else f" in {str(dtype).removeprefix('torch.')}"
        raise ConfigError(f"{what} {num_bytes / 1e9:.1f} GB{held}, {device} has {free / 1e9:.1f} GB free")


def free_bytes(device: torch.device) -> int:
    """Memory of ``device`` that this process can still take; of a CPU no more than its limits allow."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    [available] = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    limits = [path.read_text(encoding="ascii").strip() for path in _CGROUP_LIMITS if path.is_file()]
    return min([available, *(int(limit) for limit in limits if limit != "max"), *_address_space()])


def _address_space() -> list[int]:
    """What is left of the process's address space, if that is limited (``ulimit -v``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return [max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))]
