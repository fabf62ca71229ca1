"""What a step does between its forwards, in a few kernels: ``engine.step_ops`` for a GPU.

Plain operators spend some 120 launches on a greedy step, most of them on a few hundred bytes, and sort the
vocabulary where they sample.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.argmax import (
    MAX_TILE,
    NO_PART,
    combined,
    draft_flags,
    find_best,
    find_parts,
    run_flags,
    token_of,
)
from engine.kernels.jit import await_previous, check_rows, jit, jit_function, jit_varying, power_of_two
from engine.kernels.sample import accept_kernel, propose_kernel
from engine.kernels.slots import begin_kernel, commit_kernel, load_kernel, place_kernel
from engine.kernels.team import SIZES, Boards, team_size
from engine.kernels.weigh import FIGURES, tables_of, weigh_kernel
from engine.kv.pool import LatentPool
from engine.sampler import GREEDY, Variant
from engine.spec import Accepted, Drafted, Places, Rows, furthest_start
from engine.state import NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN, SlotState
from engine.step_ops import SlotOps

CHUNK = 256
"""Slots, pages or tokens that a program looks at in one go."""
MAX_VALUES = 4096
"""Logits of a sampled row that its program holds at a time."""
TEAM_VALUES = 2048
"""The same for a member of a team."""
MIN_TEAM_VOCAB = 1 << 14
"""Rows of fewer logits are read faster than a team exchanges what it found in them."""
FEW = 2048
"""Logits that a search for a threshold holds to its end."""
_SEQ_LEN = tl.constexpr(SEQ_LEN)
_NUM_DRAFTS = tl.constexpr(NUM_DRAFTS)
_NEXT_TOKEN = tl.constexpr(NEXT_TOKEN)


class FusedOps(SlotOps):
    """``StepOps`` on a GPU.

    What a greedy row becomes is what ``PlainOps`` makes of it, to the bit (but that a GPU's compiler may round a
    penalty once instead of twice); a sampled row's token is drawn by the same uniforms from the same distribution,
    whose sums are rounded otherwise.
    """

    def __init__(self, state: SlotState, pool: LatentPool, num_speculative_tokens: int) -> None:
        super().__init__(state, pool, num_speculative_tokens)
        device = state.core.device
        processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
        )
        self.assemble(processors)

    def assemble(self, processors: int) -> None:
        """Make ready for teams on so many multiprocessors; there are none where programs do not run at once (0)."""
        self._processors = processors if self._state.vocab_size >= MIN_TEAM_VOCAB else 0
        device = self._state.core.device
        self._boards = {
            size: Boards.of(size, max(1, self._processors // size), device) for size in (1, *SIZES)
        }

    def load(
        self, slots: Tensor, check: Tensor | None, max_lens: tuple[int, ...], variant: Variant, width: int
    ) -> Rows:
        """Gather the slots' state. What breaks the contract is told in the flags, and the row does not run."""
        assert slots.is_contiguous(), "slots are read side by side"
        state, (rows,), new = self._state, slots.shape, slots.new_empty
        pages = min(-(-max(max_lens) // self._page_size), state.block_table.shape[1])
        core, flags, checked = new((rows, 4 + self._k)), new(rows), new(rows)
        table = new((rows, pages), dtype=torch.int32)
        load_kernel[(rows,)](
            slots, slots if check is None else check, state.core, state.block_table,
            checked, core, flags, table, rows, pages,
            furthest_start(pages, self._page_size, width, self._k), width,
            padding_slot=state.padding_slot, vocab=state.vocab_size,
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
        """See ``StepOps``: argmax comparison, or rejection sampling."""
        count, width, vocab = logits.shape
        emitted = rows.slots.new_empty((count, width))
        accepted, seq_len, last, flags = rows.slots.new_empty((4, count)).unbind(0)
        result = Accepted(emitted, accepted, seq_len, last, flags, None)
        if rows.variant != GREEDY:
            return self._accept_weighed(rows, logits, allowed, result)
        logits = logits.flatten(0, 1)
        source, parts, tile = self._findings(logits, width)
        place_block = power_of_two(self._k + 1)
        _accept[(count,)](
            source, logits.stride(0), rows.core, emitted, accepted, seq_len, last, flags, width,
            k=self._k, place_block=place_block, vocab=vocab, parts=parts, tile=tile,
            checks=self.checks, num_warps=_warps(place_block * tile),
        )  # fmt: skip
        return result

    def _accept_weighed(
        self, rows: Rows, logits: Tensor, allowed: Tensor | None, result: Accepted
    ) -> Accepted:
        """``accept`` by the requests' parameters; ``result`` with what it decides."""
        count, width, _ = logits.shape
        tables, draft_probs = tables_of(self._state), self._state.draft_probs
        history = torch.empty_like(result.emitted)
        members, meeting, reading = self._team(count, width)
        values, few = self._room(count * width, reading)
        findings = rows.slots.new_empty(count * width)
        figures = values.new_empty((count * width, FIGURES.value))
        weigh_kernel[(count * width, members)](
            logits.contiguous(), values, few, findings, figures, rows.slots, rows.core, tables,
            rows.slots if allowed is None else allowed.contiguous(), *meeting, width,
            columns=4 + self._k, words=0 if allowed is None else allowed.shape[-1],
            few_size=few.shape[1], has_mask=allowed is not None, **reading,
        )  # fmt: skip
        accept_kernel[(count, members)](
            values, findings, figures, rows.slots, rows.core, tables, draft_probs, result.emitted, history,
            result.count, result.seq_len, result.last, result.flags, *meeting, width,
            k=self._k, place_block=power_of_two(self._k + 1), checks=self.checks, **reading,
        )  # fmt: skip
        return replace(result, history=history) if rows.variant.processed else result

    def propose(
        self, rows: Rows, logits: Tensor, first: Tensor, history: Tensor | None, number: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See ``StepOps``. What a draft was drawn from is written to its slot."""
        count, vocab = logits.shape
        # One allocation each: they travel in tuples, where alignment must not depend on the number of rows
        token, flags = rows.slots.new_empty(count), rows.slots.new_empty(count)
        if rows.variant != GREEDY:
            members, meeting, reading = self._team(count, 1)
            values, few = self._room(count, reading)
            propose_kernel[(count, members)](
                logits.contiguous(), values, few, rows.slots, tables_of(self._state), self._state.draft_probs,
                first, first.stride(0), rows.slots if history is None else history.contiguous(),
                0 if history is None else history.shape[1], number, token, flags, *meeting,
                k=self._k, few_size=few.shape[1], checks=self.checks, **reading,
            )  # fmt: skip
            return token, None, flags
        source, parts, tile = self._findings(logits, 1)
        _propose[(count,)](
            source, logits.stride(0), token, flags,
            vocab=vocab, parts=parts, tile=tile, checks=self.checks, num_warps=_warps(tile),
        )  # fmt: skip
        return token, None, flags

    def _team(self, count: int, width: int) -> tuple[int, tuple[Tensor, Tensor], dict[str, int]]:
        """How many programs read each of ``count * width`` rows, where they meet, and how they read."""
        members = team_size(power_of_two(count) * power_of_two(width), self._processors)
        boards = self._boards[members]
        return members, (boards.words, boards.turns), _reading(self._state.vocab_size, members)

    def _room(self, rows: int, reading: dict[str, int]) -> tuple[Tensor, Tensor]:
        """Float32 that sampling needs beside its rows: their values ``[rows, padded V]``, and a search's."""
        new, members, vocab = self._state.floats.new_empty, reading["members"], reading["vocab"]
        few = min(FEW, power_of_two(vocab)) if members == 1 else 1
        return new((rows, reading["span"] * members)), new((rows, few))

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
        has_history = accepted.history is not None
        commit_kernel[(count,)](
            self._state.core, self._state.output_counts, rows.slots, rows.core, rows.flags,
            accepted.emitted, accepted.count, accepted.seq_len, accepted.flags,
            accepted.history if has_history else accepted.emitted, *_drafts_of(drafted), packed, width,
            k=self._k, vocab=self._state.vocab_size, has_history=has_history, **self._blocks(), num_warps=1,
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


def _reading(vocab: int, members: int) -> dict[str, int]:
    """How each of a row's programs reads its part of the logits, piece by piece."""
    part = -(-vocab // members)
    chunk = min(MAX_VALUES if members == 1 else TEAM_VALUES, power_of_two(part))
    span = -(-part // chunk) * chunk
    warps = min(16, max(4, chunk // 256))
    return {"vocab": vocab, "members": members, "span": span, "chunk": chunk, "num_warps": warps}


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
    """Findings ``[R]`` of the rows ``row`` ``[R]`` where ``inside``; see ``FusedOps._findings``."""
    here = tl.arange(0, tile)[None, :]
    row, inside = row[:, None].to(tl.int64), inside[:, None]
    if parts == 0:
        found = find_best(source + row * stride + here, here, inside & (here < vocab), checks)
    else:
        mask = inside & (here < parts)
        found = combined(tl.load(source + row * parts + here, mask=mask, other=NO_PART))
    return found


@jit_varying("accepted", "seq_len", "last", "flags", "width")
def _accept(
    source: tl.tensor,
    stride: tl.tensor,
    core: tl.tensor,
    emitted: tl.tensor,
    accepted: tl.tensor,
    seq_len: tl.tensor,
    last: tl.tensor,
    flags: tl.tensor,
    width: tl.tensor,
    k: tl.constexpr,
    place_block: tl.constexpr,
    vocab: tl.constexpr,
    parts: tl.constexpr,
    tile: tl.constexpr,
    checks: tl.constexpr,
) -> None:
    """``StepOps.accept`` of greedy rows, one program each; ``source`` as ``FusedOps._findings`` has it."""
    await_previous()
    row = tl.program_id(0)
    place = tl.arange(0, place_block)
    inside = place < width
    here = row * width + place
    finding = _best_of(source, stride, here, inside, vocab, parts, tile, checks)
    token = token_of(finding)
    tl.store(emitted + here, token, mask=inside)
    own = core + row * (4 + k)
    draft = tl.load(own + _NEXT_TOKEN + 1 + place, mask=place < width - 1, other=-1)
    stands = (token == draft) & (place < width - 1) & (place < tl.load(own + _NUM_DRAFTS))
    count = tl.min(tl.where(stands, place_block, place), axis=0)  # the last place never stands
    tl.store(accepted + row, count.to(tl.int64))
    tl.store(seq_len + row, tl.load(own + _SEQ_LEN) + count + 1)
    tl.store(last + row, (row * width + count).to(tl.int64))
    tl.store(flags + row + tl.arange(0, 1), run_flags(finding, place, inside, count, checks))


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
    """``StepOps.propose`` of greedy rows, one program each; ``source`` as ``FusedOps._findings`` has it."""
    await_previous()
    row = tl.program_id(0) + tl.arange(0, 1)
    finding = _best_of(source, stride, row, row >= 0, vocab, parts, tile, checks)
    tl.store(token + row, token_of(finding))
    tl.store(flags + row, draft_flags(finding, checks))
