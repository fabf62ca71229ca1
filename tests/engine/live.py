"""One request on a runner, driven step by step, and the bundles of its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.build import Parts, build
from engine.bundle import Bundle, StepPath, read_bundle
from engine.bundle_writer import BundleWriter
from engine.options import EngineOptions
from engine.pending import PendingStep
from engine.replay_report import Finding
from engine.sampler import GREEDY, Variant
from engine.sequence import RowResult, Sequence
from engine.types import Request, SamplingParams
from tests.fixtures.checkpoints import F1

SLOT = 2
PAGES = [7, 3, 9, 12, 5, 2]
"""Out of order, so that a mistake in putting them back shows."""


@dataclass
class Live:
    """One request on a runner, driven step by step without a scheduler."""

    parts: Parts
    options: EngineOptions
    sequence: Sequence

    @classmethod
    def start(cls, path: Path, prompt: Seq[int], params: SamplingParams, **options: Any) -> Live:
        given: dict[str, Any] = {"max_num_seqs": 4, "kv_page_size": 8, "num_kv_pages": 16, "device": "cpu"}
        chosen = EngineOptions(model=str(path), max_model_len=100, **given | options)
        parts = build(path, chosen, lambda _: None)
        request = Request(request_id="r", prompt_token_ids=list(prompt), params=params, arrival_time=0.0)
        stride = parts.info.num_speculative_tokens + 1
        live = cls(parts, chosen, Sequence(request, (0, 0.0, 0), 90, stride))
        live._prefill()
        return live

    def _prefill(self) -> None:
        runner, sequence = self.parts.runner, self.sequence
        sequence.slot, sequence.pages = SLOT, list(PAGES)
        sequence.prefill_end = len(sequence.tokens) - 1
        runner.bind(sequence, sequence.request.params.seed or 0)
        runner.state.set_pages([(SLOT, 0, PAGES)])
        if sequence.left_to_prefill:
            runner.prefill([sequence.next_chunk(sequence.left_to_prefill)])

    def launch(self) -> PendingStep:
        self.sequence.steps_in_flight = 1
        pending = self.parts.runner.launch([self.sequence])
        self.sequence.steps_in_flight = 0
        return pending

    def step(self) -> RowResult:
        [result] = self.launch().results()
        return result

    def run_until(self, flags: int) -> RowResult:
        """Steps until one raises one of ``flags``; its tokens are not kept."""
        for _ in range(20):
            result = self.step()
            if result.flags & flags:
                return result
            self.sequence.tokens += result.token_ids
        raise AssertionError("no such flag came up")

    def poison_logits(self, when: int) -> None:
        """Make the first row of the target's logits NaN in the ``when``-th step from now."""
        head, calls = self.parts.runner.decoder.head, 0

        def poison(_: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor | None:
            nonlocal calls
            if args[0].shape[0] != self.sequence.stride:
                return None  # a draft's
            calls += 1
            return (
                out.index_fill(0, torch.tensor([0], device=out.device), math.nan) if calls == when else None
            )

        head.register_forward_hook(poison)

    def write(self, directory: Path, result: RowResult, variant: Variant = GREEDY, rows: int = 4) -> str:
        runner = self.parts.runner
        writer = BundleWriter(directory, self.options, self.parts.info)
        step = StepPath(
            phase="step", path="replay", reason="none", rows=rows, variant=variant, verify_drafts=True
        )
        return writer.write(result, step, runner.state, runner.pool, "replay")

    def bundle(self, directory: Path, result: RowResult, variant: Variant = GREEDY, rows: int = 4) -> Bundle:
        assert self.write(directory, result, variant, rows) == "written"
        [path] = directory.iterdir()
        return read_bundle(path)


def before(f1: F1, token: int, steps: int) -> int:
    """The token from which greedy decoding reaches ``token`` in ``steps`` steps."""
    return next(start for start in range(f1.vocab_size) if f1.walk(start, steps)[-1] == token)


def place(found: Finding | None) -> tuple[str, str, int] | None:
    return None if found is None else (found.phase, found.part, found.position)
