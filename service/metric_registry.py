"""A registry that knows how its metrics are documented, and the formats in which they are read."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from service.compat_metrics import VllmNames

OPENMETRICS_TYPE = "application/openmetrics-text"

logger = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R", bound="MetricRegistry")


def never_raises(feed: Callable[Concatenate[_R, _P], None]) -> Callable[Concatenate[_R, _P], None]:
    """Make a feeding call harmless: a failure is counted in ``eyas_metrics_errors_total`` and logged once."""

    @functools.wraps(feed)
    def guarded(self: _R, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            feed(self, *args, **kwargs)
        except Exception:
            self.feeding_failed(feed.__name__)

    return guarded


class MetricFamily(NamedTuple):
    """One metric as its documentation shows it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str


class MetricRegistry:
    """Base of `ServiceMetrics`: makes metrics under the prefix ``eyas_`` and shows them."""

    def __init__(self) -> None:
        # "_created" series double the page and tell nothing that a restart does not show.
        disable_created_metrics()
        self.registry = CollectorRegistry(auto_describe=True)
        self.families: list[MetricFamily] = []
        self._page: Collector = self.registry
        ProcessCollector(registry=self.registry)
        self._failed_calls: set[str] = set()
        self._errors = self._counter(
            "metrics_errors_total", "Recordings of other metrics that failed and were dropped; per call."
        )

    def feeding_failed(self, call: str) -> None:
        """Count the failure of a feeding call that is being handled, and log the first of its name."""
        self._errors.inc()
        if call not in self._failed_calls:
            self._failed_calls.add(call)
            logger.exception("metrics: %s failed; further failures are only counted", call)

    def export_vllm_names(self, model: str) -> None:
        """Have the page show vLLM's names too, for the served ``model``."""
        self._page = VllmNames(self.registry, model)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The page of ``/metrics`` and its content type.

        Args:
            accept: The client's ``Accept`` header: OpenMetrics where it names that, else Prometheus text.
        """
        if any(_wants_openmetrics(kind) for kind in accept.lower().split(",")):
            # The library's default would turn the colon of vLLM's names into an underscore.
            content = openmetrics.generate_latest(self._page, escaping=openmetrics.ALLOWUTF8)
            return content, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._page), CONTENT_TYPE_LATEST

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        self.families.append(MetricFamily(f"eyas_{name}", "counter", labels, text))
        return Counter(f"eyas_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        self.families.append(MetricFamily(f"eyas_{name}", "gauge", labels, text))
        return Gauge(f"eyas_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        self.families.append(MetricFamily(f"eyas_{name}", "histogram", (), text))
        return Histogram(f"eyas_{name}", text, buckets=buckets, registry=self.registry)


def _wants_openmetrics(kind: str) -> bool:
    """Whether an entry of an ``Accept`` header, in lower case, names OpenMetrics, and not to refuse it."""
    name, *parameters = ("".join(part.split()) for part in kind.split(";"))
    return name == OPENMETRICS_TYPE and not any(re.fullmatch(r"q=0(\.0*)?", part) for part in parameters)


def describe(families: list[MetricFamily]) -> str:
    """The Markdown of ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "Served at `/metrics` in the Prometheus text format, by one service process in front of one engine. "
        "Counters start at 0 with the process. The standard `process_*` metrics of the service process come with "
        "them.",
        "",
        "| name | type | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels) or "-"
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.text} |")
    return "\n".join(lines) + "\n"
