"""Captured steps: one graph a bucket of rows, frozen at capture, replayed with nothing but new slot ids.

All that a step reads is device state indexed by slot, so the inputs of a captured step are its slots, and for
grammars a mask of allowed tokens. Prefills of few tokens are captured too, and the draft phase behind them, as
``prefill`` and ``draft``. What capture freezes is written down in a ``GraphContract``; each replay compares the
contract with the present **by value** and refuses on the first field that differs. Values that only the device
knows (slots as they arrived, lengths, page ids, query offsets where a kernel reads them) are checked inside the
step; their verdict rides in its flag word.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.capture import Captured, CudaGraph, Outputs, SimulatedGraph, memory_in_use
from engine.contract import Binding, GraphContract, GraphKey, Phase, StepBuffers
from engine.errors import ConfigError
from engine.kv.pool import LatentPool
from engine.layout import uniform_layout
from engine.prefill import COLUMNS, Prefill, Prefilled, Tokens
from engine.sampler import FULL, GREEDY, Variant, mask_words
from engine.spec import SpeculativeStep, StepOutput
from engine.state import SlotState
from engine.step_inputs import StepInputs
from engine.types import ForwardReason, Progress

CONSTRAINED: Final = Variant(sampled=True, truncated=True, processed=True, constrained=True)
VARIANTS: Final = (GREEDY, FULL, CONSTRAINED)
DISABLE_AFTER: Final = 3
"""Contract violations, or faults found in replays, of one graph after which it is not replayed any more."""


def buckets(max_rows: int) -> list[int]:
    """Captured row counts: 1, 2, 4, 8, then by 8; the last is ``max_rows`` itself, whatever it is."""
    steps = [1, 2, 4, *range(8, max_rows + 1, 8)]
    return [rows for rows in steps if rows < max_rows] + [max_rows]


logger = logging.getLogger(__name__)


class StepGraphs:
    """Captures and replays whole steps, and prefills of few tokens.

    Args:
        state, pool: What they read and write in place.
        stride: W.
        max_rows: Largest captured row count of a step.
        token_buckets: Numbers of tokens of captured prefills, ascending.
        mode: ``cuda``, or ``simulate`` for a trace on any device.
        counts: Where events are counted, by metric name and label values.
    """

    def __init__(
        self,
        step: SpeculativeStep,
        prefill: Prefill,
        state: SlotState,
        pool: LatentPool,
        backend: AttentionBackend,
        *,
        stride: int,
        hidden_size: int,
        max_rows: int,
        token_buckets: list[int],
        mode: Literal["cuda", "simulate"],
        counts: Counter[tuple[str, tuple[str, ...]]],
    ) -> None:
        self._step = step
        self._prefill = prefill
        self._stride = stride
        self._backend = backend
        self._num_pages = pool.num_pages
        self._max_len = state.block_table.shape[1] * pool.page_size
        self._page_size = pool.page_size
        self._bound = [("pages", pool.pages), *state.tensors()]
        self._mode = mode
        self._counts = counts
        self._buckets = buckets(max_rows)
        lengths = {rows: backend.short_length(rows, stride) or self._max_len for rows in self._buckets}
        # To which length the short graphs of a bucket go, of those that have some
        self._short = {rows: length for rows, length in lengths.items() if length < self._max_len}
        self._token_buckets = token_buckets
        self._pool: Any = None
        self._captured: dict[GraphKey, tuple[GraphContract, Captured]] = {}
        self._faults: Counter[GraphKey] = Counter()
        device = state.core.device
        words = mask_words(state.vocab_size)
        buffers = StepBuffers(
            padding_slot=state.padding_slot,
            slots=torch.full((1 + max_rows,), state.padding_slot, dtype=torch.int64, device=device),
            allowed=torch.full((max_rows, stride, words), -1, dtype=torch.int32, device=device),
            hidden=torch.zeros((max_rows, hidden_size), dtype=pool.pages.dtype, device=device),
        )
        most_tokens = max(token_buckets, default=0)
        self.prefill_inputs = torch.zeros((1 + most_tokens, COLUMNS), dtype=torch.int64, device=device)
        """See ``Prefill.uniform``; a bucket binds the leading rows."""
        # A captured kernel knows a layout by its pointers: the layouts live as long as the graphs
        sizes = [(rows, one) for rows in self._buckets for one in sorted({1, stride})]
        sizes += [(tokens, 1) for tokens in self._token_buckets]
        self._layouts = {size: uniform_layout(*size, device) for size in sizes}
        self._inputs = StepInputs(buffers)
        self.capture_seconds = 0.0
        self.memory_bytes = 0
        """Device memory that capturing took (0 where it cannot be measured)."""

    @property
    def buffers(self) -> StepBuffers:
        """The static inputs of steps and draft phases."""
        return self._inputs.buffers

    def capture(self, variants: tuple[Variant, ...], progress: Callable[[Progress], None]) -> None:
        """Capture every bucket, the largest first, into one memory pool.

        Raises:
            ConfigError: An operation cannot be captured.
        """
        on_gpu = self._mode == "cuda"
        start, before = time.perf_counter(), memory_in_use() if on_gpu else (0, 0)
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        wanted = self._wanted(variants)
        for done, key in enumerate(wanted):
            progress(Progress(stage="capturing", done=done, total=len(wanted)))
            self._capture(key)
        progress(Progress(stage="capturing", done=len(wanted), total=len(wanted)))
        self.capture_seconds = time.perf_counter() - start
        if on_gpu:
            self.memory_bytes = max(
                0, *(now - then for now, then in zip(memory_in_use(), before, strict=True))
            )

    def _wanted(self, variants: tuple[Variant, ...]) -> list[GraphKey]:
        phases: list[Phase] = ["step", "draft"] if self._stride > 1 else ["step"]
        steps = [
            GraphKey(phase, rows, variant, short)
            for rows in reversed(self._buckets)
            for phase in phases
            for variant in variants
            if phase == "step" or not variant.constrained
            for short in ([False, True] if rows in self._short else [False])
        ]
        return [GraphKey("prefill", tokens, GREEDY) for tokens in reversed(self._token_buckets)] + steps

    def _capture(self, key: GraphKey) -> None:
        """Capture one graph, over padding rows."""
        if key.phase == "prefill":
            self._copy_in_tokens(Tokens.none(), key.rows)
        else:
            self._inputs.copy_in(key.rows, [], None, None)
        try:
            self._captured[key] = (self._contract(key), self._capture_one(key))
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"capturing the {key.phase} of {key.rows} rows ({key.variant}) failed: {error}; --graphs off "
                "runs without"
            ) from error

    def _capture_one(self, key: GraphKey) -> Captured:
        phase, rows, variant, _ = key
        if phase == "prefill":
            return self._capture_prefill(rows)
        buffers, max_lens = self.buffers, (self.longest(key),) * rows
        check, slots, hidden = buffers.slots[:1], buffers.slots[1 : 1 + rows], buffers.hidden[:rows]
        allowed = buffers.allowed[:rows] if variant.constrained else None

        def run() -> Outputs:
            if phase == "draft":
                return (self._step.begin(slots, max_lens, variant, hidden, check),)
            out = self._step.run(slots, max_lens, variant, allowed, check)
            return out.packed, out.logits

        return self._captured_as(run, slots)

    def _capture_prefill(self, tokens: int) -> Captured:
        inputs = self.prefill_inputs[: 1 + tokens]

        def run() -> Outputs:
            out = self._prefill.uniform(inputs)
            return out.target_hidden, out.hidden, out.found, out.verdict

        return self._captured_as(run, inputs)

    def _captured_as(self, run: Callable[[], Outputs], given: Tensor) -> Captured:
        return CudaGraph(run, self._pool) if self._mode == "cuda" else SimulatedGraph(run, given)

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
        self, slots: list[int], longest: int, variant: Variant, allowed: Tensor | None
    ) -> tuple[StepOutput, GraphKey] | ForwardReason:
        """Replay the step of ``slots``; or why it cannot be replayed, and must run eager.

        Args:
            longest: Positions that one of them can reach, at most.
            variant: Least variant that serves the rows.
            allowed: ``[len(slots), W, words]`` int32 on the host, for a constrained variant.
        """
        key = self._key("step", len(slots), longest, variant)
        if key is None:
            return "above_bucket"
        out = self._replay(key, len(slots), lambda rows: self._inputs.copy_in(rows, slots, allowed, None))
        if isinstance(out, str):
            return out
        return StepOutput(*(one[: len(slots)] for one in out)), key

    def begin(
        self, slots: list[int], longest: int, variant: Variant, hidden: Tensor
    ) -> tuple[Tensor, GraphKey] | ForwardReason:
        """Replay the draft phase behind a prefill; or why it must run eager. ``hidden``: ``[len(slots), H]``."""
        key = self._key("draft", len(slots), longest, variant)
        if key is None:
            return "above_bucket"
        out = self._replay(key, len(slots), lambda rows: self._inputs.copy_in(rows, slots, None, hidden))
        return out if isinstance(out, str) else (out[0][: len(slots)], key)

    def prefill(self, tokens: Tokens, count: int) -> tuple[Prefilled, GraphKey] | ForwardReason:
        """Replay the uniform prefill of ``tokens`` in a bucket of ``count``; or why it cannot be replayed."""
        key = GraphKey("prefill", count, GREEDY)
        out = self._replay(key, len(tokens.ids), lambda rows: self._copy_in_tokens(tokens, rows))
        return out if isinstance(out, str) else (Prefilled(*out), key)

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

    def _key(self, phase: Phase, rows: int, longest: int, variant: Variant) -> GraphKey | None:
        """The graph that serves ``rows`` of a step or draft phase; ``None`` if there is none so large."""
        place = bisect_left(self._buckets, rows)
        if place == len(self._buckets):
            return None
        bucket = self._buckets[place]
        return GraphKey(phase, bucket, self._wider(variant), longest <= self._short.get(bucket, 0))

    def longest(self, key: GraphKey) -> int:
        """Positions that a graph's rows can reach."""
        return self._short[key.rows] if key.short else self._max_len

    def _replay(self, key: GraphKey, live: int, copy_in: Callable[[int], None]) -> Outputs | ForwardReason:
        """Replay a graph for ``live`` of its rows, if its contract holds; ``copy_in`` writes that many rows."""
        if self._faults[key] >= DISABLE_AFTER:
            return "disabled"
        contract, captured = self._captured[key]
        self._counts["graph_contract_checks", ()] += 1
        violated = contract.violation(self._contract(key))
        if violated is not None:
            self.report(key, [violated])
            return "contract"
        copy_in(key.rows)
        out = captured.replay()
        self._counts["graph_replays", (key.phase, str(key.rows))] += 1
        self._counts["graph_padding_rows", ()] += key.rows - live
        return out

    @staticmethod
    def _wider(variant: Variant) -> Variant:
        """The captured variant that serves what ``variant`` does."""
        if variant.constrained:
            return CONSTRAINED
        return GREEDY if variant == GREEDY else FULL

    def _contract(self, key: GraphKey) -> GraphContract:
        """What a replay of this graph would rely on, as it is now."""
        if key.phase == "prefill":
            stride, inputs = 1, [("prefill_inputs", self.prefill_inputs)]
        else:
            stride, inputs = self._stride, [(name, tensor) for name, tensor, _ in self.buffers.inputs()]
        layouts = [self._layouts[key.rows, one] for one in sorted({1, stride})]
        offsets = [("cu_seqlens_q", layout.cu_seqlens_q) for layout in layouts]
        bound = [*inputs, *self._bound, *(offsets if "cu_seqlens_q" in self._backend.reads else ())]
        return GraphContract(
            phase=key.phase,
            rows=key.rows,
            stride=stride,
            variant=key.variant,
            table_width=-(-self.longest(key) // self._page_size),
            num_pages=self._num_pages,
            padding_slot=self.buffers.padding_slot,
            backend=self._backend.name,
            reads=self._backend.reads,
            bindings=tuple(Binding(name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in bound),
        )

    def _copy_in_tokens(self, tokens: Tokens, rows: int) -> None:
        """Write a prefill's inputs, padding up to ``rows``; torch keeps the pinned memory until it is read."""
        self.prefill_inputs[: 1 + rows].copy_(self._prefill.uniform_inputs(tokens, rows), non_blocking=True)
