"""The names of the metrics, what each call records, and that no call can stop the service (D12, D15)."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract import GraphContract, StepBuffers
from engine.guard import CONTRACT, Flag, events, violated_fields
from engine.options import MAX_SPECULATIVE_TOKENS
from engine.state import SlotState
from engine.types import Count, ForwardCount, StepStats
from service.engine_counts import CONTRACT_FIELDS, ENGINE_COUNTS
from service.engine_metrics import INFO_LABELS
from service.metric_registry import describe
from service.metrics import ServiceMetrics
from tests.service.fake_engine import engine_info

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def metrics() -> ServiceMetrics:
    return ServiceMetrics()


def value(metrics: ServiceMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"eyas_{name}", labels)


def stats(**changes: Any) -> StepStats:
    base = dict.fromkeys(
        ("requests_running", "requests_waiting", "pages_used", "pages_cached", "pages_free"), 0
    )
    return StepStats(**{**base, "forwards": [], **changes})


def test_documentation_is_what_the_registry_says(metrics: ServiceMetrics):
    assert DOCS.read_text() == describe(metrics.families)


def test_names_types_and_labels(metrics: ServiceMetrics):
    families = {
        family.name.removeprefix("eyas_"): (family.kind, family.labels) for family in metrics.families
    }
    counter, gauge, histogram = ("counter", ()), ("gauge", ()), ("histogram", ())
    assert families == {
        "spec_drafts_total": counter,
        "spec_draft_tokens_total": counter,
        "spec_accepted_tokens_total": counter,
        "spec_draft_tokens_per_position_total": ("counter", ("position",)),
        "spec_accepted_tokens_per_position_total": ("counter", ("position",)),
        "spec_accept_length": gauge,
        "spec_accept_length_per_step": histogram,
        "forward_total": ("counter", ("phase", "path", "reason")),
        "requests_running": gauge,
        "requests_waiting": gauge,
        "kv_pages": ("gauge", ("state",)),
        "prompt_tokens_total": counter,
        "prefix_cache_queried_tokens_total": counter,
        "prefix_cache_hit_tokens_total": counter,
        "preemptions_total": counter,
        "sync_steps_total": ("counter", ("reason",)),
        "requests_started_total": counter,
        "requests_total": ("counter", ("outcome",)),
        "generation_tokens_total": counter,
        "http_requests_total": ("counter", ("route", "method", "status")),
        "queue_time_seconds": histogram,
        "time_to_first_token_seconds": histogram,
        "inter_token_latency_seconds": histogram,
        "request_latency_seconds": histogram,
        "graph_replays_total": ("counter", ("phase", "rows")),
        "graph_padding_rows_total": counter,
        "graph_contract_checks_total": counter,
        "graph_contract_violations_total": ("counter", ("field",)),
        "nan_guard_rows_checked_total": ("counter", ("phase",)),
        "nan_guard_trips_total": ("counter", ("phase", "kind")),
        "nan_guard_actions_total": ("counter", ("action", "cause")),
        "nan_guard_pages_scrubbed_total": counter,
        "nan_bundles_total": ("counter", ("outcome",)),
        "graphs_captured": ("gauge", ("phase",)),
        "graphs_disabled": ("gauge", ("phase",)),
        "graph_capture_seconds": gauge,
        "graph_memory_bytes": gauge,
        "step_gpu_seconds": histogram,
        "step_host_gap_seconds": histogram,
        "audits_total": ("counter", ("outcome",)),
        "audit_tokens_total": counter,
        "audit_mismatches_total": ("counter", ("position",)),
        "metrics_errors_total": counter,
        "engine_restarts_total": counter,
        "ready": gauge,
        "info": ("gauge", INFO_LABELS),
    }


def test_the_page_has_every_family_and_no_created_series(metrics: ServiceMetrics):
    page, content_type = metrics.exposition()
    assert content_type.startswith("text/plain")
    text = page.decode()
    for family in metrics.families:
        assert f"# HELP {family.name} " in text
        if family.kind != "gauge":
            assert re.search(
                r"\bper (step|token|choice|request|forward|event|call|attempt|row|page)\b", family.text
            ), family.name
    assert "_created" not in text


def test_the_engines_own_counts(metrics: ServiceMetrics):
    metrics.engine_step(
        stats(counts=[Count("graph_replays", ("step", "4"), 2), Count("graph_padding_rows", (), 3)])
    )
    metrics.engine_step(
        stats(counts=[Count("graph_replays", ("step", "4"), 1), Count("of_a_newer_engine", (), 1)])
    )
    assert value(metrics, "graph_replays_total", phase="step", rows="4") == 3
    assert value(metrics, "graph_padding_rows_total") == 3
    assert value(metrics, "metrics_errors_total") == 1


def test_speculative_steps(metrics: ServiceMetrics):
    for num_drafts, num_accepted in [(3, 3), (3, 0), (3, 1), (1, 1), (0, 0)]:
        metrics.spec_step(num_drafts=num_drafts, num_accepted=num_accepted)
    assert value(metrics, "spec_drafts_total") == 4
    assert value(metrics, "spec_draft_tokens_total") == 10
    assert value(metrics, "spec_accepted_tokens_total") == 5
    drafted = [value(metrics, "spec_draft_tokens_per_position_total", position=str(p)) for p in range(4)]
    accepted = [value(metrics, "spec_accepted_tokens_per_position_total", position=str(p)) for p in range(4)]
    assert drafted == [4, 3, 3, None]
    assert accepted == [3, 1, 1, None]
    below = [value(metrics, "spec_accept_length_per_step_bucket", le=f"{n}.0") for n in range(1, 10)]
    assert below == [1, 3, 3, 4, 4, 4, 4, 4, 4]
    assert value(metrics, "spec_accept_length_per_step_sum") == 9
    assert value(metrics, "spec_accept_length") == 9 / 4


def test_the_accept_length_forgets_after_a_minute():
    clock = Clock()
    metrics = ServiceMetrics(clock)
    assert math.isnan(value(metrics, "spec_accept_length"))
    metrics.spec_step(num_drafts=3, num_accepted=3)
    clock.now += 30
    metrics.spec_step(num_drafts=3, num_accepted=0)
    assert value(metrics, "spec_accept_length") == 2.5
    clock.now += 30
    assert value(metrics, "spec_accept_length") == 1.0
    clock.now += 30
    assert math.isnan(value(metrics, "spec_accept_length"))


def test_engine_steps_set_gauges_and_add_up_counters(metrics: ServiceMetrics):
    step = ForwardCount(phase="step", path="eager", reason="no_graphs", count=2)
    prefill = ForwardCount(phase="prefill", path="eager", reason="prefill", count=1)
    metrics.engine_step(
        stats(
            requests_running=2,
            requests_waiting=5,
            pages_used=3,
            pages_cached=4,
            pages_free=8,
            forwards=[step, prefill],
            prompt_tokens=70,
            prefix_cache_queried_tokens=70,
            prefix_cache_hit_tokens=64,
        )
    )
    metrics.engine_step(stats(requests_running=1, pages_free=15, forwards=[step], preemptions=1))
    assert value(metrics, "requests_running") == 1
    assert value(metrics, "requests_waiting") == 0
    assert [value(metrics, "kv_pages", state=s) for s in ("used", "cached", "free")] == [0, 0, 15]
    assert value(metrics, "forward_total", phase="step", path="eager", reason="no_graphs") == 4
    assert value(metrics, "forward_total", phase="prefill", path="eager", reason="prefill") == 1
    assert value(metrics, "prompt_tokens_total") == 70
    assert value(metrics, "prefix_cache_queried_tokens_total") == 70
    assert value(metrics, "prefix_cache_hit_tokens_total") == 64
    assert value(metrics, "preemptions_total") == 1


def test_a_dead_engine_takes_its_gauges_along(metrics: ServiceMetrics):
    metrics.engine_ready("m", "1", engine_info(graphs_captured={"step": [1, 2], "other": [1]}))
    metrics.engine_step(
        stats(requests_running=2, pages_used=3, prompt_tokens=70, graphs_disabled={"step": 1, "other": 1})
    )
    metrics.engine_down()
    assert value(metrics, "requests_running") == 0
    assert value(metrics, "kv_pages", state="used") == 0
    assert value(metrics, "prompt_tokens_total") == 70
    for name in ("graphs_captured", "graphs_disabled"):
        assert [value(metrics, name, phase=phase) for phase in ("step", "draft", "other")] == [0, 0, None]


def test_what_an_engine_captured_is_told_until_the_next_one_is_ready(metrics: ServiceMetrics):
    told = [("graphs_captured", {"phase": phase}) for phase in ("step", "draft", "prefill")]
    told += [("graph_capture_seconds", {}), ("graph_memory_bytes", {})]

    def values() -> list[float | None]:
        return [value(metrics, name, **labels) for name, labels in told]

    assert values() == [0, 0, 0, 0, 0]
    rows = {"step": [1, 1, 2, 2], "draft": [1, 2], "prefill": [16, 32, 64]}
    first = engine_info(graphs_captured=rows, graph_capture_seconds=1.5, graph_memory_bytes=1 << 20)
    metrics.engine_ready("m", "1", first)
    assert values() == [4, 2, 3, 1.5, 1 << 20]
    metrics.engine_down()
    assert values() == [0, 0, 0, 0, 0]
    metrics.engine_ready("m", "1", engine_info(graphs_captured={"step": [1]}, graph_capture_seconds=0.5))
    assert values() == [1, 0, 0, 0.5, 0]


def test_graphs_that_are_turned_off_are_a_state(metrics: ServiceMetrics):
    for disabled, expected in (({"step": 2}, [2, 0]), ({"step": 1, "draft": 1}, [1, 1]), ({}, [0, 0])):
        metrics.engine_step(stats(graphs_disabled=disabled))
        assert [value(metrics, "graphs_disabled", phase=phase) for phase in ("step", "draft")] == expected


def test_step_times(metrics: ServiceMetrics):
    metrics.engine_step(
        stats(step_gpu_seconds=[0.0012, 0.0017], step_host_gap_seconds=[0.00003, 0.00008, -1e-9])
    )
    assert value(metrics, "step_gpu_seconds_count") == 2
    assert value(metrics, "step_gpu_seconds_sum") == pytest.approx(0.0029)
    assert value(metrics, "step_gpu_seconds_bucket", le="0.0015") == 1
    assert value(metrics, "step_host_gap_seconds_bucket", le="5e-05") == 2
    assert value(metrics, "step_host_gap_seconds_bucket", le="0.0001") == 3


def test_series_that_alerts_ask_for_exist_before_the_first_event(metrics: ServiceMetrics):
    for name, count in ENGINE_COUNTS.items():
        for labels in count.series:
            assert value(metrics, f"{name}_total", **dict(zip(count.labels, labels, strict=True))) == 0
    positions = [value(metrics, "audit_mismatches_total", position=str(p)) for p in range(10)]
    assert positions == [0.0] * (MAX_SPECULATIVE_TOKENS + 1) + [None]
    assert value(metrics, "nan_guard_actions_total", action="retried", cause="replay") == 0
    assert value(metrics, "sync_steps_total", reason="retry") == 0


def test_every_part_of_the_contract_has_its_series():
    # Phase and rows name the graph and cannot differ
    frozen = {field.name for field in fields(GraphContract)} - {"phase", "rows"}
    inputs = {field.name for field in fields(StepBuffers) if "filler" in field.metadata}
    checked = set(violated_fields(int(CONTRACT)))
    state = SlotState(
        num_slots=1, num_speculative_tokens=1, vocab_size=8, table_width=1, device=torch.device("cpu")
    )
    bound = {name for name, _ in state.tensors()}
    assert set(CONTRACT_FIELDS) == frozen | inputs | checked | bound | {"pages"}


def test_every_trip_of_the_guard_has_its_series():
    for flag in Flag:
        for name, labels in events(int(flag)):
            assert labels in ENGINE_COUNTS[name].series, (flag, name, labels)


def test_requests_and_latencies(metrics: ServiceMetrics):
    metrics.request_started()
    metrics.queue_time(0.25)
    metrics.first_token(0.5)
    metrics.inter_token(0.0, 2)
    metrics.inter_token(0.3, 3)
    metrics.inter_token(0.1, 1)
    metrics.tokens(3)
    metrics.tokens(4)
    metrics.request_finished("length", 0.9)
    assert value(metrics, "requests_started_total") == 1
    assert value(metrics, "queue_time_seconds_sum") == 0.25
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "inter_token_latency_seconds_count") == 6
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.00025") == 2
    assert value(metrics, "generation_tokens_total") == 7
    outcomes = [value(metrics, "requests_total", outcome=o) for o in ("stop", "length", "abort", "error")]
    assert outcomes == [0, 1, 0, 0]
    assert value(metrics, "request_latency_seconds_sum") == 0.9


def test_what_clients_send_makes_no_new_series(metrics: ServiceMetrics):
    for n in range(100):
        metrics.http_request(f"/v1/secret{n}", f"VERB{n}", 1000 + n)
    metrics.http_request("/v1/completions", "POST", 200)
    text = metrics.exposition()[0].decode()
    assert len([line for line in text.splitlines() if line.startswith("eyas_http_requests_total{")]) == 2
    assert value(metrics, "http_requests_total", route="other", method="other", status="other") == 100
    assert value(metrics, "http_requests_total", route="/v1/completions", method="POST", status="200") == 1


def test_failures_are_counted_and_never_raised(metrics: ServiceMetrics, caplog: pytest.LogCaptureFixture):
    def broken(*_: object) -> None:
        raise RuntimeError("sink")

    metrics._accept_length.observe = broken  # type: ignore[method-assign]
    for _ in range(3):
        metrics.spec_step(num_drafts=3, num_accepted=1)
    metrics.spec_step(num_drafts=1, num_accepted=2)
    metrics.tokens(-1)
    metrics.request_finished("invented", 1.0)  # type: ignore[arg-type]
    metrics.inter_token(1.0, 0)
    assert value(metrics, "metrics_errors_total") == 7
    assert len([record for record in caplog.records if "spec_step failed" in record.message]) == 1
    metrics.tokens(2)
    assert value(metrics, "generation_tokens_total") == 2


CALLS = st.one_of(
    st.tuples(st.just("tokens"), st.tuples(st.integers(-3, 9))),
    st.tuples(st.just("first_token"), st.tuples(st.floats())),
    st.tuples(st.just("inter_token"), st.tuples(st.floats(), st.integers(-2, 9))),
    st.tuples(st.just("queue_time"), st.tuples(st.floats())),
    st.tuples(st.just("request_finished"), st.tuples(st.sampled_from(["stop", "abort", "?"]), st.floats())),
    st.tuples(st.just("http_request"), st.tuples(st.text(), st.text(), st.integers(-5, 999))),
    st.tuples(
        st.just("engine_step"),
        st.tuples(st.builds(stats, prompt_tokens=st.integers(-5, 5), preemptions=st.integers(-1, 2))),
    ),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(CALLS, max_size=20))
def test_counters_never_fall_whatever_is_recorded(calls: list[tuple[str, tuple[Any, ...]]]):
    metrics = ServiceMetrics()

    def counters() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.name.endswith(("_total", "_count", "_bucket"))
        }

    before = counters()
    for name, arguments in calls:
        getattr(metrics, name)(*arguments)
        after = counters()
        assert all(after[key] >= before[key] for key in before)
        before = after
