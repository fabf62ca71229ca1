"""Compiles the kernels for a GPU that is not there, through the functions that launch them.

Run as ``python -m tests.engine.kernels.offline CAPABILITY``. It finds what the interpreter accepts and the compiler
does not, blocks that need more shared memory than a program can have, weights that are not read 16 bytes at once,
and memory that a kernel touches before the kernels in front of it have ended.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

from engine.kernels.act import silu_mul
from engine.kernels.heads import head_linear
from engine.kernels.latent import write_latent
from engine.kernels.linear import NORMED, PLAIN, WIDE, skinny_linear
from engine.kernels.moe import mix
from engine.kernels.norm import merge_inputs, rms_norm
from engine.kernels.router import Routing, route_blocks
from engine.kernels.split_mla import split_mla
from engine.kernels.step import FusedOps
from engine.kv.pool import LatentPool
from engine.sampler import FULL
from engine.state import SlotState

SHARED_LIMIT = 227 * 1024
"""Shared memory of one program on compute capability 9.0 and 10.0, in bytes."""

WEIGHT_READERS = {"_skinny_linear", "_head_linear", "_gate_up_kernel", "_down_kernel"}
PREFETCHERS = {"_skinny_linear", "_gate_up_kernel", "_down_kernel"}
NEVER_EARLY = {"_head_linear"}
"""It follows a library's kernels."""
WAIT = "ACQBULK"
"""The machine instruction of ``griddepcontrol.wait``."""
GLOBAL_ACCESS = re.compile(r"\b(LDG|LDGSTS|STG|ATOMG?|REDG?|LD|ST|UTMA\w*|UBLKCP)\b")
WIDE_LOAD = re.compile(r"cp\.async\S* \[[^]]*\], \[[^]]*\], 0x10|ld\.global\S*\.v4")

Shape = dict[str, Any]
V2_LITE: Shape = {
    "hidden": 2048,
    "heads": 16,
    "nope": 128,
    "rank": 512,
    "rope": 64,
    "inner": 10944,
    "outputs": 3648,
}
SMALL: Shape = {"hidden": 100, "heads": 3, "nope": 10, "rank": 24, "rope": 6, "inner": 77, "outputs": 45}


def install(capability: int) -> list[tuple[str, str]]:
    """Make every launch compile for ``capability`` and stop there; the kernels' names and code, as they come."""
    compiled: list[tuple[str, str]] = []
    driver: Any = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    triton.runtime.driver.set_active(driver)

    def compile_only(kernel: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            built = kernel.run(*arguments, grid=grid, warmup=True, **options)
            built = built.result() if hasattr(built, "result") else built
            assert built.metadata.shared <= SHARED_LIMIT, f"{kernel}: {built.metadata.shared} bytes shared"
            check_order(kernel.__name__, built)
            compiled.append((kernel.__name__, built.asm["ptx"]))
            print(f"{kernel.__name__}: {built.metadata.shared} bytes shared")

        return launch

    KernelInterface.__getitem__ = compile_only
    return compiled


def check_order(name: str, built: Any) -> None:
    """It is launched early unless it must not be, and neither loads nor stores anything before its wait."""
    assert built.metadata.launch_pdl == (name not in NEVER_EARLY), (
        f"{name} is launched early, or not, by mistake"
    )
    before, wait, _ = built.asm["sass"].partition(WAIT)
    assert wait, f"{name} does not wait for the previous kernel"
    found = GLOBAL_ACCESS.search(before)
    assert found is None, f"{name} has {found.group()} before it waits for the previous kernel"


def compile_dense(shape: Shape, dtype: torch.dtype) -> None:
    """The kernels of a layer's dense part and of the draft's input."""
    hidden, heads, rank, rope, nope = (shape[name] for name in ("hidden", "heads", "rank", "rope", "nope"))

    def empty(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=dtype)

    x, scale, ids = empty(4, hidden), empty(hidden), torch.zeros(4, dtype=torch.int64)
    rms_norm(x, scale, 1e-6)
    merge_inputs(ids, empty(9, hidden), scale, x, scale, 1e-6)
    silu_mul(empty(4, 2 * shape["inner"]))
    head_linear(empty(4, heads, rank), empty(heads, rank, nope), empty(4, heads, nope))
    for rows in (4, 40):
        write_latent(
            empty(rows, heads * nope),
            empty(rows, heads * rope),
            empty(rows, rope),
            empty(rows, rank),
            weight=empty(rank),
            eps=1e-6,
            table=torch.empty(50, 2 * rope),
            positions=torch.zeros(rows, dtype=torch.int64),
            pool_rows=empty(64, rank + rope),
            slots=torch.zeros(rows, dtype=torch.int64),
            query=empty(rows, heads, rank + rope),
            w_uk=empty(heads, nope, rank),
        )
    weight = empty(shape["outputs"], hidden)
    for tile in (NORMED, PLAIN, WIDE):
        skinny_linear(x, weight, tile=tile)
        skinny_linear(x, weight, empty(4, shape["outputs"]), (scale, 1e-6), tile)


def compile_attention(heads: int, dtype: torch.dtype) -> None:
    """Attention of few requests, of one token each and of four."""
    for rows, stride in ((1, 4), (8, 1)):
        query = torch.empty(rows, stride, heads, 576, dtype=dtype)
        pages = torch.empty(9, 64, 576, dtype=dtype)
        split_mla(
            query,
            pages,
            torch.zeros(rows, 9, dtype=torch.int32),
            torch.ones(rows, dtype=torch.int32),
            512,
            0.1,
        )


def compile_moe(dtype: torch.dtype, hidden: int, inner: int, experts: int, shared: int) -> None:
    """Routing and both products, of a few tokens and of many."""
    routing = Routing(experts, 2, 1, 1, 1, sigmoid=False, normalise=False, scale=1.0)
    gate_up = torch.empty(experts + shared, 2 * inner, hidden, dtype=dtype).transpose(1, 2)
    down = torch.empty(experts + shared, hidden, inner, dtype=dtype).transpose(1, 2)
    for tokens, block_rows in ((4, 16), (80, 64)):
        x, projection = torch.empty(tokens, hidden, dtype=dtype), torch.empty(hidden, experts)
        weights, blocks = route_blocks(x, projection, None, routing, block_rows=block_rows, num_shared=shared)
        mix(x, x, weights, blocks, gate_up, down)


def compile_sampling(vocab: int, processors: int) -> None:
    """A step's decisions where a row's programs are one, and of each size of a team."""
    device, k = torch.device("cpu"), 3
    state = SlotState(num_slots=1, num_speculative_tokens=k, vocab_size=vocab, table_width=8, device=device)
    pool = LatentPool(
        num_layers=1, num_pages=9, page_size=64, latent_dim=1, dtype=torch.float32, device=device
    )
    ops = FusedOps(state, pool, k)
    ops.assemble(processors)
    for count in (1, 2, 4, 8, 16, 64):
        rows = ops.load(torch.zeros(count, dtype=torch.int64), None, (64,) * count, FULL, k + 1)
        logits = torch.empty(count, k + 1, vocab, dtype=torch.bfloat16)
        accepted = ops.accept(rows, logits, None)
        ops.propose(rows, logits[:, 0], rows.seq_len, accepted.history, 0)


if __name__ == "__main__":
    compiled = install(int(sys.argv[1]))
    compile_attention(16, torch.bfloat16)
    compile_attention(2, torch.float16)
    compile_sampling(102400, 132)
    for wanted in (torch.bfloat16, torch.float16, torch.float32):
        compile_dense(SMALL, wanted)
        compile_moe(wanted, 100, 77, 3, 0)
        compiled.clear()
        compile_dense(V2_LITE, wanted)
        compile_moe(wanted, 2048, 1408, 64, 2)
        for name, code in compiled:
            assert name not in WEIGHT_READERS or WIDE_LOAD.search(code), (
                f"{name} reads less than 16 bytes at once"
            )
            assert name not in PREFETCHERS or "cp.async.bulk.prefetch.L2" in code, (
                f"{name} prefetches nothing"
            )
