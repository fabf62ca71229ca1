"""Triton's compiler and launcher, as far as these kernels need them.

Parameters of kernels are annotated with ``tl.tensor`` or ``tl.constexpr`` only: the compiler looks annotations up,
and refuses what is not its own. (The interpreter does not look.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

OVERLAP: Final = True
"""Whether kernels start while the one before them on the stream still runs (programmatic dependent launch)."""
TRIGGER_FIRST = tl.constexpr(True)
"""Whether a kernel lets the next one start at once, not only when it may itself go on: then the third and fourth of
a row of small kernels fetch their weights already while the first one runs."""
LANES = tl.constexpr(32)
"""Threads of a program that prefetch: its first warp."""
_PREFETCH = tl.constexpr("""{
    .reg .pred p;
    .reg .u32 lane;
    .reg .u64 place;
    mov.u32 lane, %tid.x;
    setp.lt.u32 p, lane, $2;
    mad.wide.u32 place, lane, $3, $1;
    and.b64 place, place, -16;
    @p cp.async.bulk.prefetch.L2.global [place], $3;
    mov.u32 $0, 0;
}""")


class Launcher:
    """A kernel as ``kernel[grid](*arguments)``, with the attribute that lets it start early."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        launch: Callable[..., Any] = self.kernel[grid]
        return partial(launch, launch_pdl=True) if _overlaps() else launch


@cache
def _overlaps() -> bool:
    """Compute capabilities 9 and 10 only: on consumer GPUs (12) captures with the attribute have failed."""
    if not OVERLAP or triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch // 10 in (9, 10)


def jit(kernel: Callable[..., None]) -> Any:
    """``triton.jit``, typed: the result is launched as ``kernel[grid](*arguments)`` on the current stream.

    Every kernel calls ``await_previous``, as that says, for it may be launched before the previous one has ended.

    The compiler makes a variant of its own where an integer is 1 or a multiple of 16, or a pointer a multiple of 16
    bytes, instead of anything else. For strides and weights that is as it should be: they decide how wide loads can
    be, and are fixed for a model. What is not fixed belongs to ``jit_varying``.
    """
    return Launcher(triton.jit(kernel))


def jit_varying(*names: str, early: bool = True) -> Callable[[Callable[..., None]], Any]:
    """``jit`` of a kernel of which the named arguments differ between launches for one model.

    Those are numbers of rows, tokens and pages, and pointers whose distance from an allocation follows from them.
    The compiler takes nothing for granted of them, so that no other number of them is another variant, which would
    be compiled while requests wait. The parts of a tuple cannot be named: their alignment has to be fixed.

    Args:
        early: Whether the kernel may start before the previous one has ended. Not if that can be a library's whose
            end does not imply that of the kernels before it.
    """

    def decorate(kernel: Callable[..., None]) -> Any:
        assert set(names) <= set(signature(kernel).parameters), f"{kernel.__name__} has not all of {names}"
        compiled = triton.jit(kernel, do_not_specialize=names)
        return Launcher(compiled) if early else compiled

    return decorate


def jit_function(function: Callable[..., Any]) -> Any:
    """``triton.jit`` of a function that kernels call."""
    return triton.jit(function)


@jit_function
def await_previous(trigger: tl.constexpr = True) -> None:
    """Lets the next kernel of the stream start, then waits until all earlier ones have ended.

    ``trigger`` False where the next kernel is a library's that may start early and reads what this one writes
    before it waits: it then starts when this one has ended.

    What a kernel does before this overlaps with them. So it comes before the first load of anything that a kernel
    wrote, and before the first store too: an allocator hands the memory that an earlier kernel still reads to a
    later one. It is on the way of every program, or a program could end, and the kernel with it, before an earlier
    kernel has: the next one waits for this kernel alone. It never stands inside a loop, whose loads the compiler
    moves in front of the loop.
    """
    if cuda_capability_geq(9, 0):
        if not trigger:
            gdc_wait()
        elif TRIGGER_FIRST:
            gdc_launch_dependents()
            gdc_wait()
        else:
            gdc_wait()
            gdc_launch_dependents()


@jit_function
def prefetch(start: tl.tensor, size: tl.constexpr, wanted: tl.tensor) -> None:
    """Asks for the ``size`` bytes from ``start`` in the L2 cache if ``wanted``; of no effect on any result.

    Right before ``await_previous`` too, whoever writes those bytes. All of them are memory of the same allocation
    as ``start``. Up to 511 bytes at the end may be left out.
    """
    piece: tl.constexpr = size // (16 * LANES) * 16
    if cuda_capability_geq(9, 0) and piece > 0:
        lanes = tl.where(wanted, LANES, 0)
        tl.inline_asm_elementwise(
            _PREFETCH, "=r,l,r,r", [start, lanes, piece], dtype=tl.int32, is_pure=False, pack=1
        )


def power_of_two(size: int) -> int:
    """The least power of two that holds ``size``: extents of Triton's blocks are such."""
    return 1 << (size - 1).bit_length()


def check_rows(name: str, x: Tensor) -> None:
    """Kernels take a row's elements side by side, and rows at any distance."""
    assert x.stride(-1) == 1 or x.shape[-1] == 1, (
        f"{name} has strides {x.stride()}: its rows are not contiguous"
    )


def precision(dtype: torch.dtype) -> str:
    """How ``tl.dot`` multiplies: fp32 values are never rounded to TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"
