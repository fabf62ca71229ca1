"""The verdicts of a step on its rows: non-finite values, and state or layout that breaks the replay contract.

A violation, or a fault of the target, halts its slot on the device: the step emits nothing for it, and every later
step of the slot, one already launched included, is a no-op whose writes go to the scratch page. A fault of the
draft only drops drafts. Flags travel with the step's results; there is no synchronisation.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Final

import torch
from torch import Tensor


class Flag(IntFlag):
    """Bits of a row's flag word."""

    TARGET_NAN = 1
    """A verify row that decides a token holds a NaN."""
    TARGET_INF = 2
    """The same with an infinity and no NaN."""
    IGNORED = 4
    """A verify row past the accepted ones is not finite: nothing depends on it."""
    DRAFT_NAN = 8
    DRAFT_INF = 16
    PREFILL_NAN = 32
    """The target's hidden states of a prefill hold a NaN."""
    PREFILL_INF = 64
    TARGET_OOV = 128
    """A token to verify is not in the vocabulary."""
    SLOTS = 256
    """The slots that a captured step read are not those that the host wrote; no row of the step ran."""
    SEQ_LENS = 512
    """A slot's length is outside of what its block table can name."""
    BLOCK_TABLE = 1024
    """A page id is outside of the pool, or a written position has none."""
    CU_SEQLENS_Q = 2048
    """The query offsets that a kernel reads are not those of the uniform layout."""
    PREFILL_INPUTS = 4096
    """What a captured prefill read is not what the host wrote; none of its tokens was taken."""


CONTRACT: Final = Flag.SLOTS | Flag.SEQ_LENS | Flag.BLOCK_TABLE | Flag.CU_SEQLENS_Q | Flag.PREFILL_INPUTS
"""The contract's verdicts on values that only the device knows."""
NUMERICAL: Final = Flag.TARGET_NAN | Flag.TARGET_INF | Flag.TARGET_OOV | Flag.PREFILL_NAN | Flag.PREFILL_INF
"""The guard's verdicts on the target."""
PREFILL: Final = Flag.PREFILL_NAN | Flag.PREFILL_INF | Flag.PREFILL_INPUTS
"""What was found in a prefill, and is told by the first step behind it."""
DRAFT: Final = Flag.DRAFT_NAN | Flag.DRAFT_INF
"""The guard's verdicts on the draft: its drafts are dropped, and what its request wrote is not shared."""
HALTING: Final = CONTRACT | NUMERICAL
"""Flags of a slot that must not go on."""


def classify(values: Tensor, nan: Flag, inf: Flag) -> Tensor:
    """``nan``, ``inf`` or 0 for each row of ``values`` ``[..., V]``: int64 ``[...]``.

    The sum of a row is finite exactly when all of it is (float32 sums of logits do not overflow).
    """
    total = values.sum(dim=-1, dtype=torch.float32)
    has_nan = values.amax(dim=-1).isnan()  # amax hands a NaN on
    kind = torch.where(has_nan, int(nan), int(inf))
    return torch.where(total.isfinite(), 0, kind)


def reduce_rows(flags: Tensor, rows: Tensor) -> Tensor:
    """Bitwise or over the positions of each row where ``rows`` is True: ``[B, W]`` twice -> ``[B]`` int64.

    Positions carry one kind of flag each, of the two that ``classify`` was given; the lesser one (NaN) wins where
    both are present.
    """
    found = torch.where(rows & (flags > 0), flags, _NONE)
    least = found.amin(dim=-1)
    return torch.where(least == _NONE, 0, least)


_NONE: Final = 1 << 30

_TRIPS: Final = {
    Flag.TARGET_NAN: ("verify", "nan"),
    Flag.TARGET_INF: ("verify", "inf"),
    Flag.TARGET_OOV: ("verify", "oov"),
    Flag.DRAFT_NAN: ("draft", "nan"),
    Flag.DRAFT_INF: ("draft", "inf"),
    Flag.PREFILL_NAN: ("prefill", "nan"),
    Flag.PREFILL_INF: ("prefill", "inf"),
}


def events(flags: int) -> list[tuple[str, tuple[str, ...]]]:
    """What to count for a row's flag word, except for what becomes of a halted row: metric names and labels."""
    found: list[tuple[str, tuple[str, ...]]] = [
        ("nan_guard_trips", labels) for flag, labels in _TRIPS.items() if flags & flag
    ]
    if flags & DRAFT and not flags & HALTING:
        found.append(("nan_guard_actions", ("drafts_dropped", "draft")))
    if flags & Flag.IGNORED:
        found.append(("nan_guard_actions", ("ignored", "none")))
    return found


def violated_fields(flags: int) -> list[str]:
    """The contract's fields that a flag word names."""
    return [str(flag.name).lower() for flag in CONTRACT if flags & flag]


def is_halted(flags: Tensor) -> Tensor:
    """Whether a flag word halts its slot: bool of the same shape."""
    return (flags & int(HALTING)) != 0
