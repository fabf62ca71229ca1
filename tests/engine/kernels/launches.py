"""Which variants of the kernels a runner asks for, on a machine without a GPU: nothing is compiled or computed.

Run as ``python -m tests.engine.kernels.launches SHAPE DTYPE K``; it prints a ``Report`` as JSON. A variant is what
is compiled by itself: its key is made of the constants of a launch, and of what the compiler assumes of the other
arguments (an integer is 1, or a multiple of 16; a pointer is aligned).
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

import engine.runner
from engine import kernels
from engine.config import ModelConfig, parse_config
from engine.kernels.step import FusedOps
from engine.kv.pool import LatentPool
from engine.model.decoder import Decoder
from engine.model.draft import MtpDraft
from engine.model.loader import LoadedModel
from engine.model.report import CheckpointReport
from engine.model.rope import RotaryTable
from engine.prefill import Tokens, token_buckets
from engine.runner import Runner
from engine.sampler import FULL, GREEDY, mask_words
from engine.state import SlotState
from engine.synthetic import PRESETS

CHOSEN = (GREEDY, replace(GREEDY, sampled=True), replace(GREEDY, processed=True), FULL)
SLOTS, CHUNK = 40, 600
LONGEST = 2048
SMALL = PRESETS["tiny"] | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
"""A router, and a vocabulary, that one program looks at whole; queries of one product."""
WIDE = PRESETS["tiny"] | {"hidden_size": 512, "n_routed_experts": 64, "vocab_size": 16384}
"""A router whose logits are summed in parts, and a vocabulary in parts; compressed queries."""
SHAPES = {"small": SMALL, "wide": WIDE}


@dataclass
class Report:
    """Variants of each kernel by name."""

    warm: dict[str, int]
    """How many of them ``Runner.warm_up`` meets."""
    late: dict[str, list[str]]
    """What met further ones after it."""


class Launches:
    """Takes the place of every launch: notes the variant that it asks for."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = defaultdict(set)
        self._launched: list[tuple[str, str]] = []

    def install(self) -> None:
        driver: Any = SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
        triton.runtime.driver.set_active(driver)
        triton.knobs.runtime.jit_cache_hook = self._note
        KernelInterface.__getitem__ = self._launcher

    def take(self) -> Iterator[tuple[str, str]]:
        """Kernel and variant of those launched since the last call that were not launched before."""
        for name, key in self._launched:
            if key not in self.seen[name]:
                self.seen[name].add(key)
                yield name, key
        self._launched.clear()

    def _note(self, *, key: str, fn: Any, **_: Any) -> bool:
        self._launched.append((fn.name, key))
        return True  # which ends the launch before anything is compiled

    @staticmethod
    def _launcher(kernel: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            assert all(0 < extent < 2**31 for extent in grid)
            kernel.run(*arguments, grid=grid, warmup=True, **options)
            for one in arguments:  # what is read as an index later stays in range
                for tensor in one if isinstance(one, tuple) else (one,):
                    if isinstance(tensor, Tensor) and not tensor.is_floating_point():
                        tensor.zero_()

        return launch


class NoAttention:
    """``AttentionBackend`` that leaves attention out."""

    name = "none"
    reads: ClassVar[frozenset[str]] = frozenset()
    gathers: ClassVar[bool] = False

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @classmethod
    def unsupported(cls, spec: object) -> None:
        return None

    def short_length(self, rows: int, stride: int) -> None:
        return None

    def prepare(self, *_: object) -> None: ...

    def prepare_packed(self, *_: object) -> None: ...

    def attend(self, query: Tensor, *_: object) -> Tensor:
        return query[..., : self._rank].contiguous()

    attend_packed = attend


def make_runner(config: ModelConfig, dtype: torch.dtype, k: int) -> Runner:
    """As on a GPU: weights output by output, unpacked, and the fused kernels; their values are never looked at."""
    device = torch.device("cpu")
    rotary = RotaryTable(config, LONGEST, device)
    decoder = Decoder(config, rotary, dtype=dtype, input_major=False)
    draft = MtpDraft(config, rotary, decoder.embedding, decoder.head, dtype=dtype, input_major=False)
    pool = LatentPool(
        num_layers=config.num_hidden_layers + 1,
        num_pages=LONGEST // 64,
        page_size=64,
        latent_dim=config.latent_dim,
        dtype=dtype,
        device=device,
    )
    state = SlotState(
        num_slots=SLOTS,
        num_speculative_tokens=k,
        vocab_size=config.vocab_size,
        table_width=LONGEST // 64,
        device=device,
    )
    runner = Runner(
        model=LoadedModel(decoder, draft, cast(CheckpointReport, None)),
        backend=NoAttention(config.kv_lora_rank),
        pool=pool,
        state=state,
        num_speculative_tokens=k,
        draft_reach=max(0, k - 1),
        hidden_size=config.hidden_size,
        max_uniform_tokens=CHUNK,
    )
    assert isinstance(runner.step.ops, FusedOps)
    runner.step.ops.assemble(132)
    return runner


@contextmanager
def on_fused_kernels() -> Iterator[None]:
    """Tensors of a CPU are served as those of a GPU."""
    before = kernels.fused, engine.runner.fused
    kernels.fused = engine.runner.fused = lambda x: True
    try:
        yield
    finally:
        kernels.fused, engine.runner.fused = before


@torch.inference_mode()
def serve(runner: Runner) -> Iterator[str]:
    """Every prefill of up to ``CHUNK`` tokens, and every eager step; what ran, after it."""
    padding = runner.state.padding_slot
    slots = torch.full((SLOTS,), padding, dtype=torch.int64)
    hidden = torch.zeros(SLOTS, runner._hidden_size, dtype=runner.pool.pages.dtype)
    for tokens in range(1, CHUNK + 1):
        ids = [0] * tokens
        one = Tokens(slots[:1].tolist(), [(0, tokens)], ids, ids)
        runner._prefill.ragged(one, *runner._prefill.staged(one))
        yield f"a prefill of {tokens}"
    for tokens in token_buckets(CHUNK):
        runner._run_uniform_eager(Tokens.none(), tokens)
        yield f"a uniform prefill of {tokens}"
    for rows in range(1, SLOTS + 1):
        for longest in (64, LONGEST):
            for variant in CHOSEN:
                runner.step.run(slots[:rows], (longest,) * rows, variant)
                if runner.draft is not None:
                    runner.step.begin(slots[:rows], (longest,) * rows, variant, hidden[:rows])
        yield f"a step of {rows}"
    words = mask_words(runner.state.vocab_size)
    for variant in CHOSEN:
        for verify_drafts in (True, False):
            width = runner._stride if verify_drafts else 1
            allowed = torch.full((1, width, words), -1, dtype=torch.int32)
            constrained = replace(variant, constrained=True)
            runner.step.run(slots[:1], (64,), constrained, allowed, verify_drafts=verify_drafts)
            runner.step.run(slots[:1], (64,), variant, verify_drafts=verify_drafts)
            yield f"{variant} alone, of {width}"


def report(config: ModelConfig, dtype: torch.dtype, k: int) -> Report:
    launches = Launches()
    launches.install()
    with on_fused_kernels():
        runner = make_runner(config, dtype, k)
        runner.warm_up(CHUNK)
        warm = Counter(name for name, _ in launches.take())
        late: dict[str, list[str]] = {}
        for what in serve(runner):
            for name, _ in launches.take():
                late.setdefault(name, []).append(what)
    return Report(dict(warm), late)


if __name__ == "__main__":
    shape, dtype_name, drafts = sys.argv[1:]
    found = report(parse_config(SHAPES[shape], (1,)), getattr(torch, dtype_name), int(drafts))
    print(json.dumps(asdict(found)))
