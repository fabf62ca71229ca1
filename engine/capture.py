"""How a phase is captured: as a CUDA graph, or as a trace that freezes what a graph would."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Outputs = tuple[Tensor, ...]


class Captured(Protocol):
    """A captured phase."""

    def replay(self) -> Outputs: ...


class CudaGraph:
    """A CUDA graph and the tensors that it writes."""

    def __init__(self, run: Callable[[], Outputs], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # loads kernels and libraries, which a capture cannot
            run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph, pool=pool):
            self._out = run()

    def replay(self) -> Outputs:
        self._graph.replay()
        return self._out


class SimulatedGraph:
    """A trace over the static buffers: host values, shapes and pointers are frozen as in a CUDA graph.

    Tracing with fake tensors fails where the phase looks at a value, as a capture would.

    Args:
        given: One of the static buffers: a trace has an argument.
    """

    def __init__(self, run: Callable[[], Outputs], given: Tensor) -> None:
        run()  # fills caches with real tensors
        self._given = given
        self._trace = make_fx(lambda _: run(), tracing_mode="fake", _allow_non_fake_inputs=True)(given)

    def replay(self) -> Outputs:
        out: Outputs = self._trace(self._given)
        return out


def memory_in_use() -> tuple[int, int]:
    """Bytes of the device in use, whoever uses them, and bytes that this process's allocator holds.

    The first knows what the driver takes for graphs, but also what other processes give back meanwhile. What the
    allocator keeps without need is given back first, as a capture would do in between.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_reserved()
