"""Runs what the scheduler planned: owns the step, the slots' state and the count of forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import AttentionBackend, PackedAttention
from engine.guard import Flag, classify
from engine.kv.pool import SCRATCH_PAGE, LatentPool
from engine.layout import packed_layout
from engine.model.loader import LoadedModel
from engine.sampler import FULL, GREEDY, choose_variant
from engine.sequence import PrefillChunk, RowResult, Sequence
from engine.spec import SpeculativeStep
from engine.state import SlotState
from engine.types import ForwardCount, ForwardPath, ForwardPhase, ForwardReason, TokenLogprobs

_MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class _DeviceLogprobs:
    """Log-probabilities of the rows that asked for them: ``index`` are their places among the step's rows."""

    index: list[int]
    emitted: Tensor  # [R, W]
    top_values: Tensor  # [R, W, 20]
    top_ids: Tensor  # [R, W, 20]


class PendingStep:
    """A launched step whose results were not read yet."""

    def __init__(
        self, rows: list[tuple[Sequence, int]], packed: Tensor, logprobs: _DeviceLogprobs | None
    ) -> None:
        self._rows = rows
        self._packed = packed
        self._logprobs = logprobs
        self._copied: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._packed = torch.empty_like(packed, device="cpu", pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def results(self) -> list[RowResult]:
        """Wait for the step and say what each row emitted."""
        if self._copied is not None:
            self._copied.synchronize()
        logprobs = self._read_logprobs()
        results = []
        for place, ((sequence, epoch), values) in enumerate(
            zip(self._rows, self._packed.tolist(), strict=True)
        ):
            *emitted, accepted, num_drafts, flags = values
            kept = emitted[: accepted + 1]
            row_logprobs = logprobs[place](kept, sequence) if place in logprobs else None
            results.append(RowResult(sequence, epoch, kept, num_drafts, accepted, flags, row_logprobs))
        return results

    def _read_logprobs(self) -> dict[int, _LogprobReader]:
        if self._logprobs is None:
            return {}
        emitted, values, ids = (
            t.tolist() for t in (self._logprobs.emitted, self._logprobs.top_values, self._logprobs.top_ids)
        )
        return {
            place: _LogprobReader(*row)
            for place, *row in zip(self._logprobs.index, emitted, values, ids, strict=True)
        }


@dataclass(frozen=True, slots=True)
class _LogprobReader:
    """One row's log-probabilities on the host."""

    emitted: list[float]
    top_values: list[list[float]]
    top_ids: list[list[int]]

    def __call__(self, token_ids: list[int], sequence: Sequence) -> list[TokenLogprobs]:
        wanted = sequence.request.params.logprobs or 0
        return [
            TokenLogprobs(
                token, self.emitted[i], list(zip(self.top_ids[i], self.top_values[i], strict=True))[:wanted]
            )
            for i, token in enumerate(token_ids)
        ]


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
        eager_reason: ForwardReason = "no_graphs",
    ) -> None:
        self._decoder = model.decoder
        self._draft = model.draft if num_speculative_tokens else None
        self._backend = backend
        self._pool = pool
        self._state = state
        self._draft_reach = draft_reach
        self._eager_reason = eager_reason
        self._device = pool.pages.device
        self._forwards: Counter[tuple[ForwardPhase, ForwardPath, ForwardReason]] = Counter()
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

    @torch.inference_mode()
    def launch(self, rows: Seq[Sequence]) -> PendingStep:
        """One speculative step over ``rows``; returns without waiting for it."""
        slots = self._slots(rows)
        # The upper bounds hold this step already
        width = self._width(max(row.written_upper_bound for row in rows) + self._draft_reach)
        params = [row.request.params for row in rows]
        out = self.step.run(slots, width, choose_variant(params))
        self._count("step", self._eager_reason)
        wanted = [place for place, p in enumerate(params) if p.logprobs is not None]
        logprobs = _device_logprobs(out.logits, out.packed, wanted) if wanted else None
        return PendingStep([(row, row.epoch) for row in rows], out.packed, logprobs)

    @torch.inference_mode()
    def prefill(self, chunks: Seq[PrefillChunk]) -> None:
        """Write the target's and the draft's KV of ``chunks``; slots with their last chunk can step next."""
        slots = self._slots([chunk.sequence for chunk in chunks])
        spans = [(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        shifted = [token for chunk in chunks for token in chunk.shifted_ids]
        hidden = self._forward_packed(slots, spans, tokens, shifted)
        self._count("prefill", "prefill")
        self._begin(chunks, spans, hidden)

    def scrub(self, page_ids: list[int]) -> None:
        """Zero pages that a fault may have tainted, after everything launched so far."""
        self._pool.scrub(page_ids)

    def _forward_packed(
        self, slots: Tensor, spans: list[tuple[int, int]], tokens: list[int], shifted: list[int]
    ) -> Tensor:
        """A ragged forward of positions ``start..end`` of each slot: the last model's states ``[N, H]``."""
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
        if self._draft is not None:
            hidden = self._draft(hidden, torch.tensor(shifted, device=device), positions, attention)
        return hidden

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
        width = self._width(max(spans[place][1] for place in done) + self._draft_reach)
        variant = choose_variant([sequence.request.params for sequence in sequences])
        self.step.begin(self._slots(sequences), width, variant, hidden)
        self._count("draft", self._eager_reason)

    @torch.inference_mode()
    def warm_up(self, prefill_tokens: int) -> None:
        """Run every phase once on the padding slot, so that the first request meets warm kernels.

        Everything is written to the scratch page, which is zeroed again.
        """
        slots = torch.full((1,), self._state.padding_slot, dtype=torch.int64, device=self._device)
        tokens = [0] * prefill_tokens
        self._forward_packed(slots, [(0, prefill_tokens)], tokens, tokens)
        for variant in (GREEDY, FULL):
            self.step.run(slots, self._state.block_table.shape[1], variant)
        self._pool.scrub([SCRATCH_PAGE])

    def take_forwards(self) -> list[ForwardCount]:
        """Forwards since the last call."""
        counts = [ForwardCount(*key, count) for key, count in self._forwards.items()]
        self._forwards.clear()
        return counts

    def _count(self, phase: ForwardPhase, reason: ForwardReason) -> None:
        self._forwards[(phase, "eager", reason)] += 1

    def _slots(self, rows: Seq[Sequence]) -> Tensor:
        return torch.tensor([row.slot for row in rows], dtype=torch.int64).to(self._device)

    def _width(self, positions: int) -> int:
        """Pages of a block-table row that cover ``positions``."""
        return min(-(-positions // self._pool.page_size), self._state.block_table.shape[1])


def _device_logprobs(logits: Tensor, packed: Tensor, wanted: list[int]) -> _DeviceLogprobs:
    """Log-probabilities of the emitted tokens under the target's raw distribution."""
    index = torch.tensor(wanted, device=logits.device)
    log_probs = logits.index_select(0, index).log_softmax(dim=-1)  # [R, W, V]
    emitted = packed.index_select(0, index)[:, : logits.shape[1], None]
    top = log_probs.topk(min(_MAX_LOGPROBS, log_probs.shape[-1]), dim=-1)
    return _DeviceLogprobs(wanted, log_probs.gather(2, emitted).squeeze(2), top.values, top.indices)
