"""The speculative step: verify, accept, extend, draft, commit.

Every forward is ``[B, S]`` (S = W for verify and extend, 1 for a draft step) and nothing in its layout depends
on how many tokens were accepted. There is no host decision and no synchronisation inside, so the whole step is
one sequence of device operations that a graph can capture.

Names: B rows, K speculative tokens, W = K + 1, H hidden size, V vocabulary, a accepted drafts (0..K).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import Attention, AttentionBackend, UniformAttention
from engine.guard import Flag, classify, is_halted, reduce_rows
from engine.kv.pool import SCRATCH_PAGE, LatentPool
from engine.layout import uniform_layout
from engine.model.decoder import Decoder
from engine.model.draft import Draft
from engine.rng import Purpose, uniforms
from engine.sampler import Variant, distribution, draw, mask_logits, process_logits
from engine.state import FLAGS, NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN, SlotState


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward, gathered from their slots."""

    slots: Tensor  # [B] int64
    core: Tensor  # [B, 4 + K] int64
    halted: Tensor  # [B] bool: a fault stopped the slot; the step must be a no-op for it
    block_table: Tensor  # [B, pages of the longest row] int32; all scratch for a halted row
    max_lens: tuple[int, ...]  # positions that each row can reach, at most
    variant: Variant

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
        """``[B, W]``: next_token, d1..dK."""
        return self.core[:, NEXT_TOKEN:]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What verification decided."""

    emitted: Tensor  # [B, W] int64; columns 0..a are tokens of the output, later ones are garbage
    count: Tensor  # [B] int64: a
    seq_len: Tensor  # [B] int64: positions written before the step, plus a + 1
    flags: Tensor  # [B] int64: the guard's verdict on the target
    output_counts: Tensor | None  # [B, V] int32 with the emitted tokens (processed variants)


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the draft phase proposes."""

    tokens: Tensor  # [B, K] int64
    probs: Tensor | None  # [B, K, V] float32: what each was drawn from (sampled variants)
    flags: Tensor  # [B] int64: the guard's verdict on the draft


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of one step, on the device."""

    packed: Tensor  # [B, W + 3] int64: emitted, a, num_drafts that were verified, flags
    logits: Tensor  # [B, W, V]: the target's, for log-probabilities


class SpeculativeStep:
    """The step over a decoder, its draft, their latent pool and the slots' state.

    Args:
        draft: ``None`` for K = 0: the step is then a plain decode step of stride 1.
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
    ) -> None:
        assert (draft is None) == (num_speculative_tokens == 0), "drafts need a draft model, and only they do"
        self._decoder = decoder
        self._draft_model = draft
        self._backend = backend
        self._pool = pool
        self._state = state
        self._k = num_speculative_tokens

    def run(
        self, slots: Tensor, max_lens: tuple[int, ...], variant: Variant, allowed: Tensor | None = None
    ) -> StepOutput:
        """One whole step of ``slots`` ``[B]``; ``max_lens``: positions that each can reach, as the host knows.

        ``allowed`` ``[B, W, ceil(V / 32)]`` int32, for the constrained variants only: the tokens that each row may
        choose at each position (see ``mask_logits``), all ones where there is no grammar.
        """
        assert variant.constrained == (allowed is not None), (
            "constrained variants read a mask, and only they do"
        )
        rows = self._load(slots, max_lens, variant)
        positions, attention = self._forward_inputs(rows, rows.seq_len, self._k + 1)
        hidden, logits = self._verify(rows.tokens, positions, attention)
        accepted = self._accept(rows, logits, allowed)
        drafted = None
        if self._draft_model is not None:
            draft_hidden = self._extend(hidden, accepted, positions, attention)
            drafted = self._draft(rows, draft_hidden, accepted.seq_len, accepted.output_counts)
        flags = self._commit(rows, accepted, drafted)
        results = [accepted.emitted, accepted.count[:, None], rows.num_drafts, flags[:, None]]
        return StepOutput(torch.cat(results, dim=1), logits)

    def begin(self, slots: Tensor, max_lens: tuple[int, ...], variant: Variant, draft_hidden: Tensor) -> None:
        """The draft phase alone, for slots whose prefill just ended, so that their first step has K drafts.

        Args:
            draft_hidden: ``[B, H]``, the draft's hidden state at each slot's last written position.
        """
        rows = self._load(slots, max_lens, variant)
        counts = self._state.output_counts.index_select(0, slots) if variant.processed else None
        drafted = self._draft(rows, draft_hidden, rows.seq_len, counts)
        core = rows.core.clone()
        core[:, NUM_DRAFTS] = self._usable(drafted)
        core[:, FLAGS] |= drafted.flags  # told with the first step's results
        core[:, NEXT_TOKEN + 1 :] = drafted.tokens
        self._store(slots, core, drafted, None)

    def _load(self, slots: Tensor, max_lens: tuple[int, ...], variant: Variant) -> Rows:
        """Gather the slots' state."""
        core = self._state.core.index_select(0, slots)
        halted = is_halted(core[:, FLAGS])
        width = -(-max(max_lens) // self._pool.page_size)
        table = self._state.block_table.index_select(0, slots)[:, :width]
        return Rows(slots, core, halted, table.masked_fill(halted[:, None], SCRATCH_PAGE), max_lens, variant)

    def _forward_inputs(self, rows: Rows, first: Tensor, stride: int) -> tuple[Tensor, Attention]:
        """Positions ``[B, stride]`` from ``first`` ``[B]``, and attention over everything up to them."""
        layout = uniform_layout(rows.slots.shape[0], stride, rows.slots.device)
        positions = first[:, None] + layout.offsets
        size = self._pool.page_size
        pages = rows.block_table.gather(1, positions // size)
        write_slots = (pages * size + positions % size).flatten()
        attention = UniformAttention(
            self._backend, self._pool, layout, rows.block_table, first + stride, rows.max_lens, write_slots
        )
        return positions, attention

    def _verify(self, tokens: Tensor, positions: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        """The target over ``[next_token, d1..dK]``: hidden ``[B * W, H]`` and logits ``[B, W, V]``."""
        hidden = self._decoder(tokens.flatten(), positions.flatten(), attention)
        logits = self._decoder.logits(hidden).float()
        return hidden, logits.view(*tokens.shape, -1)

    def _accept(self, rows: Rows, logits: Tensor, allowed: Tensor | None) -> Accepted:
        """How many drafts stand, and the tokens to emit: always distributed as the target's own."""
        drafts = rows.tokens[:, 1:]
        offsets = uniform_layout(1, self._k + 1, logits.device).offsets
        decided = rows.seq_len[:, None] + 1 + offsets  # [B, W]: position of the token that each row decides
        found = classify(logits, Flag.TARGET_NAN, Flag.TARGET_INF)  # [B, W]
        if allowed is not None:
            logits = mask_logits(logits, allowed)
        counts = None
        if rows.variant.processed:
            counts = self._state.output_counts.index_select(0, rows.slots)
            history = _counts_along_run(counts, drafts)
            logits = process_logits(logits, self._state, rows.slots, history, decided)
        valid = offsets[: self._k] < rows.num_drafts  # [B, K]
        if rows.variant.sampled:
            emitted, count = self._reject(rows, drafts, valid, decided, logits)
        else:
            emitted = logits.argmax(dim=-1)
            count = _leading_true((emitted[:, : self._k] == drafts) & valid)
        kept = offsets <= count[:, None]  # [B, W]
        ignored = torch.where(((found > 0) & ~kept).any(dim=1), int(Flag.IGNORED), 0)
        if counts is not None:
            counts = counts.scatter_add(1, emitted, kept.to(torch.int32))
        flags = reduce_rows(found, kept) | ignored
        return Accepted(emitted, count, rows.seq_len + count + 1, flags, counts)

    def _reject(
        self, rows: Rows, drafts: Tensor, valid: Tensor, decided: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rejection sampling (Leviathan et al., 2023) against the drafts' own distributions.

        A place without a draft (``valid`` False) is a forced rejection that draws from the target itself.
        """
        target_probs = distribution(logits, self._state, rows.slots, rows.variant.truncated)  # [B, W, V]
        keys = self._state.keys.index_select(0, rows.slots)[:, None]
        draft_probs = self._state.draft_probs.index_select(0, rows.slots)  # [B, K, V]
        target = target_probs[:, : self._k].gather(2, drafts[:, :, None]).squeeze(2)
        proposed = draft_probs.gather(2, drafts[:, :, None]).squeeze(2)
        chance = uniforms(keys, decided[:, : self._k], Purpose.ACCEPT)
        count = _leading_true((chance * proposed < target) & valid)
        last = _rows_at(target_probs, count)  # [B, V]
        if self._k:
            rejected = _at(torch.nn.functional.pad(valid, (0, 1)), count)  # [B, 1]: a real draft was refused
            proposed_last = _rows_at(draft_probs, count.clamp_max(self._k - 1))
            residual = (last - proposed_last).clamp_min(0)
            use = rejected & (residual.sum(dim=-1, keepdim=True) > 0)
            last = torch.where(use, residual, last)
        position = decided.gather(1, count[:, None])
        token = draw(last, uniforms(keys, position, Purpose.TOKEN).squeeze(1))
        padded = torch.nn.functional.pad(drafts, (0, 1))
        return padded.scatter(1, count[:, None], token[:, None]), count

    def _extend(self, hidden: Tensor, accepted: Accepted, positions: Tensor, attention: Attention) -> Tensor:
        """The draft over all W (target hidden, emitted token) pairs; its state at row a ``[B, H]``.

        Rows past a are garbage that the next step overwrites and causality hides.
        """
        assert self._draft_model is not None
        rows, stride = positions.shape
        out = self._draft_model(hidden, accepted.emitted.flatten(), positions.flatten(), attention)
        starts = uniform_layout(rows, stride, positions.device).row_starts
        return out.index_select(0, starts + accepted.count)

    def _draft(self, rows: Rows, hidden: Tensor, seq_len: Tensor, counts: Tensor | None) -> Drafted:
        """K drafts behind the token at position ``seq_len``.

        Args:
            hidden: ``[B, H]``, the draft's state at position ``seq_len - 1``.
            counts: ``[B, V]`` output counts before the first draft (processed variants).
        """
        assert self._draft_model is not None
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        found: list[Tensor] = []
        for step in range(self._k):
            if step:
                positions, attention = self._forward_inputs(rows, seq_len + (step - 1), 1)
                hidden = self._draft_model(hidden, tokens[-1], positions.flatten(), attention)
            logits = self._draft_model.logits(hidden).float()  # [B, V]
            found.append(classify(logits, Flag.DRAFT_NAN, Flag.DRAFT_INF))
            token, chosen_from = self._propose(rows, logits, seq_len + 1 + step, counts)
            tokens.append(token)
            if chosen_from is not None:
                probs.append(chosen_from)
            if counts is not None:
                counts = counts.scatter_add(1, token[:, None], torch.ones_like(counts[:, :1]))
        per_draft = torch.stack(found, dim=1)
        flags = reduce_rows(per_draft, per_draft > 0)
        return Drafted(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None, flags)

    def _propose(
        self, rows: Rows, logits: Tensor, position: Tensor, counts: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One draft ``[B]`` for ``position`` ``[B]``, and the distribution ``[B, V]`` it was drawn from."""
        logits = logits[:, None]  # [B, 1, V]
        if counts is not None:
            logits = process_logits(logits, self._state, rows.slots, counts[:, None], position[:, None])
        if not rows.variant.sampled:
            return logits[:, 0].argmax(dim=-1), None
        probs = distribution(logits, self._state, rows.slots, rows.variant.truncated)[:, 0]
        keys = self._state.keys.index_select(0, rows.slots)
        return draw(probs, uniforms(keys, position, Purpose.DRAFT)), probs

    def _usable(self, drafted: Drafted) -> Tensor:
        """Drafts that the next step may verify ``[B]``: none after a fault of the draft."""
        return torch.where(drafted.flags > 0, 0, self._k)

    def _commit(self, rows: Rows, accepted: Accepted, drafted: Drafted | None) -> Tensor:
        """Advance the slots, except where a fault halts them; the rows' flags ``[B]``.

        A halted row keeps its state, its counts and its place in the random sequence.
        """
        flags = rows.core[:, FLAGS] | accepted.flags
        num_drafts = torch.zeros_like(flags)
        columns = [_at(accepted.emitted, accepted.count)]
        if drafted is not None:
            num_drafts = self._usable(drafted)
            columns.append(drafted.tokens)
        halted = is_halted(flags)[:, None]
        told = torch.zeros_like(flags)
        head = torch.stack([accepted.seq_len, num_drafts, told], dim=1)
        kept = rows.core.clone()
        kept[:, FLAGS] = flags
        core = torch.where(halted, kept, torch.cat([head, *columns], dim=1))
        counts = accepted.output_counts
        if counts is not None:
            counts = torch.where(halted, self._state.output_counts.index_select(0, rows.slots), counts)
        self._store(rows.slots, core, drafted, counts)
        return flags if drafted is None else flags | drafted.flags

    def _store(self, slots: Tensor, core: Tensor, drafted: Drafted | None, counts: Tensor | None) -> None:
        """Write the slots' new state; the padding slot stays as it was made."""
        self._state.core.index_copy_(0, slots, core)
        self._state.core[self._state.padding_slot].zero_()
        if drafted is not None and drafted.probs is not None:
            self._state.draft_probs.index_copy_(0, slots, drafted.probs)
        if counts is not None:
            self._state.output_counts.index_copy_(0, slots, counts)


def _leading_true(flags: Tensor) -> Tensor:
    """Number of leading True of each row: ``[B, K]`` bool -> ``[B]`` int64."""
    return flags.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """``values[b, index[b]]`` as ``[B, 1]``."""
    return values.gather(1, index[:, None])


def _rows_at(values: Tensor, index: Tensor) -> Tensor:
    """``values[b, index[b]]`` of ``[B, R, V]`` as ``[B, V]``."""
    rows, per_row, _ = values.shape
    starts = uniform_layout(rows, per_row, values.device).row_starts
    return values.flatten(0, 1).index_select(0, starts + index)


def _counts_along_run(counts: Tensor, drafts: Tensor) -> Tensor:
    """Output counts before each verify row: ``[B, V]``, ``[B, K]`` -> ``[B, W, V]``."""
    per_row = [counts]
    for index in range(drafts.shape[1]):
        per_row.append(per_row[-1].scatter_add(1, drafts[:, index, None], torch.ones_like(counts[:, :1])))
    return torch.stack(per_row, dim=1)
