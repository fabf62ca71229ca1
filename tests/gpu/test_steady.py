"""Steady decode: every live batch size is replayed, nothing runs eager, and no launch waits for the device."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.bench_steady import Batch
from engine.engine import Engine
from engine.graph import buckets
from engine.types import Outputs, SamplingParams
from tests.engine.drive import greedy
from tests.gpu.serving import ON_GPU, SHIPPED, schedules, source_prompts

pytestmark = ON_GPU
MAX_ROWS = 20
MAX_TOKENS = 96
"""Enough that no request ends while it is watched: each step emits four tokens at most."""
STEPS = 6
PARAMS = {
    "greedy": greedy(MAX_TOKENS),
    "full": SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_k=20, frequency_penalty=0.2, seed=1),
}

Record = Callable[[str, object], None]


@pytest.fixture(scope="module", params=[3, 0], ids=["K=3", "K=0"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {"num_speculative_tokens": request.param, "max_num_seqs": MAX_ROWS, "prefix_cache": False}
    made = schedules(SHIPPED, **options)["overlap"]
    yield made
    made.close()


def _steady(engine: Engine, size: int, variant: str) -> Batch:
    return Batch(engine, [prompt[:12] for prompt in source_prompts(size)], PARAMS[variant])


def _forwards(outputs: list[Outputs]) -> Counter[tuple[str, str, str]]:
    found: Counter[tuple[str, str, str]] = Counter()
    for one in outputs:
        found.update({(f.phase, f.path, f.reason): f.count for f in one.stats.forwards})
    return found


def test_the_captured_rows_are_reported(engine: Engine, record_property: Record) -> None:
    info = engine.info
    phases = {"step", "draft", "prefill"} if info.num_speculative_tokens else {"step", "prefill"}
    assert set(info.graphs_captured) == phases
    for phase, rows in info.graphs_captured.items():
        expected = [1, 2, 4, 8, 16, 20] if phase != "prefill" else [16, 32, 64, 96, 128, 192, 256]
        assert sorted(set(rows)) == expected
    assert info.graph_capture_seconds > 0
    assert (info.graph_memory_bytes > 0) == (info.device != "cpu")
    told = f"{info.graph_capture_seconds:.1f} s, {info.graph_memory_bytes / 2**20:.0f} MiB"
    record_property(f"capture K={info.num_speculative_tokens}", told)


@pytest.mark.parametrize("variant", list(PARAMS))
def test_no_live_batch_size_runs_eager(engine: Engine, variant: str, record_property: Record) -> None:
    replays = 0
    for size in range(1, MAX_ROWS + 1):
        batch = _steady(engine, size, variant)
        outputs = [batch.iterate() for _ in range(STEPS)]
        batch.drop()
        assert _forwards(outputs) == {("step", "replay", "none"): STEPS}, f"{size} live requests"
        counts = Counter[tuple[str, tuple[str, ...]]]()
        for one in outputs:
            counts.update({(count.name, count.labels): count.value for count in one.stats.counts})
        bucket = next(rows for rows in buckets(MAX_ROWS) if rows >= size)
        assert counts["graph_replays", ("step", str(bucket))] == STEPS, f"{size} live requests"
        assert counts["graph_padding_rows", ()] == STEPS * (bucket - size)
        assert counts["graph_contract_checks", ()] == STEPS
        replays += STEPS
    told = f"0 eager, {replays} replays at 1 to {MAX_ROWS} live requests"
    record_property(f"steady K={engine.info.num_speculative_tokens} {variant}", told)


@pytest.mark.parametrize("size", [1, 7, MAX_ROWS])
@pytest.mark.parametrize("variant", list(PARAMS))
def test_no_launch_waits_for_the_device(engine: Engine, variant: str, size: int) -> None:
    """The wait for the results of the step before is one for an event, which this mode does not report."""
    batch = _steady(engine, size, variant)
    marker = torch.zeros(1, device=engine.info.device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(STEPS):
                batch.iterate()
            waits = _waits(seen)
            marker.item()
            noticed = _waits(seen)[len(waits) :]
        finally:
            torch.cuda.set_sync_debug_mode(before)
    batch.drop()
    assert noticed, "the mode notices what does wait"
    assert waits == []


def _waits(seen: list[warnings.WarningMessage]) -> list[str]:
    """Where something waited. (The mode's own warning that it is a prototype speaks of synchronizing too.)"""
    told = "called a synchronizing"
    return [f"{one.filename}:{one.lineno}" for one in seen if told in str(one.message).lower()]


def test_one_request_more_than_max_graph_rows_runs_eager_and_is_counted(record_property: Record) -> None:
    limit = 6
    options = {"max_num_seqs": limit + 2, "max_graph_rows": limit, "prefix_cache": False}
    engine = schedules(SHIPPED, **options)["overlap"]
    assert max(engine.info.graphs_captured["step"]) == limit
    expected = {limit: ("step", "replay", "none"), limit + 1: ("step", "eager", "above_bucket")}
    for size in (limit, limit + 1, limit):
        batch = _steady(engine, size, "greedy")
        outputs = [batch.iterate() for _ in range(STEPS)]
        batch.drop()
        assert _forwards(outputs) == {expected[size]: STEPS}, f"{size} live requests"
    record_property("above_bucket", f"{limit + 1} live requests over {limit} rows: {STEPS} of {STEPS} steps")
    engine.close()
