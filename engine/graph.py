"""Captured steps: one graph a bucket of rows, frozen at capture, replayed with nothing but new slot ids.

All that a step reads is device state indexed by slot, so the inputs of a captured step are its slots, and for
grammars a mask of allowed tokens. The draft phase behind a prefill is captured too, as ``draft``. What capture
freezes is written down in a ``GraphContract``; each replay compares the contract with the present **by value** and
refuses on the first field that differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from engine.errors import ConfigError
from engine.kv.pool import LatentPool
from engine.sampler import FULL, GREEDY, Variant, mask_words
from engine.spec import SpeculativeStep, StepOutput
from engine.state import SlotState
from engine.types import ForwardReason, Progress

Phase = Literal["step", "draft"]
Outputs = tuple[Tensor, ...]
_Key = tuple[Phase, int, Variant]

CONSTRAINED: Final = Variant(sampled=True, truncated=True, processed=True, constrained=True)
VARIANTS: Final = (GREEDY, FULL, CONSTRAINED)
DISABLE_AFTER: Final = 3
"""Contract violations of one graph after which it is not replayed any more."""
_STAGES: Final = 8
"""Pinned copies of the inputs, so that none is overwritten before the device has read it: an iteration uses two
(step and draft phase), and its draft phase is known to be done only when the step two iterations later is."""


def buckets(max_rows: int) -> list[int]:
    """Captured row counts: 1, 2, 4, 8, then by 8; the last is ``max_rows`` itself, whatever it is."""
    steps = [1, 2, 4, *range(8, max_rows + 1, 8)]
    return [rows for rows in steps if rows < max_rows] + [max_rows]


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """The static inputs of every captured step; a bucket binds their leading rows.

    Each field's ``filler`` is what a padding row holds (the slots' is the padding slot, kept in ``padding_slot``).
    """

    padding_slot: int
    slots: Tensor = field(metadata={"filler": 0})
    """``[max_rows]`` int64."""
    allowed: Tensor = field(metadata={"filler": -1})
    """``[max_rows, W, ceil(V / 32)]`` int32, one bit a token; all ones for free and padding rows."""
    hidden: Tensor = field(metadata={"filler": 0})
    """``[max_rows, H]``, the draft's states behind a prefill (phase ``draft`` only)."""

    def inputs(self) -> Iterator[tuple[str, Tensor, int]]:
        """Name, tensor and filler of each input."""
        for one in fields(self):
            if "filler" in one.metadata:
                filler = self.padding_slot if one.name == "slots" else one.metadata["filler"]
                yield one.name, getattr(self, one.name), filler


@dataclass(frozen=True, slots=True)
class Binding:
    """One tensor as a captured kernel knows it."""

    name: str
    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GraphContract:
    """What a captured step holds frozen."""

    phase: Phase
    rows: int
    stride: int
    variant: Variant
    table_width: int
    num_pages: int
    padding_slot: int
    backend: str
    bindings: tuple[Binding, ...]

    def violation(self, now: GraphContract) -> str | None:
        """The first field, or bound tensor, that differs from ``now``; ``None`` if none does."""
        if self == now:
            return None
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(now, one.name)
            if mine == theirs:
                continue
            if one.name != "bindings":
                return one.name
            return next(a.name for a, b in zip(self.bindings, now.bindings, strict=True) if a != b)
        raise AssertionError("unequal contracts differ in a field")


class _Captured(Protocol):
    """A captured phase."""

    def replay(self) -> Outputs: ...


class _CudaGraph:
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


class _SimulatedGraph:
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
        stride: W. backend: The attention backend's name.
        max_rows: Largest captured row count.
        mode: ``cuda``, or ``simulate`` for a trace on any device.
        counts: Where events are counted, by metric name and label values.
    """

    def __init__(
        self,
        step: SpeculativeStep,
        state: SlotState,
        pool: LatentPool,
        *,
        stride: int,
        backend: str,
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
        self._captured: dict[_Key, tuple[GraphContract, _Captured]] = {}
        self._violations: Counter[_Key] = Counter()
        device = state.core.device
        words = mask_words(state.vocab_size)
        self.buffers = StepBuffers(
            padding_slot=state.padding_slot,
            slots=torch.full((max_rows,), state.padding_slot, dtype=torch.int64, device=device),
            allowed=torch.full((max_rows, stride, words), -1, dtype=torch.int32, device=device),
            hidden=torch.zeros((max_rows, hidden_size), dtype=pool.pages.dtype, device=device),
        )
        self._stages = [self._make_stage() for _ in range(_STAGES)]
        self._turn = 0

    def capture(self, variants: tuple[Variant, ...], progress: Callable[[Progress], None]) -> None:
        """Capture every bucket, the largest first, into one memory pool.

        Raises:
            ConfigError: An operation cannot be captured.
        """
        pool = torch.cuda.graph_pool_handle() if self._mode == "cuda" else None
        phases: list[Phase] = ["step", "draft"] if self._stride > 1 else ["step"]
        wanted: list[_Key] = [
            (phase, rows, variant)
            for rows in reversed(self._buckets)
            for phase in phases
            for variant in variants
            if phase == "step" or not variant.constrained
        ]
        for done, key in enumerate(wanted):
            progress(Progress(stage="capturing", done=done, total=len(wanted)))
            self._copy_in(key[1], [], None, None)
            try:
                self._captured[key] = (self._contract(*key), self._capture_one(*key, pool))
            except (RuntimeError, NotImplementedError) as error:
                raise ConfigError(
                    f"capturing the {key[0]} of {key[1]} rows ({key[2]}) failed: {error}; --graphs off runs "
                    "without"
                ) from error
        progress(Progress(stage="capturing", done=len(wanted), total=len(wanted)))

    def _capture_one(self, phase: Phase, rows: int, variant: Variant, pool: Any) -> _Captured:
        buffers, max_lens = self.buffers, (self._max_len,) * rows
        slots, hidden = buffers.slots[:rows], buffers.hidden[:rows]
        allowed = buffers.allowed[:rows] if variant.constrained else None

        def run() -> Outputs:
            if phase == "draft":
                self._step.begin(slots, max_lens, variant, hidden)
                return (slots,)
            out = self._step.run(slots, max_lens, variant, allowed)
            return out.packed, out.logits

        return _CudaGraph(run, pool) if self._mode == "cuda" else _SimulatedGraph(run, slots)

    def run(self, slots: list[int], variant: Variant, allowed: Tensor | None) -> StepOutput | ForwardReason:
        """Replay the step of ``slots``; or why it cannot be replayed, and must run eager.

        Args:
            variant: Least variant that serves the rows.
            allowed: ``[len(slots), W, words]`` int32 on the host, for a constrained variant.
        """
        out = self._replay("step", slots, variant, allowed, None)
        return StepOutput(*(one[: len(slots)] for one in out)) if isinstance(out, tuple) else out

    def begin(self, slots: list[int], variant: Variant, hidden: Tensor) -> ForwardReason | None:
        """Replay the draft phase behind a prefill; or why it must run eager. ``hidden``: ``[len(slots), H]``."""
        out = self._replay("draft", slots, variant, None, hidden)
        return None if isinstance(out, tuple) else out

    def _replay(
        self, phase: Phase, slots: list[int], variant: Variant, allowed: Tensor | None, hidden: Tensor | None
    ) -> Outputs | ForwardReason:
        rows = next((rows for rows in self._buckets if rows >= len(slots)), None)
        if rows is None:
            return "above_bucket"
        key: _Key = (phase, rows, self._wider(variant))
        if self._violations[key] >= DISABLE_AFTER:
            return "disabled"
        contract, captured = self._captured[key]
        self._counts["graph_contract_checks", ()] += 1
        violated = contract.violation(self._contract(*key))
        if violated is not None:
            self._counts["graph_contract_violations", (violated,)] += 1
            self._violations[key] += 1
            return "contract"
        self._copy_in(rows, slots, allowed, hidden)
        out = captured.replay()
        self._counts["graph_replays", (phase, str(rows))] += 1
        self._counts["graph_padding_rows", ()] += rows - len(slots)
        return out

    @staticmethod
    def _wider(variant: Variant) -> Variant:
        """The captured variant that serves what ``variant`` does."""
        if variant.constrained:
            return CONSTRAINED
        return GREEDY if variant == GREEDY else FULL

    def _contract(self, phase: Phase, rows: int, variant: Variant) -> GraphContract:
        """What a replay of this graph would rely on, as it is now."""
        inputs = [(name, tensor[:rows]) for name, tensor, _ in self.buffers.inputs()]
        bound = [*inputs, *self._bound]
        return GraphContract(
            phase=phase,
            rows=rows,
            stride=self._stride,
            variant=variant,
            table_width=self._table_width,
            num_pages=self._num_pages,
            padding_slot=self.buffers.padding_slot,
            backend=self._backend,
            bindings=tuple(
                Binding(name, t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for name, t in bound
            ),
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
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % _STAGES
        given = {"slots": torch.tensor(slots, dtype=torch.int64), "allowed": allowed}
        for (name, target, filler), (_, source, _) in zip(self.buffers.inputs(), stage.inputs(), strict=True):
            live = given.get(name)
            if live is not None:
                source[: len(slots)] = live
                source[len(slots) : rows] = filler
                target[:rows].copy_(source[:rows], non_blocking=True)
        if hidden is not None:  # it is on the device already
            self.buffers.hidden[: len(slots)] = hidden
            self.buffers.hidden[len(slots) : rows] = 0
