"""Device state of every slot: what one speculative step reads and what it leaves for the next.

Row ``num_slots`` of each tensor is the padding slot: seq_len 0, token 0, no drafts, no pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Final

import torch
from torch import Tensor

from engine.rng import seed_key
from engine.staging import stage
from engine.types import GREEDY_BELOW, SamplingParams

SEQ_LEN: Final = 0
NUM_DRAFTS: Final = 1
FLAGS: Final = 2
NEXT_TOKEN: Final = 3
"""Columns of ``SlotState.core``; the drafts follow ``NEXT_TOKEN``, so that columns 3.. are a verify row."""

_FLOATS: Final = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


class SlotState:
    """Static tensors indexed by slot.

    Args:
        num_slots: Live slots; one more row is kept for padding.
        num_speculative_tokens: K.
        table_width: Pages a block-table row can name.

    Attributes:
        core: ``[M, 4 + K]`` int64: seq_len (positions whose target KV is written), num_drafts (0 or K),
            flags (``engine.guard.Flag`` to tell with the next step's results; a halting one makes every step of
            the slot a no-op), next_token (accepted, KV not yet written), d1..dK.
        draft_probs: ``[M, K, V]`` float32: the distribution each draft was drawn from (sampled variants).
        block_table: ``[M, table_width]`` int32.
        keys: ``[M]`` int64 seeds, mixed.
        top_k: ``[M]`` int64, V where off.
        has_tables: ``[M]`` bool: the vocabulary-wide tables are the request's; those of others are stale.
        min_position: ``[M]`` int64: before this absolute position no stop id may be chosen.
        floats: ``[M, 6]`` float32: temperature, top_p, min_p, presence, frequency, repetition.
        logit_bias: ``[M, V]`` float32. stop_mask: ``[M, V]`` bool, the request's stop ids.
        output_counts: ``[M, V]`` int32, emitted tokens. prompt_seen: ``[M, V]`` bool.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_speculative_tokens: int,
        vocab_size: int,
        table_width: int,
        device: torch.device,
    ) -> None:
        m, k, v = num_slots + 1, num_speculative_tokens, vocab_size
        self.num_slots = num_slots
        self.padding_slot = num_slots
        self.vocab_size = vocab_size
        self.core = torch.zeros((m, 4 + k), dtype=torch.int64, device=device)
        self.draft_probs = torch.zeros((m, k, v), device=device)
        self.block_table = torch.zeros((m, table_width), dtype=torch.int32, device=device)
        self.keys = torch.zeros(m, dtype=torch.int64, device=device)
        self.top_k = torch.full((m,), v, dtype=torch.int64, device=device)
        self.has_tables = torch.zeros(m, dtype=torch.bool, device=device)
        self.min_position = torch.zeros(m, dtype=torch.int64, device=device)
        self.floats = torch.zeros((m, len(_FLOATS)), device=device)
        self.logit_bias = torch.zeros((m, v), device=device)
        self.stop_mask = torch.zeros((m, v), dtype=torch.bool, device=device)
        self.output_counts = torch.zeros((m, v), dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros((m, v), dtype=torch.bool, device=device)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of each table."""
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]

    def bind(
        self, slot: int, tokens: Sequence[int], num_prompt: int, params: SamplingParams, seed: int
    ) -> None:
        """Give ``slot`` to a request with known ``tokens``: prompt, then what it emitted before a preemption.

        Its KV starts empty: seq_len 0 and no pages. A request of one known token can step at once.
        """
        # fill_, as assigning a number to an element waits for the device
        self.core[slot].zero_()
        self.core[slot, NEXT_TOKEN].fill_(tokens[-1])
        self.block_table[slot].zero_()
        self.keys[slot].fill_(seed_key(seed))
        self.top_k[slot].fill_(min(params.top_k or self.vocab_size, self.vocab_size))
        self.min_position[slot].fill_(num_prompt + params.min_tokens)
        floats = [
            params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        ]
        self.floats[slot].copy_(stage(floats, torch.float32, self.core.device))
        self.logit_bias[slot].zero_()
        self.has_tables[slot].fill_(processes_logits(params))
        if processes_logits(params):
            self._bind_tables(slot, tokens, num_prompt, params)

    def _bind_tables(self, slot: int, tokens: Sequence[int], num_prompt: int, params: SamplingParams) -> None:
        """The vocabulary-wide tables. Other requests leave them stale, which zero penalties make harmless."""
        device = self.core.device
        known = stage(tokens, torch.int64, device)
        if params.logit_bias:
            ids = stage(list(params.logit_bias), torch.int64, device)
            biases = stage(list(params.logit_bias.values()), torch.float32, device)
            self.logit_bias[slot].index_copy_(0, ids, biases)
        self.stop_mask[slot].zero_()
        if params.stop_token_ids:
            ids = stage(params.stop_token_ids, torch.int64, device)
            self.stop_mask[slot].index_fill_(0, ids, True)
        self.prompt_seen[slot].zero_().index_fill_(0, known[:num_prompt], True)
        output = known[num_prompt:]  # counted without bincount, which waits for the device
        counts = self.output_counts[slot].zero_()
        counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def set_pages(self, updates: Sequence[tuple[int, int, list[int]]]) -> None:
        """Extend block tables: ``(slot, first index, page ids)``."""
        if not updates:
            return
        width = self.block_table.shape[1]
        # All in one copy and one kernel: many rows may reach a new page in the same step
        places: list[int] = []
        values: list[int] = []
        for slot, first, page_ids in updates:
            assert first + len(page_ids) <= width, "a block-table row is too short"
            places += range(slot * width + first, slot * width + first + len(page_ids))
            values += page_ids
        index, pages = stage(places + values, torch.int64, self.core.device).chunk(2)
        self.block_table.view(-1).index_copy_(0, index, pages.to(self.block_table.dtype))

    def raise_flags(self, slots: Tensor, owners: Tensor, flags: Tensor, verdict: Tensor) -> Tensor:
        """Add what was found in a prefill to its slots, of which the next step of each tells; ``[R]`` int64.

        Args:
            slots: ``[R]`` int64. owners: ``[N]`` int64, which of them each token belongs to.
            flags: ``[N, C]`` int64: in each column one of two bits that differ by a factor of two, or 0.
            verdict: ``[]`` int64, flags of all of them.
        """
        none = flags.new_zeros((slots.shape[0], flags.shape[1]))
        most = none.scatter_reduce(0, owners[:, None].expand_as(flags), flags, "amax")
        raised = reduce(or_, most.unbind(1), verdict)
        self.core[slots, FLAGS] |= raised
        return raised

    def start(self, slot: int, seq_len: int) -> None:
        """Prefill has written ``seq_len`` positions: all known tokens but the last, bound as next_token."""
        self.core[slot, SEQ_LEN].fill_(seq_len)


def processes_logits(params: SamplingParams) -> bool:
    """Whether the request changes logits by history, bias or position (the vocabulary-wide tables)."""
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or bool(params.logit_bias)
        or params.min_tokens > 0
    )
