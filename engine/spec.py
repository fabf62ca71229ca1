"""The speculative step: verify, accept, extend, draft, commit.

Every forward is ``[B, S]`` (S = W for verify and extend, 1 for a draft step) and nothing in its layout depends
on how many tokens were accepted. There is no host decision and no synchronisation inside, so the whole step is
one sequence of device operations that a graph can capture. What happens between the forwards is in ``StepOps``:
plain operators for any device, fused kernels on a GPU.

Names: B rows, K speculative tokens, W = K + 1, H hidden size, V vocabulary, a accepted drafts (0..K).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import Attention, AttentionBackend, UniformAttention
from engine.kv.pool import LatentPool
from engine.layout import UniformLayout, layout_verdict, uniform_layout
from engine.model.decoder import Decoder
from engine.model.draft import Draft
from engine.rng import place_weights
from engine.sampler import Variant
from engine.state import NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN


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
    width: int  # tokens of a row to verify: W, 1 to leave its drafts out, or 0 in a draft phase alone

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
    history: Tensor | None  # [B, W] int64: the emitted tokens, -1 past the accepted ones (processed variants)


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the draft phase proposes."""

    tokens: list[Tensor]  # K of [B] int64
    probs: Tensor | None  # [B, K, V] float32: what each was drawn from, if it is not stored yet
    found: list[Tensor]  # K of [B] int64: the guard's verdict on its logits, the contract's on its layout


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
        """Gather and check the state of ``slots`` ``[B]``; see ``SpeculativeStep.run``.

        Args:
            width: Tokens that the forward writes from each row's length on: W, 1 to leave its drafts out, or 0 for
                a draft phase alone.
        """
        ...

    def place(self, rows: Rows, first: Tensor, stride: int, ahead: int = 0) -> Places:
        """The ``stride`` positions of each row from ``first`` ``[B]`` int64 ``+ ahead`` on."""
        ...

    def accept(self, rows: Rows, logits: Tensor, allowed: Tensor | None) -> Accepted:
        """How many drafts stand under ``logits`` ``[B, W, V]``, and the tokens to emit."""
        ...

    def propose(
        self, rows: Rows, logits: Tensor, first: Tensor, history: Tensor | None, number: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Draft ``number`` (0..K-1) ``[B]`` from ``logits`` ``[B, V]``, for position ``first + 1 + number``.

        Also the distribution ``[B, V]`` that it was drawn from, unless the slot has it already or all rows are
        greedy; and the guard's verdict ``[B]``.

        Args:
            history: ``[B, R]`` int64: tokens behind those that the slot has counted, -1 for none (processed
                variants).
        """
        ...

    def commit(self, rows: Rows, accepted: Accepted, drafted: Drafted | None) -> Tensor:
        """Advance the slots, except halted ones; the packed results ``[B, W + 3]``."""
        ...

    def begin(self, rows: Rows, drafted: Drafted) -> None:
        """Store the first drafts of slots whose prefill just ended."""
        ...


class SpeculativeStep:
    """The step over a decoder, its draft and their latent pool.

    Args:
        draft: ``None`` for K = 0: the step is then a plain decode step of stride 1.

    Attributes:
        ops: What happens between the forwards.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        draft: Draft | None,
        backend: AttentionBackend,
        pool: LatentPool,
        num_speculative_tokens: int,
        ops: StepOps,
    ) -> None:
        assert (draft is None) == (num_speculative_tokens == 0), "drafts need a draft model, and only they do"
        self._decoder = decoder
        self._draft_model = draft
        self._backend = backend
        self._pool = pool
        self._k = num_speculative_tokens
        self.ops = ops

    @property
    def checks(self) -> bool:
        """Contract and guard; off only to measure what they cost, and before anything is captured."""
        return self.ops.checks

    @checks.setter
    def checks(self, on: bool) -> None:
        self.ops.checks = on

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
        rows = self.ops.load(slots, check, max_lens, variant, width)
        places, attention, verdict = self._inputs(rows, rows.seq_len, width)
        rows = _with_verdict(rows, verdict)
        hidden, logits = self._verify(rows.tokens, places, attention)
        accepted = self.ops.accept(rows, logits, allowed)
        drafted = None
        if self._draft_model is not None:
            draft_hidden, verdict = self._extend(hidden, accepted, places, attention)
            rows = _with_verdict(rows, verdict)
            drafted = self._draft(rows, draft_hidden, accepted.seq_len, accepted.history)
        return StepOutput(self.ops.commit(rows, accepted, drafted), logits)

    def begin(
        self,
        slots: Tensor,
        max_lens: tuple[int, ...],
        variant: Variant,
        draft_hidden: Tensor,
        check: Tensor | None = None,
    ) -> Tensor:
        """The draft phase alone, for slots whose prefill just ended, so that their first step has K drafts.

        Args:
            draft_hidden: ``[B, H]``, the draft's hidden state at each slot's last written position.

        Returns:
            ``[B]`` int64, the flags that it raised. They are its rows', also where those were not their slots.
        """
        rows = self.ops.load(slots, check, max_lens, variant, 0)
        history = slots.new_empty((slots.shape[0], 0)) if variant.processed else None
        drafted = self._draft(rows, draft_hidden, rows.seq_len, history)
        self.ops.begin(rows, drafted)
        flags = rows.flags
        for found in drafted.found:
            flags = flags | found
        return flags

    def _inputs(
        self, rows: Rows, first: Tensor, stride: int, ahead: int = 0
    ) -> tuple[Places, Attention, Tensor | None]:
        """Places of ``stride`` tokens, attention up to them, and the contract's verdict on the layout."""
        layout = uniform_layout(rows.slots.shape[0], stride, rows.slots.device)
        places = self.ops.place(rows, first, stride, ahead)
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
        """``layout_verdict``, unless the contract is turned off."""
        return layout_verdict(layout, self._backend.reads) if self.checks else None

    def _verify(self, tokens: Tensor, places: Places, attention: Attention) -> tuple[Tensor, Tensor]:
        """The target over ``[next_token, d1..dK]``: hidden ``[B * W, H]`` and logits ``[B, W, V]``."""
        hidden = self._decoder(tokens.flatten(), places.positions, attention)
        return hidden, self._decoder.logits(hidden).view(*tokens.shape, -1)

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

    def _draft(self, rows: Rows, hidden: Tensor, seq_len: Tensor, history: Tensor | None) -> Drafted:
        """K drafts behind the token at position ``seq_len``.

        Args:
            hidden: ``[B, H]``, the draft's state at position ``seq_len - 1``.
            history: ``[B, R]`` int64, see ``StepOps.propose``; the drafts join it.
        """
        assert self._draft_model is not None
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        found: list[Tensor] = []
        verdict: Tensor | None = None
        for number in range(self._k):
            if number:
                places, attention, verdict = self._inputs(rows, seq_len, 1, ahead=number - 1)
                hidden = self._draft_model(hidden, tokens[-1], places.positions, attention)
            logits = self._draft_model.logits(hidden)  # [B, V]
            token, drawn_from, flags = self.ops.propose(rows, logits, seq_len, history, number)
            tokens.append(token)
            found.append(flags if verdict is None else flags | verdict)
            if drawn_from is not None:
                probs.append(drawn_from)
            if history is not None:
                history = torch.cat([history, token[:, None]], dim=1)
        return Drafted(tokens, torch.stack(probs, dim=1) if probs else None, found)


def _with_verdict(rows: Rows, verdict: Tensor | None) -> Rows:
    """``rows`` with a verdict ``[]`` on all of them."""
    return rows if verdict is None else replace(rows, flags=rows.flags | verdict)


def furthest_start(pages: int, page_size: int, width: int, num_speculative_tokens: int) -> int:
    """The furthest length from which a phase still writes within ``pages`` of a block table.

    It writes ``width`` positions from there on (see ``StepOps.load``), and behind the tokens accepted out of them
    K - 1 more for drafts.
    """
    return pages * page_size - width - max(0, num_speculative_tokens - 1)


def slots_check(slots: list[int]) -> int:
    """A check word of a step's slots, fillers included: each in its place, in wrapping int64 arithmetic.

    Weights are as good as random, so that no likely change of several slots leaves it as it was.
    """
    total = sum(weight * (slot + 1) for weight, slot in zip(place_weights(len(slots)), slots, strict=True))
    return (total + 2**63) % 2**64 - 2**63
