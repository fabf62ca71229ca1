"""Faults to inject into an in-process engine, and what its requests got and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from torch import Tensor

from engine.engine import Engine
from engine.types import SamplingParams, TokenDelta
from tests.engine.drive import check_pages, request

Counts = Counter[tuple[str, tuple[str, ...]]]


def serve(
    engine: Engine, *requests: tuple[str, list[int], SamplingParams]
) -> tuple[list[TokenDelta], Counts]:
    """Everything that the requests got, what was counted, and forwards as ``(path, reason)`` counts."""
    for name, prompt, params in requests:
        engine.add(request(name, prompt, params))
    deltas: list[TokenDelta] = []
    counts: Counts = Counter()
    while engine.has_work():
        outputs = engine.iterate()
        deltas += outputs.deltas
        counts.update({(one.name, one.labels): one.value for one in outputs.stats.counts})
        for forward in outputs.stats.forwards:
            if forward.phase == "step":
                counts["steps", (forward.path, forward.reason)] += forward.count
        for reason, count in outputs.stats.sync_steps.items():
            counts["sync_steps", (reason,)] += count
        engine._scheduler.check()
    check_pages(engine)
    return deltas, counts


def tokens_of(deltas: list[TokenDelta], name: str) -> list[int]:
    return [token for delta in deltas if delta.request_id == name for token in delta.token_ids]


def poison(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    when: Callable[[Tensor, int], bool],
    value: float,
    row: int,
) -> None:
    """Overwrite one row of the target's logits where ``when(hidden, number of the call)``."""
    decoder = engine._runner.step._decoder
    original = decoder.logits
    calls = 0

    def logits(hidden: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        out = original(hidden)
        if when(hidden, calls):
            out = out.clone()
            out[row if out.shape[0] > abs(row) else 0, 3] = value
        return out

    monkeypatch.setattr(decoder, "logits", logits)
