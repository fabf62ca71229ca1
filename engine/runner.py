"""Runs what the scheduler planned: owns the step, the slots' state and the count of forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.audit import is_audit
from engine.contract import GraphKey
from engine.graph import VARIANTS, StepGraphs
from engine.guard import CONTRACT, HALTING, Flag
from engine.kernels import fused, row_classes
from engine.kv.pool import SCRATCH_PAGE, LatentPool
from engine.model.loader import LoadedModel
from engine.pending import PendingStep, StepClock, StepRows, device_logprobs
from engine.prefill import MAX_KEYS, Prefill, Prefilled, PrefillRecord, Tokens, UniformRun, token_buckets
from engine.prompt_logprobs import PendingPrefill, tell
from engine.sampler import FULL, GREEDY, Variant, choose_variant, mask_words
from engine.sequence import PrefillChunk, Sequence
from engine.spec import SpeculativeStep, StepOps, StepOutput
from engine.staging import fetch, stage
from engine.state import FLAGS, NEXT_TOKEN, NUM_DRAFTS, SlotState
from engine.step_ops import PlainOps
from engine.threads import threads_for
from engine.types import Count, ForwardCount, ForwardPath, ForwardPhase, ForwardReason, Progress


class Runner:
    """Launches steps and prefills over one model.

    Args:
        draft_reach: Positions past the accepted tokens that draft steps can write.
        max_uniform_tokens: Most tokens of a prefill that runs in the uniform form, which is what can be captured.
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
        max_uniform_tokens: int,
        eager_reason: ForwardReason = "no_graphs",
    ) -> None:
        self.decoder = model.decoder
        self.draft = model.draft if num_speculative_tokens else None
        self._backend = backend
        self.pool = pool
        self.state = state
        self._draft_reach = draft_reach
        self._hidden_size = hidden_size
        self._token_buckets = token_buckets(max_uniform_tokens)
        self._eager_reason = eager_reason
        self._device = pool.pages.device
        self._stride = num_speculative_tokens + 1
        self._forwards: Counter[tuple[ForwardPhase, ForwardPath, ForwardReason]] = Counter()
        self.counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.graphs: StepGraphs | None = None
        self._clock = StepClock(self._device)
        self._rows = StepRows.of([])
        self._prefilled_by: dict[int, list[tuple[PrefillRecord, int]]] = {}
        self._prefill = Prefill(self.decoder, self.draft, backend, pool, state)
        self.step = SpeculativeStep(
            decoder=self.decoder,
            draft=self.draft,
            backend=backend,
            pool=pool,
            num_speculative_tokens=num_speculative_tokens,
            ops=_step_ops(state, pool, num_speculative_tokens),
        )

    def bind(self, sequence: Sequence, seed: int) -> None:
        """Write a sequence's parameters and known tokens to its slot."""
        assert sequence.slot is not None, f"request {sequence.request.request_id} has no slot to bind"
        self.state.bind(sequence.slot, sequence.tokens, sequence.num_prompt, sequence.request.params, seed)
        self._prefilled_by[sequence.slot] = []

    def faulty_prefill(self, row: Sequence) -> PrefillRecord | None:
        """The first forward before ``row``'s first step that found a fault in it; that step has run."""
        records = self._prefilled_by[_slot(row)]
        return next((record for record, place in records if int(record.raised[place]) & HALTING), None)

    @torch.inference_mode()
    def read_drafts(self, rows: Seq[Sequence]) -> list[list[int]]:
        """The drafts that the next step verifies for each row, after waiting for everything launched so far."""
        core = self.state.core.index_select(0, self._slots(rows)).tolist()
        return [row[NEXT_TOKEN + 1 :][: row[NUM_DRAFTS]] for row in core]

    @torch.inference_mode()
    def launch(self, rows: Seq[Sequence], allowed: Tensor | None = None) -> PendingStep:
        """One speculative step over ``rows``; returns without waiting for it.

        Args:
            allowed: Where one of them has a grammar: what they may choose (``SpeculativeStep.run``), on the host.
        """
        pending = self._launch(rows, lambda known: self._replay_or_run(known, allowed))
        self.counts["nan_guard_rows_checked", ("verify",)] += len(rows) * self._stride
        self.counts["nan_guard_rows_checked", ("draft",)] += len(rows) * (self._stride - 1)
        return pending

    @torch.inference_mode()
    def retry(
        self, row: Sequence, allowed: Tensor | None, *, verify_drafts: bool, reason: ForwardReason
    ) -> PendingStep:
        """One eager step of ``row`` alone, after a fault; with ``verify_drafts`` False, of its next token alone.

        What halted the slot in an earlier try is cleared; what its prefill found is not.

        Args:
            allowed: As in ``launch``, ``[1, W or 1, words]``.
        """
        self.state.core[_slot(row), FLAGS] &= int(Flag.PREFILL_NAN | Flag.PREFILL_INF)
        self._count("step", reason)
        return self._launch([row], lambda known: (self._run_eager(known, allowed, verify_drafts), None))

    def _launch(
        self, rows: Seq[Sequence], run: Callable[[StepRows], tuple[StepOutput, GraphKey | None]]
    ) -> PendingStep:
        """Time a step, ``run``, which returns its graph too if it was a replay; and ask for log-probabilities."""
        known = self._step_rows(rows)
        started = self._clock.start()
        with threads_for(len(rows) * self._stride, self._device):
            out, graph = run(known)
        timing = self._clock.stop(started)
        wanted = known.with_logprobs
        logprobs = device_logprobs(out.logits, out.packed, wanted) if wanted else None
        return PendingStep(known, out.packed, logprobs, timing, graph)

    def _step_rows(self, rows: Seq[Sequence]) -> StepRows:
        """What a step needs to know of ``rows``; mostly they are those of the step before, and it is known."""
        members = [(row, row.epoch) for row in rows]
        if members != self._rows.members:
            self._rows = StepRows.of(members)
        return self._rows

    def _replay_or_run(self, rows: StepRows, allowed: Tensor | None) -> tuple[StepOutput, GraphKey | None]:
        """The step, replayed where a graph serves it; else eager, counted with the reason."""
        reason = self._eager_reason
        if self.graphs is not None:
            longest = self._reach(max(row.written_upper_bound for row, _ in rows.members))
            out = self.graphs.run(rows.slots, longest, rows.variant(allowed is not None), allowed)
            if not isinstance(out, str):
                self._forwards["step", "replay", "none"] += 1
                return out
            reason = out
        self._count("step", reason)
        return self._run_eager(rows, allowed), None

    def _run_eager(self, rows: StepRows, allowed: Tensor | None, verify_drafts: bool = True) -> StepOutput:
        # The upper bounds hold this step already
        max_lens = tuple(self._reach(row.written_upper_bound) for row, _ in rows.members)
        variant = rows.variant(allowed is not None)
        slots = stage(rows.slots, torch.int64, self._device)
        if allowed is not None:
            allowed = stage(allowed, allowed.dtype, self._device)
        return self.step.run(slots, max_lens, variant, allowed, verify_drafts=verify_drafts)

    @torch.inference_mode()
    def capture(
        self, mode: Literal["cuda", "simulate"], max_rows: int, progress: Callable[[Progress], None]
    ) -> None:
        """Capture the step for every bucket up to ``max_rows``."""
        graphs = StepGraphs(
            self.step,
            self._prefill,
            self.state,
            self.pool,
            self._backend,
            stride=self._stride,
            hidden_size=self._hidden_size,
            max_rows=max_rows,
            token_buckets=self._token_buckets,
            mode=mode,
            counts=self.counts,
        )
        graphs.capture(VARIANTS, progress)
        self.pool.scrub([SCRATCH_PAGE])
        self.graphs = graphs

    @torch.inference_mode()
    def capture_again(self, key: GraphKey, failed: object) -> None:
        """Replace a capture whose replay failed where the same step run eager did not."""
        assert self.graphs is not None, "without graphs there is no replay to fail"
        self.graphs.capture_again(key, failed)
        self.pool.scrub([SCRATCH_PAGE])

    @torch.inference_mode()
    def prefill(self, chunks: Seq[PrefillChunk]) -> PendingPrefill | None:
        """Write the target's and the draft's KV of ``chunks``; slots with their last chunk can step next.

        Returns:
            What to read of them, if anything; it is not waited for.
        """
        self._clock.interrupt()
        tokens = Tokens.of(chunks)
        live, (slots, owners) = len(tokens.ids), self._prefill.staged(tokens)
        with threads_for(live, self._device):
            out, run = self._run_prefill([chunk.sequence for chunk in chunks], tokens, slots, owners)
        raised = self.state.raise_flags(slots, owners, out.found[:live], out.verdict)
        if run is not None:
            record = PrefillRecord(run, fetch(raised))
            for place, slot in enumerate(tokens.slots):
                self._prefilled_by[slot].append((record, place))
        self.counts["nan_guard_rows_checked", ("prefill",)] += live
        with threads_for(len(chunks), self._device):
            self._begin(chunks, tokens, out.hidden)
        return tell(self.decoder, self.state, chunks, slots, out.target_hidden[:live])

    def _run_prefill(
        self, sequences: Seq[Sequence], tokens: Tokens, slots: Tensor, owners: Tensor
    ) -> tuple[Prefilled, UniformRun | None]:
        """Their forward: uniform where it is small, else ragged and eager (``None``).

        What is there to find fault with the others stays ragged: audits, and prefills after a fault. So do those
        whose findings are read at once, which must not be told of a replay's fault.
        """
        reason: ForwardReason = "prefill"
        count = next((one for one in self._token_buckets if one >= len(tokens.ids)), None)
        if all(is_audit(one.request.request_id) for one in sequences):
            reason = "audit"
        elif any(one.rebuilt for one in sequences):
            reason = "retry"
        elif count and tokens.num_keys <= MAX_KEYS and not any(one.reads_prefill for one in sequences):
            if self.graphs is None:
                self._count("prefill", reason)
                return self._run_uniform_eager(tokens, count), UniformRun(None, None)
            out = self.graphs.prefill(tokens, count)
            if not isinstance(out, str):
                self._forwards["prefill", "replay", "none"] += 1
                prefilled, key = out
                return prefilled, UniformRun(key, self.graphs.capture_of(key))
            reason = out  # and in another form: what turned the graph off may be at fault eager too
        self._count("prefill", reason)
        return self._prefill.ragged(tokens, slots, owners), None

    def _run_uniform_eager(self, tokens: Tokens, count: int) -> Prefilled:
        """As a graph of ``count`` tokens would run it, padding included: the results are the same."""
        inputs = self._prefill.uniform_inputs(tokens, count)
        return self._prefill.uniform(inputs.to(self._device, non_blocking=True))

    def scrub(self, page_ids: list[int]) -> None:
        """Zero pages that a fault may have tainted, after everything launched so far."""
        self.pool.scrub(page_ids)

    def _begin(self, chunks: Seq[PrefillChunk], tokens: Tokens, draft_hidden: Tensor) -> None:
        """Start the slots whose prefill is complete and who will step, with drafts where there is a draft model."""
        spans, last_rows = tokens.spans, torch.tensor(tokens.lengths).cumsum(0) - 1
        ready = (chunk.is_last and not chunk.sequence.only_prefills for chunk in chunks)
        done = [place for place, is_ready in enumerate(ready) if is_ready]
        for place in done:
            self.state.start(chunks[place].slot, spans[place][1])
        if self.draft is None or not done:
            return
        sequences = [chunks[place].sequence for place in done]
        hidden = draft_hidden.index_select(0, stage(last_rows[done], torch.int64, self._device))
        max_lens = tuple(self._reach(spans[place][1]) for place in done)
        variant = choose_variant([sequence.request.params for sequence in sequences])
        slots = self._slots(sequences)
        flags, run = self._draft_first(sequences, slots, max_lens, variant, hidden)
        # Told by the slots' first steps, also if the replay took others for them
        raised = flags & int(CONTRACT)
        self.state.core[slots, FLAGS] |= raised
        record = PrefillRecord(run, fetch(raised))
        for place, sequence in enumerate(sequences):
            self._prefilled_by[_slot(sequence)].append((record, place))

    def _draft_first(
        self,
        sequences: Seq[Sequence],
        slots: Tensor,
        max_lens: tuple[int, ...],
        variant: Variant,
        hidden: Tensor,
    ) -> tuple[Tensor, UniformRun]:
        """The draft phase behind prefills: the flags ``[B]`` that it raised, and how it ran."""
        reason: ForwardReason = self._eager_reason
        if any(one.rebuilt for one in sequences):
            reason = "retry"
        elif self.graphs is not None:
            out = self.graphs.begin([_slot(one) for one in sequences], max(max_lens), variant, hidden)
            if not isinstance(out, str):
                self._forwards["draft", "replay", "none"] += 1
                flags, key = out
                return flags, UniformRun(key, self.graphs.capture_of(key))
            reason = out
        self._count("draft", reason)
        return self.step.begin(slots, max_lens, variant, hidden), UniformRun(None, None)

    @torch.inference_mode()
    def warm_up(self, prefill_tokens: int) -> None:
        """Run every phase on the padding slot, so that requests meet warm kernels: none is compiled for them.

        Everything is written to the scratch page, which is zeroed again. On a GPU the step has as many rows as
        there are slots: the KV pool gets the memory that is left beside it.
        """
        compiled = fused(self.pool.pages)
        most = self.state.num_slots if compiled else 1
        slots = torch.full((most,), self.state.padding_slot, dtype=torch.int64, device=self._device)
        longest = self.state.block_table.shape[1] * self.pool.page_size
        for count in row_classes(prefill_tokens) if compiled else [prefill_tokens]:
            ids = [0] * count
            tokens = Tokens([self.state.padding_slot], [(0, count)], ids, ids)
            self._prefill.ragged(tokens, *self._prefill.staged(tokens))
        for count in self._token_buckets:
            self._run_uniform_eager(Tokens.none(), count)
        for count in row_classes(most):
            for length in self._warm_lengths(count, longest) if compiled else [longest]:
                self._warm_up_steps(slots[:count], (length,) * count)
        if compiled:
            for length in self._warm_lengths(1, longest):
                self._warm_up_alone(slots[:1], length)
        self.pool.scrub([SCRATCH_PAGE])

    def _warm_lengths(self, rows: int, longest: int) -> set[int]:
        """Bounds of rows' lengths that choose other kernels: those of whole steps, and of single tokens."""
        short = [self._backend.short_length(rows, stride) for stride in (self._stride, 1)]
        return {longest, *(min(length, longest) for length in short if length is not None)}

    def _warm_up_steps(self, slots: Tensor, max_lens: tuple[int, ...]) -> None:
        for variant in (GREEDY, FULL):
            self.step.run(slots, max_lens, variant)
            if fused(self.pool.pages) and self.draft is not None:
                hidden = self.pool.pages.new_zeros((len(max_lens), self._hidden_size))
                self.step.begin(slots, max_lens, variant, hidden)

    def _warm_up_alone(self, slot: Tensor, longest: int) -> None:
        """The forms of a step that rows under a grammar take, and rows that step alone after a fault."""
        words = mask_words(self.state.vocab_size)
        for verify_drafts in (True, False):
            width = self._stride if verify_drafts else 1
            free = torch.full((1, width, words), -1, dtype=torch.int32, device=self._device)
            for variant in VARIANTS:
                allowed = free if variant.constrained else None
                self.step.run(slot, (longest,), variant, allowed, verify_drafts=verify_drafts)

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

    def _slots(self, rows: Seq[Sequence]) -> Tensor:
        return stage([_slot(row) for row in rows], torch.int64, self._device)

    def _reach(self, written: int) -> int:
        """Positions that a step touches behind ``written`` ones, of those that a block table can name."""
        return min(written + self._draft_reach, self.state.block_table.shape[1] * self.pool.page_size)


def _step_ops(state: SlotState, pool: LatentPool, num_speculative_tokens: int) -> StepOps:
    """The fused operators on a GPU, else the plain ones."""
    if not fused(pool.pages):
        return PlainOps(state, pool, num_speculative_tokens)
    from engine.kernels.step import FusedOps  # Triton is no part of a CPU installation

    return FusedOps(state, pool, num_speculative_tokens)


def _slot(row: Sequence) -> int:
    assert row.slot is not None, f"request {row.request.request_id} has no slot"
    return row.slot
