"""Eyas's metrics under vLLM's names too, for dashboards, autoscalers and gateways that know those.

Derived at each scrape from the registry, so nothing is counted twice and the two can never differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

VLLM_NAMES = {
    "eyas_requests_running": "vllm:num_requests_running",
    "eyas_requests_waiting": "vllm:num_requests_waiting",
    "eyas_preemptions": "vllm:num_preemptions",
    "eyas_prompt_tokens": "vllm:prompt_tokens",
    "eyas_generation_tokens": "vllm:generation_tokens",
    "eyas_requests": "vllm:request_success",
    "eyas_prefix_cache_queried_tokens": "vllm:prefix_cache_queries",
    "eyas_prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
    "eyas_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "eyas_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "eyas_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "eyas_queue_time_seconds": "vllm:request_queue_time_seconds",
    "eyas_spec_drafts": "vllm:spec_decode_num_drafts",
    "eyas_spec_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "eyas_spec_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "eyas_spec_accepted_tokens_per_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}
"""Families by name, counters without ``_total``. ``eyas_kv_pages`` becomes ``vllm:kv_cache_usage_perc``."""
_LABEL_NAMES = {"outcome": "finished_reason"}


class VllmNames(Collector):
    """The metrics of another collector, followed by those with a vLLM name under it."""

    def __init__(self, inner: Collector, model: str) -> None:
        """
        Args:
            inner: The registry.
            model: Value of vLLM's label ``model_name``.
        """
        self._inner = inner
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        own = list(self._inner.collect())
        yield from own
        for metric in own:
            if metric.name in VLLM_NAMES:
                yield self._renamed(metric, VLLM_NAMES[metric.name])
            elif metric.name == "eyas_kv_pages":
                yield self._cache_usage(metric.samples)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        made = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {_LABEL_NAMES.get(key, key): value for key, value in sample.labels.items()}
            made.samples.append(
                sample._replace(
                    name=name + sample.name.removeprefix(metric.name), labels={**self._labels, **labels}
                )
            )
        return made

    def _cache_usage(self, samples: Iterable[Sample]) -> Metric:
        pages = {sample.labels["state"]: sample.value for sample in samples}
        total = sum(pages.values())
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the KV pages that are used, 0 to 1.", labels=[*self._labels]
        )
        usage.add_metric([*self._labels.values()], pages["used"] / total if total else 0.0)
        return usage
