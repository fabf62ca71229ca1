"""Steady decoding, timed: every row live, prefill excluded.

A measurement fills B rows with prompts, waits until all of them decode, and times the engine's iterations from then
on until the first request ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from engine.engine import Engine
from engine.errors import ConfigError
from engine.model.loader import LoadedModel
from engine.model.moe import Moe
from engine.types import Outputs, Request, SamplingParams

SETTLE_STEPS = 3
LEAST_STEPS = 4
"""Of a window worth a median."""


@dataclass(slots=True)
class Window:
    """What the iterations of one measurement gave."""

    seconds: list[float] = field(default_factory=list)
    device_seconds: list[float] = field(default_factory=list)
    gap_seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    verified: int = 0
    verify_tokens: int = 0
    eager: int = 0
    live: list[int] = field(default_factory=list)

    def add(self, outputs: Outputs, seconds: float, live: int) -> None:
        """One iteration; ``live``: positions with KV when it was launched."""
        self.seconds.append(seconds)
        self.live.append(live)
        for delta in outputs.deltas:
            self.tokens += len(delta.token_ids)
            if delta.num_drafts:
                self.verified += 1
                self.verify_tokens += delta.num_accepted + 1
        self.eager += sum(one.count for one in outputs.stats.forwards if one.path == "eager")
        self.device_seconds += outputs.stats.step_gpu_seconds
        self.gap_seconds += outputs.stats.step_host_gap_seconds


class Batch:
    """Requests that decode side by side; all of them do once it is made."""

    def __init__(self, engine: Engine, prompts: list[list[int]], params: SamplingParams) -> None:
        self._engine = engine
        self._max_tokens = params.max_tokens
        self._prompt_tokens = sum(map(len, prompts))
        self._emitted = {str(number): 0 for number in range(len(prompts))}
        for name, prompt in zip(self._emitted, prompts, strict=True):
            engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, arrival_time=0.0))
        while not all(self._emitted.values()):
            self.iterate()
        for _ in range(SETTLE_STEPS):
            self.iterate()

    @property
    def live_positions(self) -> int:
        """Positions with KV of all rows together; the last token of each has none yet."""
        return self._prompt_tokens + sum(emitted - 1 for emitted in self._emitted.values())

    def iterate(self) -> Outputs:
        """One iteration in which no request ends.

        Raises:
            ConfigError: One does: the requests are too short to measure.
        """
        outputs = self.try_iterate()
        if outputs is None:
            raise ConfigError(
                f"--output-tokens {self._max_tokens}: the first request ends before {LEAST_STEPS} steps of "
                "all of them can be measured"
            )
        return outputs

    def try_iterate(self) -> Outputs | None:
        """One iteration, or ``None`` where it ended a request."""
        outputs = self._engine.iterate()
        ended = False
        for delta in outputs.deltas:
            if delta.error is not None:
                raise RuntimeError(f"request {delta.request_id} failed: {delta.error.message}")
            self._emitted[delta.request_id] += len(delta.token_ids)
            ended |= delta.finish_reason is not None
        return None if ended else outputs

    def drop(self) -> None:
        """End all requests."""
        for name in self._emitted:
            self._engine.abort(name)
        while self._engine.has_work():
            self._engine.iterate()


def measure(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Window:
    """One window of steady decoding, of as many requests as there are prompts.

    Raises:
        ConfigError: The requests are too short to measure.
    """
    batch, window = Batch(engine, prompts, params), Window()
    last = time.perf_counter()
    while True:
        live = batch.live_positions
        outputs = batch.iterate() if len(window.seconds) < LEAST_STEPS else batch.try_iterate()
        now = time.perf_counter()
        if outputs is None:
            batch.drop()
            return window
        window.add(outputs, now - last, live)
        last = now


@contextmanager
def recorded_routing(model: LoadedModel) -> Iterator[dict[str, list[int]]]:
    """How many distinct routed experts each MoE forward's rows choose, of target and draft, in order of calls."""
    counts: dict[str, list[int]] = {"verify": [], "draft": []}
    handles: list[RemovableHandle] = []
    draft: object = model.draft

    def watch(root: nn.Module, phase: str) -> None:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            assert isinstance(module, Moe)
            counts[phase].append(module.router(args[0])[0].unique().numel())

        found = (module for module in root.modules() if isinstance(module, Moe))
        handles.extend(module.register_forward_pre_hook(note) for module in found)

    watch(model.decoder, "verify")
    if isinstance(draft, nn.Module):
        watch(draft, "draft")
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
