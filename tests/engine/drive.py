"""Drives an in-process engine in tests: requests in, everything they got out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import Request, SamplingParams, TokenDelta, TokenLogprobs


@dataclass
class Answer:
    """Everything one request received."""

    token_ids: list[int] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """(tokens, num_drafts, num_accepted) of each delta."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0

    def take(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "a delta came after the last one"
        self.token_ids += delta.token_ids
        self.steps.append((len(delta.token_ids), delta.num_drafts, delta.num_accepted))
        self.logprobs += delta.logprobs or []
        self.finish_reason = delta.finish_reason
        self.stop_token_id = delta.stop_token_id
        self.num_cached_tokens += delta.num_cached_tokens

    @property
    def accepted(self) -> int:
        return sum(step[2] for step in self.steps)


def make_engine(path: Path, **options: Any) -> Engine:
    """An engine with small defaults for tests."""
    defaults: dict[str, Any] = {
        "model": str(path),
        "device": "cpu",
        "threads": 1,
        "max_num_seqs": 8,
        "kv_page_size": 8,
        "num_kv_pages": 200,
    }
    return Engine.load(EngineOptions(**defaults | options), lambda _: None)


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)


def request(name: str, prompt: Sequence[int], params: SamplingParams, **changes: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=list(prompt), params=params, arrival_time=0.0, **changes)


def finish(engine: Engine, limit: int = 10_000) -> dict[str, Answer]:
    """Iterate until idle; the answers of all requests that got a delta."""
    answers: dict[str, Answer] = {}
    for _ in range(limit):
        if not engine.has_work():
            check_pages(engine)
            return answers
        collect(engine, answers)
    raise AssertionError(f"the engine still works after {limit} iterations")


def collect(engine: Engine, answers: dict[str, Answer]) -> None:
    """One iteration; adds its deltas to ``answers``, and checks the accounting of pages (I4)."""
    outputs = engine.iterate()
    for delta in outputs.deltas:
        answers.setdefault(delta.request_id, Answer()).take(delta)
    stats = outputs.stats
    assert stats.pages_free + stats.pages_cached + stats.pages_used == engine.info.num_pages - 1
    engine._scheduler.check()


def check_pages(engine: Engine) -> None:
    """An idle engine holds no page but cached ones."""
    stats = engine._scheduler.stats()
    assert (stats.pages_used, stats.requests_running, stats.requests_waiting) == (0, 0, 0)


def generate(engine: Engine, prompts: Iterable[Sequence[int]], params: SamplingParams) -> list[Answer]:
    """All prompts at once with the same parameters, in order."""
    names = []
    for index, prompt in enumerate(prompts):
        names.append(str(index))
        engine.add(request(names[-1], prompt, params))
    answers = finish(engine)
    return [answers[name] for name in names]
