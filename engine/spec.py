"""The speculative step: verify, accept, extend, draft, commit.

Every forward is ``[B, S]`` (S = W for verify and extend, 1 for a draft step) and nothing in its layout depends
on how many tokens were accepted. There is no host decision and no synchronisation inside, so the whole step is
one sequence of device operations that a graph can capture. What happens between the forwards is in ``StepOps``:
plain operators for every variant and device, fused kernels for greedy steps on a GPU.

Names: B rows, K speculative tokens, W = K + 1, H hidden size, V vocabulary, a accepted drafts (0..K).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import Attention, AttentionBackend, UniformAttention
from engine.guard import Flag
from engine.kv.pool import LatentPool
from engine.layout import UniformLayout, uniform_layout
from engine.model.decoder import Decoder
from engine.model.draft import Draft
from engine.sampler import Variant
from engine.state import NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN, SlotState


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward, gathered from their slots and checked.

    A row that may not run (its slot is halted, or its state broke the contract) is stepped as a padding row: length
    0, token 0, everything written to the scratch page.
    """

    slots: Tensor  # [B] int64
    core: Tensor  # [B, 4 + K] int64
    flags: Tensor  # [B] int64: what halted the slot before, and the contract's verdict
    block_table: Tensor  # [B, pages of the longest row] int32; all scratch for a row that may not run
    max_lens: tuple[int, ...]  # positions that each row can reach, at most
    variant: Variant
    width: int  # tokens of a row to verify: W, or 1 to leave its drafts out

    @property
    def seq_len(self) -> Tensor:
        """``[B]``: positions whose target KV is written."""
        return self.core[:, SEQ_LEN]

    @property
    def num_drafts(self) -> Tensor:
        """``[B, 1]``: drafts to verify, 0 or K."""
        return self.core[:, NUM_DRAFTS, None]

    @property
    def tokens(self) -> Tensor:
        """``[B, width]``: next_token, d1..dK."""
        return self.core[:, NEXT_TOKEN : NEXT_TOKEN + self.width]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tokens of one uniform forward stand."""

    positions: Tensor  # [B * S] int64
    write_slots: Tensor  # [B * S] int64: rows of the pool
    seq_lens: Tensor  # [B] int32: keys of each row, its own S included


@dataclass(frozen=True, slots=True)
class Accepted:
    """What verification decided."""

    emitted: Tensor  # [B, W] int64; columns 0..a are tokens of the output, later ones are garbage
    count: Tensor  # [B] int64: a
    seq_len: Tensor  # [B] int64: positions written before the step, plus a + 1
    last: Tensor  # [B] int64: flat index of each row's token a among the B * W
    flags: Tensor  # [B] int64: the guard's verdict on the target
    output_counts: Tensor | None  # [B, V] int32 with the emitted tokens (processed variants)


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the draft phase proposes."""

    tokens: list[Tensor]  # K of [B] int64
    probs: Tensor | None  # [B, K, V] float32: what each was drawn from (sampled variants)
    found: list[
        Tensor
    ]  # K of [B] int64: the guard's verdict on each one's logits, the contract's on its layout


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of one step, on the device."""

    packed: Tensor  # [B, width + 3] int64: emitted, a, num_drafts that were verified, flags
    logits: Tensor  # [B, width, V]: the target's, for log-probabilities


class StepOps(Protocol):
    """What a step does between its forwards."""

    checks: bool
    """Whether the contract is checked and the guard looks."""

    def load(
        self, slots: Tensor, check: Tensor | None, max_lens: tuple[int, ...], variant: Variant, width: int
    ) -> Rows:
        """Gather and check the state of ``slots`` ``[B]``; see ``SpeculativeStep.run``."""
        ...

    def place(self, rows: Rows, first: Tensor, stride: int, ahead: int = 0) -> Places:
        """The ``stride`` positions of each row from ``first`` ``[B]`` int64 ``+ ahead`` on."""
        ...

    def accept(self, rows: Rows, logits: Tensor, allowed: Tensor | None) -> Accepted:
        """How many drafts stand under ``logits`` ``[B, W, V]``, and the tokens to emit."""
        ...

    def propose(
        self, rows: Rows, logits: Tensor, first: Tensor, counts: Tensor | None, ahead: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """One draft ``[B]`` from ``logits`` ``[B, V]`` for position ``first`` ``[B]`` ``+ ahead``.

        Also the distribution ``[B, V]`` that it was drawn from (sampled variants), and the guard's verdict ``[B]``.
        """
        ...

    def commit(self, rows: Rows, accepted: Accepted, drafted: Drafted | None) -> Tensor:
        """Advance the slots, except halted ones; the packed results ``[B, W + 3]``."""
        ...

    def begin(self, rows: Rows, drafted: Drafted) -> None:
        """Store the first drafts of slots whose prefill just ended."""
        ...


class SpeculativeStep:
    """The step over a decoder, its draft, their latent pool and the slots' state.

    Args:
        draft: ``None`` for K = 0: the step is then a plain decode step of stride 1.
        ops: Serves every variant.
        greedy_ops: Serves greedy steps without history, if given.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        draft: Draft | None,
        backend: AttentionBackend,
        pool: LatentPool,
        state: SlotState,
        num_speculative_tokens: int,
        ops: StepOps,
        greedy_ops: StepOps | None = None,
    ) -> None:
        assert (draft is None) == (num_speculative_tokens == 0), "drafts need a draft model, and only they do"
        self._decoder = decoder
        self._draft_model = draft
        self._backend = backend
        self._pool = pool
        self._state = state
        self._k = num_speculative_tokens
        self._plain_ops = ops
        self._greedy_ops = greedy_ops or ops

    @property
    def checks(self) -> bool:
        """Contract and guard; off only to measure what they cost, and before anything is captured."""
        return self._plain_ops.checks

    @checks.setter
    def checks(self, on: bool) -> None:
        self._plain_ops.checks = self._greedy_ops.checks = on

    def run(
        self,
        slots: Tensor,
        max_lens: tuple[int, ...],
        variant: Variant,
        allowed: Tensor | None = None,
        check: Tensor | None = None,
        verify_drafts: bool = True,
    ) -> StepOutput:
        """One whole step of ``slots`` ``[B]``; ``max_lens``: positions that each can reach, as the host knows.

        Args:
            allowed: ``[B, W, ceil(V / 32)]`` int32, for the constrained variants only: the tokens that each row may
                choose at each position (see ``mask_logits``), all ones where there is no grammar.
            check: ``[1]`` int64, ``slots_check`` of the slots as the host wrote them, where they come from a
                captured step's static buffer.
            verify_drafts: False verifies next_token alone (W = 1 up to the extend phase): the guard's last resort.
        """
        assert variant.constrained == (allowed is not None), (
            "constrained variants read a mask, and only they do"
        )
        width = self._k + 1 if verify_drafts else 1
        ops = self._ops(variant, width)
        rows = ops.load(slots, check, max_lens, variant, width)
        places, attention, verdict = self._inputs(ops, rows, rows.seq_len, width)
        rows = _with_verdict(rows, verdict)
        hidden, logits = self._verify(rows.tokens, places, attention)
        accepted = self._accept(rows, logits, allowed)
        drafted = None
        if self._draft_model is not None:
            draft_hidden, verdict = self._extend(hidden, accepted, places, attention)
            rows = _with_verdict(rows, verdict)
            drafted = self._draft(ops, rows, draft_hidden, accepted.seq_len, accepted.output_counts)
        return StepOutput(ops.commit(rows, accepted, drafted), logits)

    def begin(
        self,
        slots: Tensor,
        max_lens: tuple[int, ...],
        variant: Variant,
        draft_hidden: Tensor,
        check: Tensor | None = None,
    ) -> None:
        """The draft phase alone, for slots whose prefill just ended, so that their first step has K drafts.

        Args:
            draft_hidden: ``[B, H]``, the draft's hidden state at each slot's last written position.
        """
        width = self._k + 1
        ops = self._ops(variant, width)
        rows = ops.load(slots, check, max_lens, variant, width)
        counts = self._state.output_counts.index_select(0, slots) if variant.processed else None
        ops.begin(rows, self._draft(ops, rows, draft_hidden, rows.seq_len, counts))

    def _ops(self, variant: Variant, width: int) -> StepOps:
        greedy = not (variant.sampled or variant.processed or variant.constrained)
        return self._greedy_ops if greedy and width == self._k + 1 else self._plain_ops

    def _inputs(
        self, ops: StepOps, rows: Rows, first: Tensor, stride: int, ahead: int = 0
    ) -> tuple[Places, Attention, Tensor | None]:
        """Places of ``stride`` tokens, attention up to them, and the contract's verdict on the layout."""
        layout = uniform_layout(rows.slots.shape[0], stride, rows.slots.device)
        places = ops.place(rows, first, stride, ahead)
        attention = UniformAttention(
            self._backend,
            self._pool,
            layout,
            rows.block_table,
            places.seq_lens,
            rows.max_lens,
            places.write_slots,
        )
        return places, attention, self._check_layout(layout)

    def _check_layout(self, layout: UniformLayout) -> Tensor | None:
        """``[]`` int64 flags: whether the query offsets still are what ``uniform_layout`` made, by value.

        Only for kernels that read them: for the others there is no such input (``AttentionBackend.reads``).
        """
        if not self.checks or "cu_seqlens_q" not in self._backend.reads:
            return None
        offsets = layout.cu_seqlens_q
        expected = torch.arange(layout.rows + 1, dtype=offsets.dtype, device=offsets.device) * layout.stride
        return (offsets != expected).any() * int(Flag.CU_SEQLENS_Q)

    def _verify(self, tokens: Tensor, places: Places, attention: Attention) -> tuple[Tensor, Tensor]:
        """The target over ``[next_token, d1..dK]``: hidden ``[B * W, H]`` and logits ``[B, W, V]``."""
        hidden = self._decoder(tokens.flatten(), places.positions, attention)
        return hidden, self._decoder.logits(hidden).view(*tokens.shape, -1)

    def _accept(self, rows: Rows, logits: Tensor, allowed: Tensor | None) -> Accepted:
        """How many drafts stand, and the tokens to emit: always distributed as the target's own."""
        return self._ops(rows.variant, rows.width).accept(rows, logits, allowed)

    def _extend(
        self, hidden: Tensor, accepted: Accepted, places: Places, attention: Attention
    ) -> tuple[Tensor, Tensor | None]:
        """The draft over all W (target hidden, emitted token) pairs; its state at row a ``[B, H]``.

        Rows past a are garbage that the next step overwrites and causality hides. The layout is verify's own, the
        same object: the offsets that it holds are checked again where a kernel reads them.
        """
        assert self._draft_model is not None
        rows, stride = accepted.emitted.shape
        layout = uniform_layout(rows, stride, hidden.device)
        out = self._draft_model(hidden, accepted.emitted.flatten(), places.positions, attention)
        return out.index_select(0, accepted.last), self._check_layout(layout)

    def _draft(
        self, ops: StepOps, rows: Rows, hidden: Tensor, seq_len: Tensor, counts: Tensor | None
    ) -> Drafted:
        """K drafts behind the token at position ``seq_len``.

        Args:
            hidden: ``[B, H]``, the draft's state at position ``seq_len - 1``.
            counts: ``[B, V]`` output counts before the first draft (processed variants).
        """
        assert self._draft_model is not None
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        found: list[Tensor] = []
        verdict: Tensor | None = None
        for step in range(self._k):
            if step:
                places, attention, verdict = self._inputs(ops, rows, seq_len, 1, ahead=step - 1)
                hidden = self._draft_model(hidden, tokens[-1], places.positions, attention)
            logits = self._draft_model.logits(hidden)  # [B, V]
            token, chosen_from, flags = ops.propose(rows, logits, seq_len, counts, ahead=1 + step)
            tokens.append(token)
            found.append(flags if verdict is None else flags | verdict)
            if chosen_from is not None:
                probs.append(chosen_from)
            if counts is not None:
                counts = counts.scatter_add(1, token[:, None], torch.ones_like(counts[:, :1]))
        return Drafted(tokens, torch.stack(probs, dim=1) if probs else None, found)


def _with_verdict(rows: Rows, verdict: Tensor | None) -> Rows:
    """``rows`` with a verdict ``[]`` on all of them."""
    return rows if verdict is None else replace(rows, flags=rows.flags | verdict)


def furthest_start(state: SlotState, pool: LatentPool, num_speculative_tokens: int) -> int:
    """The furthest position from which a step still writes within the block table, its draft steps included."""
    reach = num_speculative_tokens + 1 + max(0, num_speculative_tokens - 1)
    return state.block_table.shape[1] * pool.page_size - reach


def slots_check(slots: list[int]) -> int:
    """A check word of a step's slots, fillers included: sum of (place + 1) * (slot + 1)."""
    return sum(place * (slot + 1) for place, slot in enumerate(slots, start=1))
