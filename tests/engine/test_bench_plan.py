"""How many tokens a plan of ``eyas bench gpu`` needs: what the scheduler makes of it, without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from engine.bench_gpu import params_for
from engine.bench_plan import PAGE_SIZE, BenchPlan
from engine.bench_steady import LEAST_STEPS, measure
from engine.engine import Engine
from engine.errors import ConfigError
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import RowResult
from engine.types import Outputs


class OneTokenEngine:
    """An engine's iterations in which no draft is ever accepted, read at once or one iteration later."""

    def __init__(self, plan: BenchPlan, *, overlap: bool) -> None:
        [k] = plan.depths
        options = plan.options("none", k)
        assert options.num_kv_pages is not None and options.max_model_len is not None
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=options.max_num_seqs,
                num_pages=options.num_kv_pages,
                page_size=PAGE_SIZE,
                prefill_chunk_size=options.prefill_chunk_size,
                max_model_len=options.max_model_len,
                stride=k + 1,
                prefix_cache=False,
                cache_salt=b"",
            )
        )
        self._overlap = overlap
        self._pending: list[RowResult] = []
        self.add, self.abort = self._scheduler.add, self._scheduler.abort
        self.has_work: Callable[[], bool] = self._scheduler.has_work

    def iterate(self) -> Outputs:
        rows = self._scheduler.schedule().rows
        told = [RowResult(row, row.epoch, token_ids=[1], num_drafts=0, num_accepted=0) for row in rows]
        if self._overlap:
            told, self._pending = self._pending, told
        return Outputs(deltas=self._scheduler.process(told), stats=self._scheduler.stats())


def plan(rows: int, prompt_tokens: int, **changes: Any) -> BenchPlan:
    defaults: dict[str, Any] = {"depths": [3], "accept_length": None, "output_tokens": 1}
    return BenchPlan(
        batch_sizes=[1, rows],
        variants=["greedy"],
        prompt_tokens=prompt_tokens,
        device="cpu",
        **defaults | changes,
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("rows", "prompt_tokens"), [(1, 2), (1, 20_000), (64, 1024), (256, 1024), (8, 5000), (3, 7000)]
)
def test_the_fewest_tokens_that_are_not_refused_are_enough(rows: int, prompt_tokens: int, overlap: bool):
    least = plan(rows, prompt_tokens).least_output_tokens
    assert least == 8  # the first, three to settle, four that are measured

    def steps(output_tokens: int) -> int:
        asked = plan(rows, prompt_tokens, output_tokens=output_tokens)
        engine = cast(Engine, OneTokenEngine(asked, overlap=overlap))
        return len(measure(engine, [[1] * prompt_tokens] * rows, params_for("greedy", output_tokens)).seconds)

    assert steps(least + 1) == LEAST_STEPS
    with pytest.raises(ConfigError, match=f"--output-tokens {least}: "):
        steps(least)


def test_forced_drafts_count():
    assert plan(64, 1024, accept_length=4.0).least_output_tokens == 31
    assert plan(64, 1024, accept_length=4.0, depths=[0]).least_output_tokens == 8
