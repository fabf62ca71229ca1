"""What a process that works on grammars may use."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

OUT_OF_TIME = -signal.SIGPROF
"""Exit code of a process that computed for longer than ``limit_time`` allows."""


def limit_memory(extra: int) -> None:
    """Let this process map ``extra`` bytes more than now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + extra, mapped + extra))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(seconds: float) -> None:
    """Let this process compute for ``seconds`` from now, or without end for 0; then the kernel ends it.

    It is processor time, so that nobody is ended for what else the machine has to do.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
