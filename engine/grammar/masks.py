"""The masks of a step's rows that have a grammar, found in a time that the other rows can spare."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.walker import PATIENCE, Constraint
from engine.runner import Runner
from engine.sampler import mask_words
from engine.sequence import Sequence


class StepMasks:
    """Asks for what each constrained row may choose next; who is not answered in time is left out of the step.

    Those whose grammars keep to their share of time are asked first, and of them those who waited longest.
    """

    def __init__(self, runner: Runner, grammars: GrammarCompiler, vocab_size: int, stride: int) -> None:
        self._runner = runner
        self._grammars = grammars
        self._shape = stride, mask_words(vocab_size)

    def find(self, rows: list[Sequence]) -> tuple[list[Sequence], Tensor | None]:
        """The rows that can step now, and what they may choose, ``[B, W, ceil(V / 32)]`` on the host.

        That is ``None`` if none of them has a grammar. If one of ``rows`` has, it waits for everything that was
        launched.
        """
        constrained = [(row, row.constraint) for row in rows if row.constraint is not None]
        if not constrained:
            return rows, None
        masks = self._ask_all(constrained, has_others=len(constrained) < len(rows))
        ready = [row for row in rows if row.constraint is None or row in masks]
        if not masks:
            return ready, None
        allowed = torch.full((len(ready), *self._shape), -1, dtype=torch.int32)
        for place, row in enumerate(ready):
            if row in masks:
                allowed[place] = torch.from_numpy(masks[row])
        return ready, allowed

    def _ask_all(
        self, constrained: list[tuple[Sequence, Constraint]], *, has_others: bool
    ) -> dict[Sequence, NDArray[np.int32]]:
        """The masks that are there in time."""
        drafts = self._runner.read_drafts([row for row, _ in constrained])
        order = sorted(
            zip(constrained, drafts, strict=True),
            key=lambda asked: (asked[0][1].excess, asked[0][1].answered_at),
        )
        masks: dict[Sequence, NDArray[np.int32]] = {}
        until = time.monotonic() + PATIENCE
        for (row, constraint), row_drafts in order:
            mask = np.full(self._shape, -1, dtype=np.int32)
            alone = not has_others and not masks
            output = row.tokens[row.num_prompt :]
            walker = self._grammars.walker(slow=constraint.is_slow)
            if walker.walk(constraint, output, row_drafts, mask, until=until, alone=alone):
                masks[row] = mask
        return masks
