"""Captured steps: one graph a bucket of rows, frozen at capture, replayed with nothing but new slot ids.

All that a step reads is device state indexed by slot, so the inputs of a captured step are its slots, and for
grammars a mask of allowed tokens. The draft phase behind a prefill is captured too, as ``draft``. What capture
freezes is written down in a ``GraphContract``; each replay compares the contract with the present **by value** and
refuses on the first field that differs. Values that only the device knows (slots as they arrived, lengths, page
ids, query offsets where a kernel reads them) are checked inside the step; their verdict rides in its flag word.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from engine.attention import AttentionBackend
from engine.contract import FREE, Binding, GraphContract, GraphKey, Phase, StepBuffers
from engine.errors import ConfigError
from engine.kv.pool import LatentPool
from engine.layout import uniform_layout
from engine.sampler import FULL, GREEDY, Variant, mask_words
from engine.spec import SpeculativeStep, StepOutput, slots_check
from engine.state import SlotState
from engine.types import ForwardReason, Progress

Outputs = tuple[Tensor, ...]

CONSTRAINED: Final = Variant(sampled=True, truncated=True, processed=True, constrained=True)
VARIANTS: Final = (GREEDY, FULL, CONSTRAINED)
DISABLE_AFTER: Final = 3
"""Contract violations, or faults found in replays, of one graph after which it is not replayed any more."""
_STAGES: Final = 8
"""Pinned copies of the inputs, so that none is overwritten before the device has read it: an iteration uses two
(step and draft phase), and its draft phase is known to be done only when the step two iterations later is."""


def buckets(max_rows: int) -> list[int]:
    """Captured row counts: 1, 2, 4, 8, then by 8; the last is ``max_rows`` itself, whatever it is."""
    steps = [1, 2, 4, *range(8, max_rows + 1, 8)]
    return [rows for rows in steps if rows < max_rows] + [max_rows]


logger = logging.getLogger(__name__)


def _memory_in_use() -> tuple[int, int]:
    """Bytes of the device in use, whoever uses them, and bytes that this process's allocator holds.

    The first knows what the driver takes for graphs, but also what other processes give back meanwhile. What the
    allocator keeps without need is given back first, as a capture would do in between.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_reserved()


class _Captured(Protocol):
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
    """

    def __init__(self, run: Callable[[], Outputs], slots: Tensor) -> None:
        run()  # fills caches with real tensors
        self._slots = slots
        self._trace = make_fx(lambda _: run(), tracing_mode="fake", _allow_non_fake_inputs=True)(slots)

    def replay(self) -> Outputs:
        out: Outputs = self._trace(self._slots)
        return out


class StepGraphs:
    """Captures and replays whole steps.

    Args:
        state, pool: What the step reads and writes in place.
        stride: W.
        max_rows: Largest captured row count.
        mode: ``cuda``, or ``simulate`` for a trace on any device.
        counts: Where events are counted, by metric name and label values.
    """

    def __init__(
        self,
        step: SpeculativeStep,
        state: SlotState,
        pool: LatentPool,
        backend: AttentionBackend,
        *,
        stride: int,
        hidden_size: int,
        max_rows: int,
        mode: Literal["cuda", "simulate"],
        counts: Counter[tuple[str, tuple[str, ...]]],
    ) -> None:
        self._step = step
        self._stride = stride
        self._backend = backend
        self._num_pages = pool.num_pages
        self._table_width = state.block_table.shape[1]
        self._max_len = self._table_width * pool.page_size
        self._bound = [("pages", pool.pages), *state.tensors()]
        self._mode = mode
        self._counts = counts
        self._buckets = buckets(max_rows)
        self._pool: Any = None
        self._captured: dict[GraphKey, tuple[GraphContract, _Captured]] = {}
        self._faults: Counter[GraphKey] = Counter()
        device = state.core.device
        words = mask_words(state.vocab_size)
        self.buffers = StepBuffers(
            padding_slot=state.padding_slot,
            slots=torch.full((1 + max_rows,), state.padding_slot, dtype=torch.int64, device=device),
            allowed=torch.full((max_rows, stride, words), -1, dtype=torch.int32, device=device),
            hidden=torch.zeros((max_rows, hidden_size), dtype=pool.pages.dtype, device=device),
        )
        # A captured kernel knows a layout by its pointers: the layouts live as long as the graphs
        self._layouts = {
            rows: [uniform_layout(rows, one, device) for one in sorted({1, stride})] for rows in self._buckets
        }
        self._stages = [self._make_stage() for _ in range(_STAGES)]
        self._turn = 0
        self.capture_seconds = 0.0
        self.memory_bytes = 0
        """Device memory that capturing took (0 where it cannot be measured)."""

    def capture(self, variants: tuple[Variant, ...], progress: Callable[[Progress], None]) -> None:
        """Capture every bucket, the largest first, into one memory pool.

        Raises:
            ConfigError: An operation cannot be captured.
        """
        on_gpu = self._mode == "cuda"
        start, before = time.perf_counter(), _memory_in_use() if on_gpu else (0, 0)
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        phases: list[Phase] = ["step", "draft"] if self._stride > 1 else ["step"]
        wanted = [
            GraphKey(phase, rows, variant)
            for rows in reversed(self._buckets)
            for phase in phases
            for variant in variants
            if phase == "step" or not variant.constrained
        ]
        for done, key in enumerate(wanted):
            progress(Progress(stage="capturing", done=done, total=len(wanted)))
            self._capture(key)
        progress(Progress(stage="capturing", done=len(wanted), total=len(wanted)))
        self.capture_seconds = time.perf_counter() - start
        if on_gpu:
            self.memory_bytes = max(
                0, *(now - then for now, then in zip(_memory_in_use(), before, strict=True))
            )

    def _capture(self, key: GraphKey) -> None:
        """Capture one graph, over padding rows."""
        self._copy_in(key.rows, [], None, None)
        try:
            self._captured[key] = (self._contract(key), self._capture_one(key))
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"capturing the {key.phase} of {key.rows} rows ({key.variant}) failed: {error}; --graphs off "
                "runs without"
            ) from error

    def _capture_one(self, key: GraphKey) -> _Captured:
        phase, rows, variant = key
        buffers, max_lens = self.buffers, (self._max_len,) * rows
        check, slots, hidden = buffers.slots[:1], buffers.slots[1 : 1 + rows], buffers.hidden[:rows]
        allowed = buffers.allowed[:rows] if variant.constrained else None

        def run() -> Outputs:
            if phase == "draft":
                self._step.begin(slots, max_lens, variant, hidden, check)
                return (slots,)
            out = self._step.run(slots, max_lens, variant, allowed, check)
            return out.packed, out.logits

        return CudaGraph(run, self._pool) if self._mode == "cuda" else SimulatedGraph(run, slots)

    @property
    def captured_rows(self) -> dict[str, list[int]]:
        """Row counts of each phase's graphs, ascending; one entry a graph, so several a count."""
        found: dict[str, list[int]] = {}
        for key in self._captured:
            found.setdefault(key.phase, []).append(key.rows)
        return {phase: sorted(rows) for phase, rows in found.items()}

    @property
    def num_disabled(self) -> dict[str, int]:
        """Graphs of each phase that are not replayed any more."""
        return dict(Counter(key.phase for key, faults in self._faults.items() if faults >= DISABLE_AFTER))

    def run(
        self, slots: list[int], variant: Variant, allowed: Tensor | None
    ) -> tuple[StepOutput, GraphKey] | ForwardReason:
        """Replay the step of ``slots``; or why it cannot be replayed, and must run eager.

        Args:
            variant: Least variant that serves the rows.
            allowed: ``[len(slots), W, words]`` int32 on the host, for a constrained variant.
        """
        out = self._replay("step", slots, variant, allowed, None)
        if isinstance(out, str):
            return out
        tensors, key = out
        return StepOutput(*(one[: len(slots)] for one in tensors)), key

    def begin(self, slots: list[int], variant: Variant, hidden: Tensor) -> ForwardReason | None:
        """Replay the draft phase behind a prefill; or why it must run eager. ``hidden``: ``[len(slots), H]``."""
        out = self._replay("draft", slots, variant, None, hidden)
        return out if isinstance(out, str) else None

    def report(self, key: GraphKey, fields: list[str]) -> None:
        """A replay's own checks found these fields of its contract violated."""
        for name in fields:
            self._counts["graph_contract_violations", (name,)] += 1
        self._faults[key] += 1

    def capture_of(self, key: GraphKey) -> object:
        """The present capture, to be told from a later one."""
        return self._captured[key][1]

    def capture_again(self, key: GraphKey, failed: object) -> None:
        """Replace ``failed``, whose replay failed where the same step run eager did not; or give the graph up.

        One replay may trip many rows: if the capture is another one by now, nothing is left to do.
        """
        if self.capture_of(key) is not failed:
            return
        self._faults[key] += 1
        if self._faults[key] >= DISABLE_AFTER:
            return
        try:
            self._capture(key)
        except ConfigError:
            # The request was rescued; the others must not pay for a capture that, say, found no memory
            logger.exception("the %s of %d rows is not replayed any more", key.phase, key.rows)
            self._faults[key] = DISABLE_AFTER

    def _replay(
        self, phase: Phase, slots: list[int], variant: Variant, allowed: Tensor | None, hidden: Tensor | None
    ) -> tuple[Outputs, GraphKey] | ForwardReason:
        place = bisect_left(self._buckets, len(slots))
        if place == len(self._buckets):
            return "above_bucket"
        rows = self._buckets[place]
        key = GraphKey(phase, rows, self._wider(variant))
        if self._faults[key] >= DISABLE_AFTER:
            return "disabled"
        contract, captured = self._captured[key]
        self._counts["graph_contract_checks", ()] += 1
        violated = contract.violation(self._contract(key))
        if violated is not None:
            self.report(key, [violated])
            return "contract"
        self._copy_in(rows, slots, allowed, hidden)
        out = captured.replay()
        self._counts["graph_replays", (phase, str(rows))] += 1
        self._counts["graph_padding_rows", ()] += rows - len(slots)
        return out, key

    @staticmethod
    def _wider(variant: Variant) -> Variant:
        """The captured variant that serves what ``variant`` does."""
        if variant.constrained:
            return CONSTRAINED
        return GREEDY if variant == GREEDY else FULL

    def _contract(self, key: GraphKey) -> GraphContract:
        """What a replay of this graph would rely on, as it is now."""
        inputs = [(name, tensor) for name, tensor, _ in self.buffers.inputs()]
        offsets = [("cu_seqlens_q", layout.cu_seqlens_q) for layout in self._layouts[key.rows]]
        bound = [*inputs, *self._bound, *(offsets if "cu_seqlens_q" in self._backend.reads else ())]
        return GraphContract(
            phase=key.phase,
            rows=key.rows,
            stride=self._stride,
            variant=key.variant,
            table_width=self._table_width,
            num_pages=self._num_pages,
            padding_slot=self.buffers.padding_slot,
            backend=self._backend.name,
            reads=self._backend.reads,
            bindings=tuple(Binding(name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in bound),
        )

    def _make_stage(self) -> StepBuffers:
        """Host twins of the inputs, pinned where a device copies from them."""
        pinned = self.buffers.slots.is_cuda
        twins = {
            name: torch.full(tensor.shape, filler, dtype=tensor.dtype, pin_memory=pinned)
            for name, tensor, filler in self.buffers.inputs()
        }
        return StepBuffers(padding_slot=self.buffers.padding_slot, **twins)

    def _copy_in(self, rows: int, slots: list[int], allowed: Tensor | None, hidden: Tensor | None) -> None:
        """Write a bucket's inputs: the live rows, then each input's filler up to ``rows``."""
        stage, live = self._stages[self._turn], len(slots)
        self._turn = (self._turn + 1) % _STAGES
        padded = slots + [self.buffers.padding_slot] * (rows - live)
        # By way of numpy: to make a tensor of a list takes ten times as long
        stage.slots.numpy()[: 1 + rows] = [slots_check(padded), *padded]
        self.buffers.slots[: 1 + rows].copy_(stage.slots[: 1 + rows], non_blocking=True)
        if allowed is not None:
            stage.allowed[:live] = allowed
            stage.allowed[live:rows] = FREE
            self.buffers.allowed[:rows].copy_(stage.allowed[:rows], non_blocking=True)
        if hidden is not None:  # it is on the device already
            self.buffers.hidden[:live] = hidden
            self.buffers.hidden[live:rows] = 0
