"""What a captured step holds frozen, and the static inputs that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from engine.sampler import Variant

Phase = Literal["step", "draft", "prefill"]


class GraphKey(NamedTuple):
    """Names one captured graph."""

    phase: Phase
    rows: int
    """Of a prefill: tokens, each of which is a row."""
    variant: Variant
    short: bool = False
    """Its rows reach no further than ``AttentionBackend.short_length`` says."""


FREE: Final = -1
"""A word of the mask that allows every token."""


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """The static inputs of every captured step; a bucket binds their leading rows.

    Each field's ``filler`` is what a padding row holds (the slots' is the padding slot, kept in ``padding_slot``).
    """

    padding_slot: int
    slots: Tensor = field(metadata={"filler": 0})
    """``[1 + max_rows]`` int64: ``slots_check`` of the bucket's slots, fillers included, then the slots."""
    allowed: Tensor = field(metadata={"filler": FREE})
    """``[max_rows, W, ceil(V / 32)]`` int32, one bit a token; all ones for free and padding rows."""
    hidden: Tensor = field(metadata={"filler": 0})
    """``[max_rows, H]``, the draft's states behind a prefill (phase ``draft`` only)."""

    def inputs(self) -> Iterator[tuple[str, Tensor, int]]:
        """Name, tensor and filler of each input."""
        for name, filler in _FILLERS:
            yield name, getattr(self, name), self.padding_slot if name == "slots" else filler


_FILLERS: Final = [
    (one.name, one.metadata["filler"]) for one in fields(StepBuffers) if "filler" in one.metadata
]


class Binding(NamedTuple):
    """One tensor as a captured kernel knows it; of an input, the tensor whose leading rows a bucket reads."""

    name: str
    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GraphContract:
    """What a captured step holds frozen."""

    phase: Phase
    rows: int
    stride: int
    variant: Variant
    table_width: int
    num_pages: int
    padding_slot: int
    backend: str
    reads: frozenset[str]
    """What the backend's kernels read, as it declares: the query offsets are bound only where they are read."""
    bindings: tuple[Binding, ...]

    def violation(self, now: GraphContract) -> str | None:
        """The first field, or bound tensor, that differs from ``now``; ``None`` if none does."""
        if self == now:
            return None
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(now, one.name)
            if mine == theirs:
                continue
            if one.name != "bindings":
                return one.name
            names = [a.name for a, b in zip(self.bindings, now.bindings, strict=False) if a != b]
            return names[0] if names else "bindings"
        raise AssertionError("unequal contracts differ in a field")
