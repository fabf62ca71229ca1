"""The forward of a prefill, in two forms: ragged, and for few tokens uniform, which can be captured.

A ragged forward has one row a request, of any length, and its launches are bound by the host: some hundreds, of
which a GPU sees the end in a millisecond. The uniform one has one row a **token**: each names its slot and its
position, and sees the keys up to itself. So any mix of requests and lengths is a forward ``[N, 1]``, N is all that
a capture freezes, and padding tokens are padding rows as in a step. What a token costs then is reading all of its
keys for itself alone, hence ``MAX_KEYS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.attention import AttentionBackend, PackedAttention, UniformAttention
from engine.contract import GraphKey
from engine.guard import Flag, classify
from engine.kv.pool import SCRATCH_PAGE, LatentPool, rows_of
from engine.layout import layout_verdict, packed_layout, uniform_layout
from engine.model.decoder import Decoder
from engine.model.draft import Draft
from engine.rng import check_word
from engine.sequence import PrefillChunk
from engine.staging import stage
from engine.state import SlotState

MAX_KEYS: Final = 1 << 20
"""Most keys, summed over its tokens, that a uniform prefill reads: 512 tokens behind 1536, or 100 behind 10000."""
COLUMNS: Final = 4
"""Of a token: slot, position, its id and the id that follows it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a prefill, chunk after chunk, on the host."""

    slots: list[int]
    """Of each chunk."""
    spans: list[tuple[int, int]]
    """Positions ``start..end`` of each chunk."""
    ids: list[int]
    shifted: list[int]
    """The id that follows each token."""

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk]) -> Tokens:
        return cls(
            [chunk.slot for chunk in chunks],
            [(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks],
            [token for chunk in chunks for token in chunk.token_ids],
            [token for chunk in chunks for token in chunk.shifted_ids],
        )

    @classmethod
    def none(cls) -> Tokens:
        return cls([], [], [], [])

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in self.spans]

    @property
    def num_keys(self) -> int:
        """Keys that a uniform forward reads."""
        return sum((end - start) * (start + 1 + end) // 2 for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill leaves, on the device. N are its tokens, and the padding behind them."""

    target_hidden: Tensor  # [N, H]
    hidden: Tensor  # [N, H]: the last model's, which is the target without a draft
    found: Tensor  # [N, models] int64: the guard's verdict on the states of each token, the target's first
    verdict: Tensor  # [] int64: the contract's


class UniformRun(NamedTuple):
    """How a prefill in the uniform form, or a draft phase behind prefills, ran."""

    graph: GraphKey | None
    """What was replayed; ``None`` if it ran eager."""
    capture: object
    """The capture itself."""


@dataclass(slots=True, eq=False)
class PrefillRecord:
    """A forward of one of those forms, as a fault of one of its requests asks for it."""

    run: UniformRun
    raised: Tensor
    """``[R]`` int64 on the host: the flags that each of its requests raised, once the device got there."""
    reported: bool = False
    """Its violations of the contract are counted."""


class Prefill:
    """Writes the target's and the draft's KV of known tokens."""

    def __init__(
        self,
        decoder: Decoder,
        draft: Draft | None,
        backend: AttentionBackend,
        pool: LatentPool,
        state: SlotState,
    ) -> None:
        self._decoder = decoder
        self._draft = draft
        self._backend = backend
        self._pool = pool
        self._state = state
        self._device = pool.pages.device
        self._page_size = pool.page_size
        self._padding = torch.tensor([state.padding_slot, 0, 0, 0])
        self._padding_there = stage(self._padding, torch.int64, self._device)

    def staged(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """``[R]`` and ``[N]`` int64: the slot of each chunk, and the chunk that each token belongs to."""
        slots = stage(tokens.slots, torch.int64, self._device)
        lengths = torch.tensor(tokens.lengths)
        owners = torch.arange(len(lengths)).repeat_interleave(lengths)
        return slots, stage(owners, torch.int64, self._device)

    def ragged(self, tokens: Tokens, slots: Tensor, owners: Tensor) -> Prefilled:
        """All of ``tokens`` in one packed forward, whatever their number; the others are those of ``staged``."""
        device, spans = self._device, tokens.spans
        layout = packed_layout(tokens.lengths, [start for start, _ in spans])
        table = self._table(slots, max(end for _, end in spans))
        positions = stage(torch.cat([torch.arange(*span) for span in spans]), torch.int64, device)
        own_page = table[owners, positions // self._page_size]
        write_slots = rows_of(own_page, positions, self._page_size)
        attention = PackedAttention(self._backend, self._pool, layout, table, write_slots)
        ids, shifted = (stage(some, torch.int64, device) for some in (tokens.ids, tokens.shifted))
        return self._forward(ids, shifted, positions, attention)

    def uniform(self, inputs: Tensor) -> Prefilled:
        """Every token as a row of its own; no value of ``inputs`` is looked at on the host.

        Args:
            inputs: ``[1 + N, 4]`` int64, as ``uniform_inputs`` makes them. If they are not what the check word in
                front says, none of them is taken: every row is a padding row.
        """
        rows = inputs[1:]
        as_written = check_word(rows) == inputs[0, 0]
        slots, positions, ids, shifted = torch.where(as_written, rows, self._padding_there).t().contiguous()
        count, pages = rows.shape[0], self._state.block_table.shape[1]
        longest = pages * self._page_size
        table = self._table(slots, longest)
        own_page = table.gather(1, (positions // self._page_size)[:, None])[:, 0]
        layout = uniform_layout(count, 1, self._device)
        attention = UniformAttention(
            self._backend,
            self._pool,
            layout,
            table,
            (positions + 1).to(torch.int32),
            (longest,) * count,
            rows_of(own_page, positions, self._page_size),
        )
        out = self._forward(ids, shifted, positions, attention)
        verdict = torch.where(as_written, 0, int(Flag.PREFILL_INPUTS))
        offsets = layout_verdict(layout, self._backend.reads)
        return Prefilled(
            out.target_hidden, out.hidden, out.found, verdict if offsets is None else verdict | offsets
        )

    def uniform_inputs(self, tokens: Tokens, count: int) -> Tensor:
        """``[1 + count, 4]`` int64 on the host, pinned where there is a device: a check word in the first row, the
        tokens, and padding behind them."""
        inputs = torch.empty((1 + count, COLUMNS), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        rows, live = inputs[1:], len(tokens.ids)
        rows[live:] = self._padding
        if live:
            rows[:live, 0] = torch.tensor(tokens.slots).repeat_interleave(torch.tensor(tokens.lengths))
            rows[:live, 1] = torch.cat([torch.arange(*span) for span in tokens.spans])
            rows[:live, 2] = torch.tensor(tokens.ids)
            rows[:live, 3] = torch.tensor(tokens.shifted)
        inputs[0] = check_word(rows)
        return inputs

    def _table(self, slots: Tensor, positions: int) -> Tensor:
        """Block tables of ``slots`` that cover ``positions``.

        Nothing is written outside of the pool; the slot's first step names an id that is.
        """
        width = min(-(-positions // self._page_size), self._state.block_table.shape[1])
        table = self._state.block_table[:, :width].index_select(0, slots)
        return table.masked_fill((table < 0) | (table >= self._pool.num_pages), SCRATCH_PAGE)

    def _forward(
        self,
        ids: Tensor,
        shifted: Tensor,
        positions: Tensor,
        attention: PackedAttention | UniformAttention,
    ) -> Prefilled:
        hidden: Tensor = self._decoder(ids, positions, attention)
        found = classify(hidden, Flag.PREFILL_NAN, Flag.PREFILL_INF)
        verdict = torch.zeros((), dtype=torch.int64, device=self._device)
        if self._draft is None:
            return Prefilled(hidden, hidden, found[:, None], verdict)
        last = self._draft(hidden, shifted, positions, attention)
        # What the draft makes of a target's fault is none of its own
        drafted = torch.where(found > 0, 0, classify(last, Flag.DRAFT_NAN, Flag.DRAFT_INF))
        return Prefilled(hidden, last, torch.stack((found, drafted), dim=1), verdict)


def token_buckets(limit: int) -> list[int]:
    """Captured numbers of tokens: powers of two from 16, and from 64 on the middles between them.

    The last is ``limit`` itself; there is none if that is 0.
    """
    powers = [16 << shift for shift in range(limit.bit_length())]
    steps = sorted([*powers, *(power * 3 // 2 for power in powers[2:])])
    return [tokens for tokens in steps if tokens < limit] + [limit] if limit else []
