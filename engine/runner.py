"""Runs what the scheduler planned: owns the step, the slots' state and the count of forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from engine.attention import AttentionBackend, PackedAttention
from engine.graph import VARIANTS, StepGraphs
from engine.guard import Flag, classify
from engine.kv.pool import SCRATCH_PAGE, LatentPool
from engine.layout import packed_layout
from engine.model.loader import LoadedModel
from engine.pending import PendingStep, device_logprobs
from engine.prompt_logprobs import PendingPrefill, score
from engine.sampler import FULL, GREEDY, Variant, choose_variant
from engine.sequence import PrefillChunk, Sequence
from engine.spec import SpeculativeStep, StepOutput
from engine.state import FLAGS, NEXT_TOKEN, NUM_DRAFTS, SlotState
from engine.types import Count, ForwardCount, ForwardPath, ForwardPhase, ForwardReason, Progress

MANY_TOKENS = 32
"""Tokens of a forward from which a CPU gains by more than one thread (measured: docs/performance.md)."""


class Runner:
    """Launches steps and prefills over one model.

    Args:
        draft_reach: Positions past the accepted tokens that draft steps can write.
        eager_reason: Why forwards run eager, as their count says it.
    """

    def __init__(
        self,
        *,
        model: LoadedModel,
        backend: AttentionBackend,
        pool: LatentPool,
        state: SlotState,
        num_speculative_tokens: int,
        draft_reach: int,
        hidden_size: int,
        eager_reason: ForwardReason = "no_graphs",
    ) -> None:
        self._decoder = model.decoder
        self._draft = model.draft if num_speculative_tokens else None
        self._backend = backend
        self._pool = pool
        self._state = state
        self._draft_reach = draft_reach
        self._hidden_size = hidden_size
        self._eager_reason = eager_reason
        self._device = pool.pages.device
        self._stride = num_speculative_tokens + 1
        self._forwards: Counter[tuple[ForwardPhase, ForwardPath, ForwardReason]] = Counter()
        self.counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._graphs: StepGraphs | None = None
        self.step = SpeculativeStep(
            decoder=self._decoder,
            draft=self._draft,
            backend=backend,
            pool=pool,
            state=state,
            num_speculative_tokens=num_speculative_tokens,
        )

    def bind(self, sequence: Sequence, seed: int) -> None:
        """Write a sequence's parameters and known tokens to its slot."""
        assert sequence.slot is not None, f"request {sequence.request.request_id} has no slot to bind"
        self._state.bind(sequence.slot, sequence.tokens, sequence.num_prompt, sequence.request.params, seed)

    def set_pages(self, updates: Seq[tuple[int, int, list[int]]]) -> None:
        """Extend block tables: ``(slot, first index, page ids)``."""
        for slot, first, page_ids in updates:
            row = self._state.block_table[slot, first : first + len(page_ids)]
            row.copy_(torch.tensor(page_ids, dtype=torch.int32), non_blocking=True)

    def read_drafts(self, rows: Seq[Sequence]) -> list[list[int]]:
        """The drafts that the next step verifies for each row, after waiting for everything launched so far."""
        core = self._state.core.index_select(0, self._slots(rows)).tolist()
        return [row[NEXT_TOKEN + 1 :][: row[NUM_DRAFTS]] for row in core]

    @torch.inference_mode()
    def launch(self, rows: Seq[Sequence], allowed: Tensor | None = None) -> PendingStep:
        """One speculative step over ``rows``; returns without waiting for it.

        Args:
            allowed: Where one of them has a grammar: what they may choose (``SpeculativeStep.run``), on the host.
        """
        # The upper bounds hold this step already
        max_lens = tuple(self._reach(row.written_upper_bound) for row in rows)
        params = [row.request.params for row in rows]
        variant = choose_variant(params)
        if allowed is not None:
            variant = replace(variant, constrained=True)
        with self._threads_for(len(rows) * self._stride):
            out = self._replay_or_run(rows, max_lens, variant, allowed)
        self.counts["nan_guard_rows_checked", ("verify",)] += len(rows) * self._stride
        self.counts["nan_guard_rows_checked", ("draft",)] += len(rows) * (self._stride - 1)
        wanted = [place for place, p in enumerate(params) if p.logprobs is not None]
        logprobs = device_logprobs(out.logits, out.packed, wanted) if wanted else None
        return PendingStep([(row, row.epoch) for row in rows], out.packed, logprobs)

    def _replay_or_run(
        self, rows: Seq[Sequence], max_lens: tuple[int, ...], variant: Variant, allowed: Tensor | None
    ) -> StepOutput:
        """The step, replayed where a graph serves it; else eager, counted with the reason."""
        reason = self._eager_reason
        if self._graphs is not None:
            out = self._graphs.run([_slot(row) for row in rows], variant, allowed)
            if isinstance(out, StepOutput):
                self._forwards["step", "replay", "none"] += 1
                return out
            reason = out
        self._count("step", reason)
        if allowed is not None:
            allowed = allowed.to(self._device, non_blocking=True)
        return self.step.run(self._slots(rows), max_lens, variant, allowed)

    @torch.inference_mode()
    def capture(
        self, mode: Literal["cuda", "simulate"], max_rows: int, progress: Callable[[Progress], None]
    ) -> None:
        """Capture the step for every bucket up to ``max_rows``."""
        graphs = StepGraphs(
            self.step,
            self._state,
            self._pool,
            stride=self._stride,
            backend=self._backend.name,
            hidden_size=self._hidden_size,
            max_rows=max_rows,
            mode=mode,
            counts=self.counts,
        )
        graphs.capture(VARIANTS, progress)
        self._pool.scrub([SCRATCH_PAGE])
        self._graphs = graphs

    @torch.inference_mode()
    def prefill(self, chunks: Seq[PrefillChunk]) -> PendingPrefill | None:
        """Write the target's and the draft's KV of ``chunks``; slots with their last chunk can step next.

        Returns:
            What to read of them, if anything; it is not waited for.
        """
        slots = self._slots([chunk.sequence for chunk in chunks])
        spans = [(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        shifted = [token for chunk in chunks for token in chunk.shifted_ids]
        with self._threads_for(len(tokens)):
            target_hidden, hidden = self._forward_packed(slots, spans, tokens, shifted)
        self._count("prefill", "prefill")
        self.counts["nan_guard_rows_checked", ("prefill",)] += len(tokens)
        with self._threads_for(len(chunks)):
            self._begin(chunks, spans, hidden)
        return self._tell(chunks, slots, target_hidden)

    def _tell(self, chunks: Seq[PrefillChunk], slots: Tensor, hidden: Tensor) -> PendingPrefill | None:
        """What is to be read of ``chunks``; ``hidden`` ``[N, H]`` are the target's states of all their tokens."""
        telling = [place for place, chunk in enumerate(chunks) if chunk.sequence.reads_prefill]
        if not telling:
            return None
        parts = hidden.split([len(chunk.token_ids) for chunk in chunks])
        scores = [
            score(self._decoder, self._state.vocab_size, parts[place], chunks[place].shifted_ids)
            if chunks[place].sequence.needs_prompt_logits
            else None
            for place in telling
        ]
        flags = self._state.core[:, FLAGS].index_select(0, slots[telling])
        return PendingPrefill([chunks[place] for place in telling], flags, scores)

    def scrub(self, page_ids: list[int]) -> None:
        """Zero pages that a fault may have tainted, after everything launched so far."""
        self._pool.scrub(page_ids)

    def _forward_packed(
        self, slots: Tensor, spans: list[tuple[int, int]], tokens: list[int], shifted: list[int]
    ) -> tuple[Tensor, Tensor]:
        """A ragged forward of positions ``start..end`` of each slot.

        Returns:
            The target's states and the last model's, ``[N, H]`` each.
        """
        device, size = self._device, self._pool.page_size
        lengths = [end - start for start, end in spans]
        layout = packed_layout(lengths, [start for start, _ in spans])
        table = self._state.block_table.index_select(0, slots)[:, : self._width(max(end for _, end in spans))]
        positions = torch.cat([torch.arange(start, end) for start, end in spans]).to(device)
        owners = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(lengths)).to(device)
        write_slots = table[owners, positions // size].to(torch.int64) * size + positions % size
        attention = PackedAttention(self._backend, self._pool, layout, table, write_slots)
        hidden: Tensor = self._decoder(torch.tensor(tokens, device=device), positions, attention)
        self._state.raise_flags(slots, owners, classify(hidden, Flag.PREFILL_NAN, Flag.PREFILL_INF))
        if self._draft is None:
            return hidden, hidden
        return hidden, self._draft(hidden, torch.tensor(shifted, device=device), positions, attention)

    def _begin(self, chunks: Seq[PrefillChunk], spans: list[tuple[int, int]], draft_hidden: Tensor) -> None:
        """Start the slots whose prefill is complete, with drafts where there is a draft model."""
        last_rows = torch.tensor([end - start for start, end in spans]).cumsum(0) - 1
        done = [place for place, chunk in enumerate(chunks) if chunk.is_last]
        for place in done:
            self._state.start(chunks[place].slot, spans[place][1])
        if self._draft is None or not done:
            return
        sequences = [chunks[place].sequence for place in done]
        hidden = draft_hidden.index_select(0, last_rows[done].to(self._device))
        max_lens = tuple(self._reach(spans[place][1]) for place in done)
        variant = choose_variant([sequence.request.params for sequence in sequences])
        reason: ForwardReason | None = self._eager_reason
        if self._graphs is not None:
            reason = self._graphs.begin([_slot(one) for one in sequences], variant, hidden)
        if reason is None:
            self._forwards["draft", "replay", "none"] += 1
            return
        self._count("draft", reason)
        self.step.begin(self._slots(sequences), max_lens, variant, hidden)

    @torch.inference_mode()
    def warm_up(self, prefill_tokens: int) -> None:
        """Run every phase once on the padding slot, so that the first request meets warm kernels.

        Everything is written to the scratch page, which is zeroed again. On a GPU the step has as many rows as
        there are slots: the KV pool gets the memory that is left beside it.
        """
        count = self._state.num_slots if self._device.type == "cuda" else 1
        slots = torch.full((count,), self._state.padding_slot, dtype=torch.int64, device=self._device)
        longest = self._state.block_table.shape[1] * self._pool.page_size
        tokens = [0] * prefill_tokens
        self._forward_packed(slots, [(0, prefill_tokens)], tokens, tokens)
        for variant in (GREEDY, FULL):
            self.step.run(slots, (longest,) * count, variant)
        self._pool.scrub([SCRATCH_PAGE])

    def take_forwards(self) -> list[ForwardCount]:
        """Forwards since the last call."""
        counts = [ForwardCount(*key, count) for key, count in self._forwards.items()]
        self._forwards.clear()
        return counts

    def take_counts(self) -> list[Count]:
        """Events since the last call."""
        counts = [Count(name, labels, value) for (name, labels), value in self.counts.items()]
        self.counts.clear()
        return counts

    def _count(self, phase: ForwardPhase, reason: ForwardReason) -> None:
        self._forwards[(phase, "eager", reason)] += 1

    @contextmanager
    def _threads_for(self, tokens: int) -> Iterator[None]:
        """On a CPU, one thread for a forward of few tokens: waking others costs more than they save."""
        if self._device.type != "cpu" or tokens >= MANY_TOKENS:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _slots(self, rows: Seq[Sequence]) -> Tensor:
        return torch.tensor([row.slot for row in rows], dtype=torch.int64).to(self._device)

    def _reach(self, written: int) -> int:
        """Positions that a step touches behind ``written`` ones, of those that a block table can name."""
        return min(written + self._draft_reach, self._state.block_table.shape[1] * self._pool.page_size)

    def _width(self, positions: int) -> int:
        """Pages of a block-table row that cover ``positions``."""
        return min(-(-positions // self._pool.page_size), self._state.block_table.shape[1])


def _slot(row: Sequence) -> int:
    assert row.slot is not None, f"request {row.request.request_id} has no slot"
    return row.slot
