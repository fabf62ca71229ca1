"""What a greedy step does between its forwards, one kernel each: ``engine.step_ops`` for a GPU.

Plain operators spend some 120 launches on it, most of them on a few hundred bytes.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.guard import Flag
from engine.kernels.argmax import (
    MAX_TILE,
    NO_PART,
    combined,
    find_best,
    find_parts,
    kind_of,
    token_of,
)
from engine.kernels.jit import await_previous, check_rows, jit, jit_function, jit_varying, power_of_two
from engine.kernels.slots import begin_kernel, commit_kernel, load_kernel, place_kernel
from engine.kv.pool import LatentPool
from engine.sampler import Variant
from engine.spec import Accepted, Drafted, Places, Rows, furthest_start
from engine.state import NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN, SlotState

CHUNK = 256
"""Slots, pages or tokens that a program looks at in one go."""
_IGNORED = tl.constexpr(int(Flag.IGNORED))
_TARGET_NAN = tl.constexpr(int(Flag.TARGET_NAN))
_TARGET_INF = tl.constexpr(int(Flag.TARGET_INF))
_DRAFT_NAN = tl.constexpr(int(Flag.DRAFT_NAN))
_DRAFT_INF = tl.constexpr(int(Flag.DRAFT_INF))
_NO_FLAG = tl.constexpr(1 << 30)
"""Above every flag."""
_SEQ_LEN = tl.constexpr(SEQ_LEN)
_NUM_DRAFTS = tl.constexpr(NUM_DRAFTS)
_NEXT_TOKEN = tl.constexpr(NEXT_TOKEN)


class GreedyOps:
    """``StepOps`` of greedy steps without history or grammar that verify all drafts, on a GPU.

    The results are those of ``PlainOps``, to the bit.

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
        self._max_start = furthest_start(state, pool, num_speculative_tokens)
        self.checks = True

    def load(
        self, slots: Tensor, check: Tensor | None, max_lens: tuple[int, ...], variant: Variant, width: int
    ) -> Rows:
        """Gather the slots' state. What breaks the contract is told in the flags, and the row does not run."""
        assert not (variant.sampled or variant.processed or variant.constrained) and width == self._k + 1
        assert slots.is_contiguous(), "slots are read side by side"
        state, (rows,), new = self._state, slots.shape, slots.new_empty
        pages = min(-(-max(max_lens) // self._page_size), state.block_table.shape[1])
        core, flags, checked = new((rows, 4 + self._k)), new(rows), new(rows)
        table = new((rows, pages), dtype=torch.int32)
        load_kernel[(rows,)](
            slots, slots if check is None else check, state.core, state.block_table,
            checked, core, flags, table, rows, pages,
            padding_slot=state.padding_slot, vocab=state.vocab_size, max_start=self._max_start,
            num_pages=self._num_pages, page_size=self._page_size, table_width=state.block_table.shape[1],
            columns=4 + self._k, column_block=power_of_two(4 + self._k), chunk=CHUNK,
            checks=self.checks, has_check=check is not None,
        )  # fmt: skip
        return Rows(checked, core, flags, table, max_lens, variant, width)

    def place(self, rows: Rows, first: Tensor, stride: int, ahead: int = 0) -> Places:
        """See ``StepOps``. A position that the block table does not reach has its place on the scratch page."""
        count, pages = rows.block_table.shape
        tokens = count * stride
        positions, write_slots = first.new_empty((2, tokens)).unbind(0)
        seq_lens = first.new_empty(count, dtype=torch.int32)
        place_kernel[(-(-tokens // CHUNK),)](
            first, first.stride(0), rows.block_table, positions, write_slots, seq_lens, tokens, pages, ahead,
            stride=stride, page_size=self._page_size, chunk=CHUNK,
        )  # fmt: skip
        return Places(positions, write_slots, seq_lens)

    def accept(self, rows: Rows, logits: Tensor, allowed: Tensor | None) -> Accepted:
        """See ``StepOps``: argmax comparison."""
        assert allowed is None, "a grammar's mask is for the plain operators"
        count, width, vocab = logits.shape
        logits = logits.flatten(0, 1)
        source, parts, tile = self._findings(logits, width)
        emitted = rows.slots.new_empty((count, width))
        accepted, seq_len, last, flags = rows.slots.new_empty((4, count)).unbind(0)
        _accept[(count,)](
            source, logits.stride(0), rows.core, emitted, accepted, seq_len, last, flags,
            k=self._k, place_block=power_of_two(width), vocab=vocab, parts=parts, tile=tile,
            checks=self.checks, num_warps=_warps(power_of_two(width) * tile),
        )  # fmt: skip
        return Accepted(emitted, accepted, seq_len, last, flags, None)

    def propose(
        self, rows: Rows, logits: Tensor, first: Tensor, counts: Tensor | None, ahead: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See ``StepOps``."""
        assert counts is None, "penalties are for the plain operators"
        source, parts, tile = self._findings(logits, 1)
        # One allocation each: they travel in tuples, where alignment must not depend on the number of rows
        token, flags = rows.slots.new_empty(logits.shape[0]), rows.slots.new_empty(logits.shape[0])
        _propose[(logits.shape[0],)](
            source, logits.stride(0), token, flags,
            vocab=logits.shape[1], parts=parts, tile=tile, checks=self.checks, num_warps=_warps(tile),
        )  # fmt: skip
        return token, None, flags

    def _findings(self, logits: Tensor, width: int) -> tuple[Tensor, int, int]:
        """What one program reads ``width`` rows of ``logits`` ``[N, V]`` from: the logits themselves, with 0 parts,
        or findings of so many parts of each; and the extent of its tile along it."""
        check_rows("logits", logits)
        tile = power_of_two(logits.shape[1])
        if power_of_two(width) * tile <= MAX_TILE:
            return logits, 0, tile
        findings = find_parts(logits, self.checks)
        return findings, findings.shape[1], power_of_two(findings.shape[1])

    def commit(self, rows: Rows, accepted: Accepted, drafted: Drafted | None) -> Tensor:
        """Advance the slots; a halted row keeps its place. The padding slot stays as it was made."""
        count, width = accepted.emitted.shape
        _check_contiguous(rows.flags, accepted.emitted, accepted.count, accepted.seq_len, accepted.flags)
        packed = rows.slots.new_empty((count, width + 3))
        commit_kernel[(count,)](
            self._state.core, rows.slots, rows.core, rows.flags,
            accepted.emitted, accepted.count, accepted.seq_len, accepted.flags,
            *_drafts_of(drafted), packed, k=self._k, **self._blocks(), num_warps=1,
        )  # fmt: skip
        return packed

    def begin(self, rows: Rows, drafted: Drafted) -> None:
        """See ``StepOps``; what the guard found is told with the first step's results."""
        _check_contiguous(rows.flags)
        begin_kernel[(rows.slots.shape[0],)](
            self._state.core, rows.slots, rows.core, rows.flags, *_drafts_of(drafted),
            k=self._k, **self._blocks(), num_warps=1,
        )  # fmt: skip

    def _blocks(self) -> dict[str, int]:
        return {"padding_slot": self._state.padding_slot, "column_block": power_of_two(4 + self._k)}


def _drafts_of(drafted: Drafted | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Drafts and the guard's verdicts on them: K of ``[B]`` each, none without a draft model."""
    if drafted is None:
        return (), ()
    _check_contiguous(*drafted.tokens, *drafted.found)
    return tuple(drafted.tokens), tuple(drafted.found)


def _check_contiguous(*read: Tensor) -> None:
    assert all(one.is_contiguous() for one in read), "the kernels find a row by its number alone"


def _warps(elements: int) -> int:
    """Warps of a program that holds ``elements`` logits: 32 a thread from 4096 on."""
    return min(16, max(4, elements // 1024))


@jit_function
def _best_of(
    source: tl.tensor,
    stride: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    vocab: tl.constexpr,
    parts: tl.constexpr,
    tile: tl.constexpr,
    checks: tl.constexpr,
) -> tl.tensor:
    """Findings ``[R]`` of the rows ``row`` ``[R]`` where ``inside``; see ``GreedyOps._findings``."""
    here = tl.arange(0, tile)[None, :]
    row, inside = row[:, None].to(tl.int64), inside[:, None]
    if parts == 0:
        found = find_best(source + row * stride + here, here, inside & (here < vocab), checks)
    else:
        mask = inside & (here < parts)
        found = combined(tl.load(source + row * parts + here, mask=mask, other=NO_PART))
    return found


@jit_varying("accepted", "seq_len", "last", "flags")
def _accept(
    source: tl.tensor,
    stride: tl.tensor,
    core: tl.tensor,
    emitted: tl.tensor,
    accepted: tl.tensor,
    seq_len: tl.tensor,
    last: tl.tensor,
    flags: tl.tensor,
    k: tl.constexpr,
    place_block: tl.constexpr,
    vocab: tl.constexpr,
    parts: tl.constexpr,
    tile: tl.constexpr,
    checks: tl.constexpr,
) -> None:
    """``StepOps.accept``, one program a row; ``source`` as ``GreedyOps._findings`` has it."""
    await_previous()
    row = tl.program_id(0)
    place = tl.arange(0, place_block)
    inside = place <= k
    here = row * (k + 1) + place
    finding = _best_of(source, stride, here, inside, vocab, parts, tile, checks)
    token = token_of(finding)
    tl.store(emitted + here, token, mask=inside)
    own = core + row * (4 + k)
    draft = tl.load(own + _NEXT_TOKEN + 1 + place, mask=place < k, other=-1)
    stands = (token == draft) & (place < k) & (place < tl.load(own + _NUM_DRAFTS))
    count = tl.min(tl.where(stands, place_block, place), axis=0)  # place K never stands
    tl.store(accepted + row, count.to(tl.int64))
    tl.store(seq_len + row, tl.load(own + _SEQ_LEN) + count + 1)
    tl.store(last + row, (row * (k + 1) + count).to(tl.int64))
    verdict = tl.zeros([1], dtype=tl.int64)
    if checks:
        kind = kind_of(finding, _TARGET_NAN, _TARGET_INF)
        bad = inside & (kind > 0)
        least = tl.min(tl.where(bad & (place <= count), kind, _NO_FLAG), axis=0)
        ignored = tl.max((bad & (place > count)).to(tl.int64), axis=0) * _IGNORED
        verdict += tl.where(least == _NO_FLAG, 0, least) | ignored
    tl.store(flags + row + tl.arange(0, 1), verdict)


@jit
def _propose(
    source: tl.tensor,
    stride: tl.tensor,
    token: tl.tensor,
    flags: tl.tensor,
    vocab: tl.constexpr,
    parts: tl.constexpr,
    tile: tl.constexpr,
    checks: tl.constexpr,
) -> None:
    """``StepOps.propose``, one program a row; ``source`` as ``GreedyOps._findings`` has it."""
    await_previous()
    row = tl.program_id(0) + tl.arange(0, 1)
    finding = _best_of(source, stride, row, row >= 0, vocab, parts, tile, checks)
    tl.store(token + row, token_of(finding))
    verdict = tl.zeros([1], dtype=tl.int64)
    if checks:
        verdict = kind_of(finding, _DRAFT_NAN, _DRAFT_INF)
    tl.store(flags + row, verdict)
