"""The formats of /metrics: Prometheus text, OpenMetrics by ``Accept``, and vLLM's names (``--metrics-compat``)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from engine.types import ForwardCount, StepStats
from service.compat_metrics import VLLM_NAMES
from service.metrics import ServiceMetrics
from tests.service.harness import MODEL, serving, tokens_of

OPENMETRICS = "application/openmetrics-text"
PROMETHEUS_ACCEPT = f"{OPENMETRICS};version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"


def samples(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        if not family.name.startswith("process_")
        for sample in family.samples
    }


def fed() -> ServiceMetrics:
    """Metrics after three steps of one request."""
    metrics = ServiceMetrics()
    metrics.engine_step(
        StepStats(
            requests_running=2,
            requests_waiting=5,
            pages_used=6,
            pages_cached=3,
            pages_free=15,
            forwards=[ForwardCount("step", "replay", "none", 3)],
            prompt_tokens=11,
            prefix_cache_queried_tokens=11,
            prefix_cache_hit_tokens=4,
            preemptions=1,
        )
    )
    for num_accepted in (3, 1, 0):
        metrics.spec_step(num_drafts=3, num_accepted=num_accepted)
    metrics.tokens(7)
    metrics.first_token(0.3)
    metrics.inter_token(0.2, 6)
    metrics.request_finished("stop", 0.5)
    return metrics


def test_openmetrics_has_the_same_samples():
    metrics = fed()
    text, text_type = metrics.exposition("text/plain")
    opened, opened_type = metrics.exposition(PROMETHEUS_ACCEPT)
    assert text_type.startswith("text/plain; version=")
    assert opened_type == f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
    assert opened.endswith(b"# EOF\n")
    assert samples(parse_openmetrics(opened.decode())) == samples(parse_text(text.decode()))


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/html,application/xhtml+xml", "text/plain"),
        (PROMETHEUS_ACCEPT, OPENMETRICS),
        (f"text/plain , {OPENMETRICS.upper()}", OPENMETRICS),
        (f"{OPENMETRICS};version=nonsense", OPENMETRICS),
        (";;,,=", "text/plain"),
        ("application/openmetrics-text;q=0, text/plain", "text/plain"),
        ("application/openmetrics-text; version=1.0.0 ; Q = 0.000", "text/plain"),
        ("application/openmetrics-text;q=0.001", "application/openmetrics-text"),
    ],
)
async def test_the_route_negotiates_and_no_header_breaks_it(accept: str, kind: str):
    async with serving() as server:
        response = await server.http.get("/metrics", headers={"Accept": accept})
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)


def test_vllm_names_have_the_values_of_ours():
    metrics = fed()
    metrics.export_vllm_names("m")
    page, _ = metrics.exposition()
    values = samples(parse_text(page.decode()))

    def vllm(name: str, **labels: str) -> float:
        return values[f"vllm:{name}", frozenset({"model_name": "m", "engine": "0", **labels}.items())]

    assert vllm("num_requests_running") == 2
    assert vllm("num_requests_waiting") == 5
    assert vllm("kv_cache_usage_perc") == 0.25
    assert vllm("num_preemptions_total") == 1
    assert vllm("prompt_tokens_total") == 11
    assert vllm("generation_tokens_total") == 7
    assert vllm("prefix_cache_queries_total") == 11
    assert vllm("prefix_cache_hits_total") == 4
    assert vllm("request_success_total", finished_reason="stop") == 1
    assert vllm("request_success_total", finished_reason="length") == 0
    assert vllm("spec_decode_num_drafts_total") == 3
    assert vllm("spec_decode_num_draft_tokens_total") == 9
    assert vllm("spec_decode_num_accepted_tokens_total") == 4
    assert vllm("spec_decode_num_accepted_tokens_per_pos_total", position="0") == 2
    assert vllm("spec_decode_num_accepted_tokens_per_pos_total", position="1") == 1
    assert vllm("time_to_first_token_seconds_bucket", le="0.25") == 0
    assert vllm("time_to_first_token_seconds_bucket", le="0.5") == 1
    assert vllm("inter_token_latency_seconds_count") == 6
    assert vllm("e2e_request_latency_seconds_sum") == 0.5


def test_our_own_names_stay_and_every_mapped_family_exists():
    metrics = fed()
    plain = samples(parse_text(metrics.exposition()[0].decode()))
    metrics.export_vllm_names("m")
    both = samples(parse_text(metrics.exposition()[0].decode()))
    assert plain.items() <= both.items()
    ours = {family.name.removesuffix("_total") for family in metrics.families}
    assert VLLM_NAMES.keys() <= ours


def test_an_empty_pool_is_not_a_division_by_zero():
    metrics = ServiceMetrics()
    metrics.export_vllm_names("m")
    assert b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0' in metrics.exposition()[0]


async def test_the_option_turns_them_on():
    async with serving(output=tokens_of("ab"), metrics_compat="vllm") as server:
        assert (await server.complete(max_tokens=2)).status_code == 200
        page = (await server.http.get("/metrics")).text
        assert f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} 2.0' in page
        opened = (await server.http.get("/metrics", headers={"Accept": OPENMETRICS})).text
        assert f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} 2.0' in opened
    async with serving() as server:
        assert "vllm:" not in (await server.http.get("/metrics")).text
