"""Writes the static inputs of captured steps, without waiting for the device."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine.contract import FREE, StepBuffers
from engine.spec import slots_check

_STAGES: Final = 8
"""Pinned copies of the slots, so that none is overwritten before the device has read it: an iteration uses two
(step and draft phase), and its draft phase is known to be done only when the step two iterations later is."""


class StepInputs:
    """Copies a step's inputs to ``buffers``, by way of host twins."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        pinned = buffers.slots.is_cuda
        self._slots = torch.empty((_STAGES, *buffers.slots.shape), dtype=torch.int64, pin_memory=pinned)
        # One is enough: the next step with a grammar is launched when the results of this one have been read
        self._allowed = torch.empty(buffers.allowed.shape, dtype=torch.int32, pin_memory=pinned)
        self._turn = 0

    def copy_in(self, rows: int, slots: list[int], allowed: Tensor | None, hidden: Tensor | None) -> None:
        """Write a bucket's inputs: the live rows, then each input's filler up to ``rows``."""
        stage, buffers, live = self._slots[self._turn], self.buffers, len(slots)
        self._turn = (self._turn + 1) % _STAGES
        padded = slots + [buffers.padding_slot] * (rows - live)
        # By way of numpy: to make a tensor of a list takes ten times as long
        stage.numpy()[: 1 + rows] = [slots_check(padded), *padded]
        buffers.slots[: 1 + rows].copy_(stage[: 1 + rows], non_blocking=True)
        if allowed is not None:
            self._allowed[:live] = allowed
            self._allowed[live:rows] = FREE
            buffers.allowed[:rows].copy_(self._allowed[:rows], non_blocking=True)
        if hidden is not None:  # it is on the device already
            buffers.hidden[:live] = hidden
            buffers.hidden[live:rows] = 0
