"""Time to a first token: prefills captured, and eager, in turn."""

from __future__ import annotations

import random
import time
from statistics import median

import msgspec

from engine.engine import Engine
from engine.types import Request, SamplingParams

PAIRS = 7


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """From a request's arrival at an idle engine to its first token, in milliseconds; medians over ``PAIRS``."""

    num_speculative_tokens: int
    prompt_tokens: int
    captured_ms: float
    eager_ms: float
    ratio: float
    """Eager over captured."""


def compare_first_tokens(
    captured: Engine, eager: Engine, vocab_size: int, lengths: list[int]
) -> list[FirstToken]:
    """For prompts of so many random tokens each, none of which is in a prefix cache."""
    found, source = [], random.Random(0)
    for length in lengths:
        pairs: list[tuple[float, float]] = []
        for number in range(PAIRS + 1):
            prompt = [source.randrange(vocab_size) for _ in range(length)]
            order = (captured, eager) if number % 2 else (eager, captured)
            seconds = {engine: _seconds(engine, prompt) for engine in order}
            if number:  # the first one loads kernels
                pairs.append((seconds[captured], seconds[eager]))
        with_graphs, without = median(one for one, _ in pairs), median(one for _, one in pairs)
        found.append(
            FirstToken(
                num_speculative_tokens=captured.info.num_speculative_tokens,
                prompt_tokens=length,
                captured_ms=1e3 * with_graphs,
                eager_ms=1e3 * without,
                ratio=without / with_graphs,
            )
        )
    return found


def _seconds(engine: Engine, prompt: list[int]) -> float:
    """Until the first token of one request at an idle engine, which is idle again afterwards."""
    params = SamplingParams(max_tokens=2, temperature=0.0)
    start, first = time.perf_counter(), None
    engine.add(Request(request_id="first", prompt_token_ids=prompt, params=params, arrival_time=0.0))
    while engine.has_work():
        emitted = any(delta.token_ids for delta in engine.iterate().deltas)
        if emitted and first is None:
            first = time.perf_counter() - start
    assert first is not None, "a request of two tokens emits one"
    return first
