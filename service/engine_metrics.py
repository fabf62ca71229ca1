"""Metrics of the engine: what each iteration and each start of it told."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from engine.types import EngineInfo, StepStats, SyncReason
from service.engine_counts import ENGINE_COUNTS
from service.metric_registry import MetricRegistry, never_raises

ENGINE_LABELS = (
    "model_type", "device", "dtype", "attention_backend", "schedule", "num_speculative_tokens",
    "max_model_len", "max_num_seqs",
)  # fmt: skip
INFO_LABELS = ("model", "version", *ENGINE_LABELS)
_STEP_BUCKETS = (
    0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015,
    0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip
_GRAPH_PHASES = ("step", "draft", "prefill")


class EngineMetrics(MetricRegistry):
    """The engine's part of the registry. Gauges tell of the engine that lives now, and are 0 while none does."""

    def __init__(self) -> None:
        super().__init__()
        self._define_load()
        self._define_graphs()
        self._define_counts()
        self.engine_down()

    def _define_load(self) -> None:
        self._forwards = self._counter(
            "forward_total",
            "Forward passes by phase, path and reason; per forward of a whole batch. "
            "A whole-step forward counts once, as step.",
            "phase",
            "path",
            "reason",
        )
        self._running = self._gauge("requests_running", "Requests that hold a slot of the engine.")
        self._waiting = self._gauge("requests_waiting", "Requests in the engine's queue.")
        self._pages = self._gauge("kv_pages", "Pages of the KV pool by state, without scratch.", "state")
        self._prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of requests admitted, cached ones included; per token."
        )
        self._prefix_queried = self._counter(
            "prefix_cache_queried_tokens_total", "Tokens looked up in the prefix cache; per token."
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hit_tokens_total", "Tokens whose KV the prefix cache had; per token."
        )
        self._sync_steps = self._counter(
            "sync_steps_total",
            "Steps of the overlapped schedule that waited for the step before them; per step of a whole batch.",
            "reason",
        )
        for reason in get_args(SyncReason):
            self._sync_steps.labels(reason)
        self._preemptions = self._counter(
            "preemptions_total", "Requests that lost their slot to make room and wait again; per event."
        )
        self._restarts = self._counter(
            "engine_restarts_total", "Attempts to start the engine again after its death; per attempt."
        )
        self._ready = self._gauge("ready", "1 while requests are taken, as /ready tells, else 0.")
        self._info = self._gauge(
            "info", "1 from when the engine is first ready; what is served, as labels.", *INFO_LABELS
        )

    def _define_graphs(self) -> None:
        self._captured = self._gauge(
            "graphs_captured", "Captured graphs of the engine by phase; 0 where there are none.", "phase"
        )
        self._disabled = self._gauge(
            "graphs_disabled", "Captured graphs that are not replayed any more, by phase.", "phase"
        )
        self._capture_seconds = self._gauge(
            "graph_capture_seconds", "How long capturing took when the engine started."
        )
        self._graph_memory = self._gauge(
            "graph_memory_bytes", "Memory of the device that capturing took when the engine started."
        )
        self._step_gpu = self._histogram(
            "step_gpu_seconds",
            "How long the device worked on a step of the whole batch (on a CPU: its call); one sample per step.",
            _STEP_BUCKETS,
        )
        self._step_gap = self._histogram(
            "step_host_gap_seconds",
            "How long the device waited for the launch of a step that followed another at once; one sample per "
            "step.",
            _STEP_BUCKETS,
        )

    def _define_counts(self) -> None:
        """The engine's own counters."""
        self._counts = {
            name: self._counter(f"{name}_total", count.text, *count.labels)
            for name, count in ENGINE_COUNTS.items()
        }
        for name, count in ENGINE_COUNTS.items():
            for values in count.series:
                self._counts[name].labels(*values)

    @never_raises
    def engine_step(self, stats: StepStats) -> None:
        """Take over one iteration's statistics."""
        self._running.set(stats.requests_running)
        self._waiting.set(stats.requests_waiting)
        self._pages.labels("used").set(stats.pages_used)
        self._pages.labels("cached").set(stats.pages_cached)
        self._pages.labels("free").set(stats.pages_free)
        for forward in stats.forwards:
            self._forwards.labels(forward.phase, forward.path, forward.reason).inc(forward.count)
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._prefix_queried.inc(stats.prefix_cache_queried_tokens)
        self._prefix_hits.inc(stats.prefix_cache_hit_tokens)
        self._preemptions.inc(stats.preemptions)
        for reason, count in stats.sync_steps.items():
            self._sync_steps.labels(reason).inc(count)
        for phase in {*_GRAPH_PHASES, *stats.graphs_disabled}:
            self._disabled.labels(phase).set(stats.graphs_disabled.get(phase, 0))
        for seconds in stats.step_gpu_seconds:
            self._step_gpu.observe(max(0.0, seconds))
        for seconds in stats.step_host_gap_seconds:
            self._step_gap.observe(max(0.0, seconds))
        for one in stats.counts:
            counter = self._counts[one.name]
            (counter.labels(*one.labels) if one.labels else counter).inc(one.value)

    @never_raises
    def watch_ready(self, ready: Callable[[], bool]) -> None:
        """Where ``eyas_ready`` asks, at each scrape."""
        self._ready.set_function(lambda: float(ready()))

    @never_raises
    def engine_ready(self, model: str, version: str, info: EngineInfo) -> None:
        """The engine can take requests; tells what it resolved."""
        self._info.clear()
        self._info.labels(
            model=model, version=version, **{name: str(getattr(info, name)) for name in ENGINE_LABELS}
        ).set(1)
        for phase, rows in info.graphs_captured.items():
            self._captured.labels(phase).set(len(rows))
        self._capture_seconds.set(info.graph_capture_seconds)
        self._graph_memory.set(info.graph_memory_bytes)

    @never_raises
    def engine_restart(self) -> None:
        """An attempt to start the engine again begins."""
        self._restarts.inc()

    @never_raises
    def engine_down(self) -> None:
        """The engine is gone, and with it everything that its gauges told."""
        self._running.set(0)
        self._waiting.set(0)
        for state in ("used", "cached", "free"):
            self._pages.labels(state).set(0)
        for gauge in (self._captured, self._disabled):
            gauge.clear()
            for phase in _GRAPH_PHASES:
                gauge.labels(phase).set(0)
        self._capture_seconds.set(0)
        self._graph_memory.set(0)
