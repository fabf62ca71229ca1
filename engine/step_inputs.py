"""Writes the static inputs of captured steps, without waiting for the device."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine.contract import FREE, StepBuffers
from engine.spec import slots_check

_STAGES: Final = 8
"""Pinned copies of the inputs, so that none is overwritten before the device has read it: an iteration uses two
(step and draft phase), and its draft phase is known to be done only when the step two iterations later is."""


class StepInputs:
    """Copies a step's inputs to ``buffers``, by way of host twins."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self._stages = [self._make_stage() for _ in range(_STAGES)]
        self._turn = 0

    def _make_stage(self) -> StepBuffers:
        """Host twins of the inputs, pinned where a device copies from them."""
        pinned = self.buffers.slots.is_cuda
        twins = {
            name: torch.full(tensor.shape, filler, dtype=tensor.dtype, pin_memory=pinned)
            for name, tensor, filler in self.buffers.inputs()
        }
        return StepBuffers(padding_slot=self.buffers.padding_slot, **twins)

    def copy_in(self, rows: int, slots: list[int], allowed: Tensor | None, hidden: Tensor | None) -> None:
        """Write a bucket's inputs: the live rows, then each input's filler up to ``rows``."""
        stage, buffers, live = self._stages[self._turn], self.buffers, len(slots)
        self._turn = (self._turn + 1) % _STAGES
        padded = slots + [buffers.padding_slot] * (rows - live)
        # By way of numpy: to make a tensor of a list takes ten times as long
        stage.slots.numpy()[: 1 + rows] = [slots_check(padded), *padded]
        buffers.slots[: 1 + rows].copy_(stage.slots[: 1 + rows], non_blocking=True)
        if allowed is not None:
            stage.allowed[:live] = allowed
            stage.allowed[live:rows] = FREE
            buffers.allowed[:rows].copy_(stage.allowed[:rows], non_blocking=True)
        if hidden is not None:  # it is on the device already
            buffers.hidden[:live] = hidden
            buffers.hidden[live:rows] = 0
