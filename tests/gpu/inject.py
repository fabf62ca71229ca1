"""Faults put into chosen replays, prefills and retries, by what they read: weights of the model and slots' state.

A CUDA graph runs no Python, so a fault inside of one is a weight that is overwritten on the device before its
replay and put back behind it, in stream order.

F1's final hidden state is the current token alone, so the place of a fault is a token: a NaN in its row of the
embedding makes exactly its rows not finite; a huge weight of its dimension in the last norm makes their best logit
infinite, and leaves zero what was zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from engine.engine import Engine
from engine.graph import StepGraphs
from engine.model.layers import RmsNorm
from engine.state import NEXT_TOKEN

Kind = Literal["nan", "inf", "oov"]
Fault = Callable[[], AbstractContextManager[None]]

HUGE = 3e37
"""Times sqrt(hidden size) finite in bf16, times a logit's weight above its range."""


@contextmanager
def overwritten(*edits: tuple[Tensor, float]) -> Iterator[None]:
    """Elements filled with a value while this lasts."""
    kept = [part.clone() for part, _ in edits]
    with torch.inference_mode():
        for part, value in edits:
            part.fill_(value)
    try:
        yield
    finally:
        with torch.inference_mode():
            for (part, _), before in zip(edits, kept, strict=True):
                part.copy_(before)


def target_fault(engine: Engine, kind: Kind, token: int, place: int) -> Fault:
    """The target's logits behind ``token``; for ``oov``, the token at ``place`` of the first slot's run itself."""
    step, state = engine._runner.step, engine._runner.state
    if kind == "oov":
        return lambda: overwritten((state.core[0, NEXT_TOKEN + place], state.vocab_size))
    if kind == "nan":
        return lambda: overwritten((step._decoder.embedding.weight[token], math.nan))
    return lambda: overwritten(*_scale(step._decoder.norm, token, HUGE))


def draft_fault(engine: Engine, kind: Kind, token: int) -> Fault:
    """The draft's logits behind ``token``, which the same replay must not verify."""
    step = engine._runner.step
    draft: Any = step._draft_model
    if kind == "nan":
        return lambda: overwritten((draft.embedding.weight[token], math.nan))
    return lambda: overwritten(*_scale(draft.norm, token, HUGE))


def prefill_fault(engine: Engine, kind: Kind, token: int) -> Fault:
    """The target's hidden states at ``token``."""
    decoder = engine._runner.step._decoder
    if kind == "nan":
        return lambda: overwritten((decoder.embedding.weight[token], math.nan))
    return lambda: overwritten(*_scale(decoder.norm, token, torch.finfo(decoder.norm.weight.dtype).max))


def _scale(norm: RmsNorm, dimension: int, value: float) -> list[tuple[Tensor, float]]:
    """The weight as a GPU reads it, and its form for a CPU."""
    scaled = min(value * math.sqrt(norm.size), torch.finfo(norm.scaled_weight.dtype).max)
    return [(norm.weight[dimension], value), (norm.scaled_weight[dimension], scaled)]


class OnReplay:
    """A captured phase whose replay of one number runs within a fault."""

    def __init__(self, inner: Any, number: int, fault: Fault) -> None:
        self._inner, self._left, self._fault = inner, number, fault

    @property
    def fired(self) -> bool:
        return self._left <= 0

    def replay(self) -> tuple[Tensor, ...]:
        self._left -= 1
        if self._left:
            return self._inner.replay()  # type: ignore[no-any-return]
        with self._fault():
            return self._inner.replay()  # type: ignore[no-any-return]


def graphs_of(engine: Engine) -> StepGraphs:
    graphs = engine._runner.graphs
    assert graphs is not None
    return graphs
