"""Engines of tests on a GPU, and everything that requests get from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

import engine
from engine.build import build
from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import SamplingParams, TokenDelta
from tests.engine.drive import Answer, check_pages, request

ROOT = Path(engine.__file__).parent.parent
SHIPPED = ROOT / "models" / "eyas-14m"
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
"""Marks of a module that needs a GPU."""
DEVICE: dict[str, Any] = {"device": "cuda", "graphs": "cuda", "dtype": "bfloat16"}
"""Options of every engine, unless a test has others."""
FLASH_DIMS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""Configuration keys of a checkpoint that FlashMLA and trtllm-gen take."""
BOS = 0


def schedules(path: Path, **options: Any) -> dict[str, Engine]:
    """An engine of each schedule over the same weights, pool and graphs; one of them may have work at a time.

    They are built for the overlapped schedule, which needs the longer tables.
    """
    defaults = DEVICE | {"kv_page_size": 64, "num_kv_pages": 120, "max_model_len": 256, "schedule": "overlap"}
    chosen = EngineOptions(model=str(path), **defaults | options)
    parts = build(path, chosen, lambda _: None)
    return {
        name: Engine(replace(parts, info=msgspec.structs.replace(parts.info, schedule=name)), chosen)
        for name in ("overlap", "sync")
    }


@dataclass
class Served:
    """What requests got, and what was counted meanwhile."""

    answers: dict[str, Answer] = field(default_factory=dict)
    ends: dict[str, TokenDelta] = field(default_factory=dict)
    """The last delta of each request."""
    counts: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)
    forwards: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By phase, path and reason."""
    sync_steps: Counter[str] = field(default_factory=Counter)

    def of(self, metric: str) -> dict[tuple[str, ...], int]:
        """The counts of one metric that are not zero, by label values."""
        return {labels: count for (name, labels), count in self.counts.items() if name == metric and count}

    @property
    def eager_steps(self) -> dict[str, int]:
        """Steps that no graph served, by reason."""
        return {
            reason: count
            for (phase, path, reason), count in self.forwards.items()
            if phase == "step" and path == "eager"
        }


def serve(
    engine_: Engine, requests: Iterable[tuple[str, Sequence[int], SamplingParams]], limit: int = 20_000
) -> Served:
    """Add all ``requests`` (name, prompt, parameters), and iterate until the engine is idle."""
    for name, prompt, params in requests:
        engine_.add(request(name, prompt, params))
    served = Served()
    for _ in range(limit):
        if not engine_.has_work():
            check_pages(engine_)
            return served
        outputs = engine_.iterate()
        engine_._scheduler.check()
        for delta in outputs.deltas:
            served.answers.setdefault(delta.request_id, Answer()).take(delta)
            served.ends[delta.request_id] = delta
        stats = outputs.stats
        served.counts.update({(one.name, one.labels): one.value for one in stats.counts})
        served.forwards.update({(one.phase, one.path, one.reason): one.count for one in stats.forwards})
        served.sync_steps.update(stats.sync_steps)
    raise AssertionError(f"the engine still works after {limit} iterations")


def source_prompts(count: int) -> list[list[int]]:
    """Pieces of this repository's own source, 9 to 56 tokens of the shipped model each."""
    found = _pieces()
    assert len(found) >= count, f"the source has only {len(found)} pieces"
    return found[:: len(found) // count][:count]


@cache
def _pieces() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    found = []
    for path in sorted(chain((ROOT / "engine").rglob("*.py"), (ROOT / "service").rglob("*.py"))):
        ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        starts = range(0, len(ids) - 64, 293)
        found += [[BOS, *ids[start : start + 8 + start % 48]] for start in starts]
    return found
