"""Measures engines side by side: the same prompts, weights and threads, in alternating rounds of one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import Request, SamplingParams

Prompts = list[list[int]]


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One contender at one batch size; medians over the rounds."""

    name: str
    batch_size: int
    output_tokens: int
    """Of all requests together."""
    seconds: float
    tokens_per_second: float
    min_tokens_per_second: float
    max_tokens_per_second: float
    accept_length: float | None
    """Tokens emitted per verify that had drafts; ``None`` without speculation."""
    steps: int | None
    """Iterations of the engine that it took."""


@dataclass(frozen=True, slots=True)
class _Round:
    seconds: float
    tokens: int
    accept_length: float | None
    steps: int | None


class EngineContender:
    """One engine of the comparison."""

    def __init__(self, name: str, options: EngineOptions) -> None:
        self.name = name
        self._engine = Engine.load(options, lambda _: None)
        self.info = self._engine.info

    def run(self, prompts: Prompts, params: SamplingParams, batch_size: int) -> _Round:
        """Serve every prompt, ``batch_size`` at a time: the next one enters when one is done.

        All batch sizes serve the same mix of prompts; large ones serve it several times, to stay full for long.
        """
        waiting = [prompt for prompt in prompts for _ in range(1 + batch_size // 8)]
        running = 0
        tokens = steps = verified = emitted = 0
        start = time.perf_counter()
        while waiting or self._engine.has_work():
            while waiting and running < batch_size:
                self._add(str(len(waiting)), waiting.pop(), params)
                running += 1
            outputs = self._engine.iterate()
            steps += 1
            for delta in outputs.deltas:
                tokens += len(delta.token_ids)
                running -= delta.finish_reason is not None
                if delta.num_drafts:
                    verified += 1
                    emitted += delta.num_accepted + 1
        return _Round(time.perf_counter() - start, tokens, emitted / verified if verified else None, steps)

    def _add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self._engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, arrival_time=0.0))


class TransformersContender:
    """``generate`` of Transformers on the same weights (an optional dependency).

    Raises:
        ImportError: Transformers is not installed.
    """

    name = "transformers"

    def __init__(self, model: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        self._device = device

    @torch.inference_mode()
    def run(self, prompts: Prompts, params: SamplingParams, batch_size: int) -> _Round:
        """One left-padded batch of the first prompts, exactly ``max_tokens`` new tokens each."""
        prompts = [prompts[i % len(prompts)] for i in range(batch_size)]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        start = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.max_tokens,
            do_sample=params.temperature > 0,
            temperature=params.temperature or None,
            top_k=0 if params.temperature > 0 else None,
            top_p=None,
            pad_token_id=0,
        )
        tokens = (out.shape[1] - width) * len(prompts)
        return _Round(time.perf_counter() - start, tokens, None, None)


Contender = EngineContender | TransformersContender


def compare(
    contenders: list[Contender],
    prompts: Prompts,
    params: SamplingParams,
    batch_sizes: list[int],
    rounds: int,
    progress: Callable[[str], None],
) -> list[BenchResult]:
    """Every contender at every batch size, alternating, after one unmeasured round each.

    Prompts repeat over the rounds, so engines should run without a prefix cache.
    """
    results = []
    for size in batch_sizes:
        measured: dict[str, list[_Round]] = {contender.name: [] for contender in contenders}
        for number in range(rounds + 1):
            for contender in contenders:
                progress(f"batch {size}, round {number} of {rounds}: {contender.name}")
                outcome = contender.run(prompts, params, size)
                if number:
                    measured[contender.name].append(outcome)
        results += [_summary(name, size, found) for name, found in measured.items()]
    return results


def _summary(name: str, batch_size: int, rounds: list[_Round]) -> BenchResult:
    rates = [outcome.tokens / outcome.seconds for outcome in rounds]
    lengths = [outcome.accept_length for outcome in rounds if outcome.accept_length is not None]
    return BenchResult(
        name=name,
        batch_size=batch_size,
        output_tokens=rounds[0].tokens,
        seconds=median(outcome.seconds for outcome in rounds),
        tokens_per_second=median(rates),
        min_tokens_per_second=min(rates),
        max_tokens_per_second=max(rates),
        accept_length=median(lengths) if lengths else None,
        steps=rounds[0].steps,
    )
