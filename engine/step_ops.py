"""What a speculative step does between its forwards, in plain operators, on any device.

The fused kernels of a GPU (``engine.kernels.step``) compute the same; these are their oracle.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from engine.guard import HALTING, Flag, classify, is_halted, reduce_rows
from engine.kv.pool import SCRATCH_PAGE, LatentPool, rows_of
from engine.layout import uniform_layout
from engine.rng import Purpose, check_word, uniforms
from engine.sampler import Variant, distribution, draw, mask_logits, process_logits
from engine.spec import Accepted, Drafted, Places, Rows, furthest_start
from engine.state import FLAGS, NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN, SlotState


class SlotOps:
    """What both forms of ``StepOps`` stand on: the slots' state and the pool's geometry.

    Args:
        num_speculative_tokens: K.

    Attributes:
        checks: False leaves out the contract's checks and the guard's (``eyas bench gpu --overhead`` only).
    """

    def __init__(self, state: SlotState, pool: LatentPool, num_speculative_tokens: int) -> None:
        self._state = state
        self._page_size = pool.page_size
        self._num_pages = pool.num_pages
        self._k = num_speculative_tokens
        self.checks = True


class PlainOps(SlotOps):
    """``StepOps`` in plain operators."""

    def load(
        self, slots: Tensor, check: Tensor | None, max_lens: tuple[int, ...], variant: Variant, width: int
    ) -> Rows:
        """Gather the slots' state. What breaks the contract is told in the flags, and the row does not run."""
        bad_slots: Tensor | None = None
        if self.checks:
            slots, bad_slots = self._check_slots(slots, check)
        core = self._state.core.index_select(0, slots)
        pages = -(-max(max_lens) // self._page_size)
        table = self._state.block_table.index_select(0, slots)[:, :pages]
        flags = core[:, FLAGS]
        if bad_slots is not None:
            tokens = core[:, NEXT_TOKEN : NEXT_TOKEN + max(1, width)]
            furthest = furthest_start(table.shape[1], self._page_size, width, self._k)
            flags = flags | bad_slots | self._check_rows(core[:, SEQ_LEN], tokens, table, furthest)
        stopped = is_halted(flags)[:, None]
        core = core.masked_fill(stopped, 0)
        if width == 1:
            core[:, NUM_DRAFTS] = 0  # the drafts, if there are any, are left out
        table = table.masked_fill(stopped, SCRATCH_PAGE)
        return Rows(slots, core, flags, table, max_lens, variant, width)

    def _check_slots(self, slots: Tensor, check: Tensor | None) -> tuple[Tensor, Tensor]:
        """``slots``, all of them the padding slot if one is not what the host wrote; and the flag ``[]``."""
        padding = self._state.padding_slot
        bad = ((slots < 0) | (slots > padding)).any()
        if check is not None:
            bad = bad | (check_word(slots) != check[0])
        return torch.where(bad, padding, slots), bad * int(Flag.SLOTS)

    def _check_rows(self, seq_len: Tensor, tokens: Tensor, table: Tensor, furthest: int) -> Tensor:
        """Flags ``[B]`` of state that no step can have left behind.

        Lengths ``[B]`` are at most ``furthest``; tokens ``[B, R]`` and the block table are those that are read.
        """
        bad_length = (seq_len < 0) | (seq_len > furthest)
        bad_token = ((tokens < 0) | (tokens >= self._state.vocab_size)).any(dim=1)
        first = torch.arange(table.shape[1], device=table.device) * self._page_size
        # Written positions have pages; the scratch page stands only where a row owns none yet
        lowest = (first < seq_len[:, None]).to(table.dtype)
        bad_page = ((table < lowest) | (table >= self._num_pages)).any(dim=1)
        return (
            bad_length * int(Flag.SEQ_LENS)
            | bad_token * int(Flag.TARGET_OOV)
            | bad_page * int(Flag.BLOCK_TABLE)
        )

    def place(self, rows: Rows, first: Tensor, stride: int, ahead: int = 0) -> Places:
        """See ``StepOps``."""
        first = first + ahead if ahead else first
        layout = uniform_layout(rows.slots.shape[0], stride, rows.slots.device)
        positions = first[:, None] + layout.offsets
        pages = rows.block_table.gather(1, positions // self._page_size)
        write_slots = rows_of(pages, positions, self._page_size).flatten()
        return Places(positions.flatten(), write_slots, (first + stride).to(torch.int32))

    def accept(self, rows: Rows, logits: Tensor, allowed: Tensor | None) -> Accepted:
        """See ``StepOps``: argmax comparison, or rejection sampling."""
        logits = logits.float()
        drafts = rows.tokens[:, 1:]
        layout = uniform_layout(rows.slots.shape[0], rows.width, logits.device)
        decided = (
            rows.seq_len[:, None] + 1 + layout.offsets
        )  # [B, W]: position of the token that each row decides
        found = self._classify(logits, Flag.TARGET_NAN, Flag.TARGET_INF)  # [B, W]
        if allowed is not None:
            logits = mask_logits(logits, allowed)
        if rows.variant.processed:
            before = _counts_along_run(self._state.output_counts.index_select(0, rows.slots), drafts)
            logits = process_logits(logits, self._state, rows.slots, before, decided)
        valid = layout.offsets[: rows.width - 1] < rows.num_drafts  # [B, K]
        if rows.variant.sampled:
            emitted, count = self._reject(rows, drafts, valid, decided, logits)
        else:
            emitted = logits.argmax(dim=-1)
            count = _leading_true((emitted[:, :-1] == drafts) & valid)
        kept = layout.offsets <= count[:, None]  # [B, W]
        ignored = torch.where(((found > 0) & ~kept).any(dim=1), int(Flag.IGNORED), 0)
        flags = reduce_rows(found, kept) | ignored
        last = layout.row_starts + count
        history = emitted.masked_fill(~kept, -1) if rows.variant.processed else None
        return Accepted(emitted, count, rows.seq_len + count + 1, last, flags, history)

    def _classify(self, logits: Tensor, nan: Flag, inf: Flag) -> Tensor:
        if self.checks:
            return classify(logits, nan, inf)
        return torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)

    def _reject(
        self, rows: Rows, drafts: Tensor, valid: Tensor, decided: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rejection sampling (Leviathan et al., 2023) against the drafts' own distributions.

        A place without a draft (``valid`` False) is a forced rejection that draws from the target itself.
        """
        target_probs = distribution(logits, self._state, rows.slots, rows.variant.truncated)  # [B, W, V]
        keys = self._state.keys.index_select(0, rows.slots)[:, None]
        draft_probs = self._state.draft_probs.index_select(0, rows.slots)  # [B, K, V]
        target = target_probs[:, :-1].gather(2, drafts[:, :, None]).squeeze(2)
        proposed = draft_probs.gather(2, drafts[:, :, None]).squeeze(2)
        chance = uniforms(keys, decided[:, :-1], Purpose.ACCEPT)
        count = _leading_true((chance * proposed < target) & valid)
        last = _rows_at(target_probs, count)  # [B, V]
        if rows.width > 1:
            rejected = _at(torch.nn.functional.pad(valid, (0, 1)), count)  # [B, 1]: a real draft was refused
            proposed_last = _rows_at(draft_probs, count.clamp_max(self._k - 1))
            residual = (last - proposed_last).clamp_min(0)
            use = rejected & (residual.sum(dim=-1, keepdim=True) > 0)
            last = torch.where(use, residual, last)
        position = decided.gather(1, count[:, None])
        token = draw(last, uniforms(keys, position, Purpose.TOKEN).squeeze(1))
        padded = torch.nn.functional.pad(drafts, (0, 1))
        return padded.scatter(1, count[:, None], token[:, None]), count

    def propose(
        self, rows: Rows, logits: Tensor, first: Tensor, history: Tensor | None, number: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See ``StepOps``."""
        logits = logits.float()
        found = self._classify(logits, Flag.DRAFT_NAN, Flag.DRAFT_INF)
        if history is None and not rows.variant.sampled:
            return logits.argmax(dim=-1), None, found
        position = first + 1 + number
        if history is not None:
            counts = self._counts(rows.slots, history)[:, None]
            logits = process_logits(logits[:, None], self._state, rows.slots, counts, position[:, None])[:, 0]
        if not rows.variant.sampled:
            return logits.argmax(dim=-1), None, found
        probs = distribution(logits[:, None], self._state, rows.slots, rows.variant.truncated)[:, 0]
        keys = self._state.keys.index_select(0, rows.slots)
        return draw(probs, uniforms(keys, position, Purpose.DRAFT)), probs, found

    def _counts(self, slots: Tensor, history: Tensor) -> Tensor:
        """Output counts ``[B, V]`` int32 of ``slots`` with the tokens ``history`` ``[B, R]``, -1 for none."""
        counts = self._state.output_counts.index_select(0, slots)
        return counts.scatter_add(1, history.clamp_min(0), (history >= 0).to(torch.int32))

    def _usable(self, found: Tensor) -> Tensor:
        """Drafts that the next step may verify ``[B]``: none after a fault of the draft."""
        return torch.where(found > 0, 0, self._k)

    def commit(self, rows: Rows, accepted: Accepted, drafted: Drafted | None) -> Tensor:
        """Advance the slots; a halted row keeps its counts and its place in the random sequence."""
        found = _any_of(drafted.found) if drafted is not None else torch.zeros_like(rows.flags)
        flags = rows.flags | accepted.flags | found
        columns = [_at(accepted.emitted, accepted.count)]
        num_drafts = torch.zeros_like(flags)
        if drafted is not None:
            num_drafts = self._usable(found)
            columns += [token[:, None] for token in drafted.tokens]
        halted = is_halted(flags)[:, None]
        head = torch.stack([accepted.seq_len, num_drafts, torch.zeros_like(flags)], dim=1)
        kept = self._state.core.index_select(0, rows.slots)
        kept[:, FLAGS] = flags & int(HALTING)
        core = torch.where(halted, kept, torch.cat([head, *columns], dim=1))
        counts = None
        if accepted.history is not None:
            idle = halted | (rows.slots == self._state.padding_slot)[:, None]
            counts = self._counts(rows.slots, accepted.history.masked_fill(idle, -1))
        self._store(rows.slots, core, drafted, counts)
        results = [accepted.emitted, accepted.count[:, None], rows.num_drafts, flags[:, None]]
        return torch.cat(results, dim=1)

    def begin(self, rows: Rows, drafted: Drafted) -> None:
        """See ``StepOps``; a halted slot keeps what it had. The first step's results tell what the guard found."""
        found = _any_of(drafted.found)
        flags = rows.flags | found
        core = rows.core.clone()
        core[:, NUM_DRAFTS] = self._usable(found)
        core[:, NEXT_TOKEN + 1 :] = torch.stack(drafted.tokens, dim=1)
        kept = self._state.core.index_select(0, rows.slots)
        core = torch.where(is_halted(flags)[:, None], kept, core)
        core[:, FLAGS] = flags
        self._store(rows.slots, core, drafted, None)

    def _store(self, slots: Tensor, core: Tensor, drafted: Drafted | None, counts: Tensor | None) -> None:
        """Write the slots' new state; the padding slot stays as it was made."""
        self._state.core.index_copy_(0, slots, core)
        self._state.core[self._state.padding_slot].zero_()
        if drafted is not None and drafted.probs is not None:
            self._state.draft_probs.index_copy_(0, slots, drafted.probs)
        if counts is not None:
            self._state.output_counts.index_copy_(0, slots, counts)


def _any_of(flags: list[Tensor]) -> Tensor:
    """Bitwise or."""
    return reduce(torch.bitwise_or, flags)


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
