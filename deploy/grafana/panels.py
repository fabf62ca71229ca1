"""What the Grafana dashboard shows: rows of panels with their queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["timeseries", "stat", "heatmap"]


@dataclass(frozen=True)
class Panel:
    """One panel; ``queries`` are (legend, expression), with ``$filter`` for the chosen instances."""

    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    stacked: bool = False
    maximum: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _percentiles(metric: str) -> tuple[tuple[str, str], ...]:
    rate = f"sum by (le) (rate({metric}_bucket{{$filter}}[$__rate_interval]))"
    return tuple((f"p{q}", f"histogram_quantile({q / 100}, {rate})") for q in (50, 95, 99))


def _rate(metric: str, filters: str = "$filter") -> str:
    return f"rate({metric}{{{filters}}}[$__rate_interval])"


OVERVIEW = Row(
    "Overview",
    (
        Panel(
            "Ready", "Servers that take requests.", (("", "sum(eyas_ready{$filter})"),), kind="stat", width=3
        ),
        Panel(
            "Accept length",
            "Tokens emitted per speculative step over the last minute; 1 means that no draft is accepted.",
            (("", "avg(eyas_spec_accept_length{$filter})"),),
            kind="stat",
            width=3,
        ),
        Panel(
            "Replayed forwards",
            "Share of the decoding forwards that ran as CUDA graphs; 0 on a CPU.",
            (("", "avg(eyas:forward_replay:ratio_rate5m{$filter})"),),
            unit="percentunit",
            kind="stat",
            width=3,
        ),
        Panel(
            "Tokens/s",
            "Generated and kept tokens.",
            (("", f"sum({_rate('eyas_generation_tokens_total')})"),),
            kind="stat",
            width=3,
        ),
        Panel(
            "Goodput",
            "Choices a second that ended well with the first token within 2.5 s.",
            (("", "sum(eyas:goodput:rate5m{$filter})"),),
            unit="reqps",
            kind="stat",
            width=4,
        ),
        Panel(
            "KV pages used",
            "Pages that requests hold; cached ones are free to be taken.",
            (("", "avg(eyas:kv_pages_used:ratio{$filter})"),),
            unit="percentunit",
            kind="stat",
            width=4,
        ),
        Panel(
            "Errors",
            "Share of the choices that ended with an error; clients that left do not count.",
            (("", "max(eyas:requests_error:ratio_rate5m{$filter})"),),
            unit="percentunit",
            kind="stat",
            width=4,
        ),
    ),
)

SPECULATION = Row(
    "Speculation",
    (
        Panel(
            "Accept length per step",
            "How many tokens single steps gave. A mean of 2 can be all twos, or ones and threes.",
            (
                (
                    "{{le}}",
                    "sum by (le) (increase(eyas_spec_accept_length_per_step_bucket{$filter}[$__rate_interval]))",
                ),
            ),
            kind="heatmap",
        ),
        Panel(
            "Accept length",
            "Five minutes against the hour: a gap is what EyasAcceptLengthCollapsed looks at.",
            (
                ("{{instance}} 5 min", "eyas:spec_accept_length:rate5m{$filter}"),
                ("{{instance}} 1 h", "eyas:spec_accept_length:rate1h{$filter}"),
            ),
        ),
        Panel(
            "Drafted and accepted tokens",
            "Per second.",
            (
                ("drafted", f"sum({_rate('eyas_spec_draft_tokens_total')})"),
                ("accepted", f"sum({_rate('eyas_spec_accepted_tokens_total')})"),
            ),
        ),
        Panel(
            "Acceptance by position",
            "Of the drafts at a position, the share that was emitted.",
            (("{{position}}", "avg by (position) (eyas:spec_position_acceptance:ratio_rate5m{$filter})"),),
            unit="percentunit",
            width=12,
            maximum=1,
        ),
        Panel(
            "Conditional acceptance by position",
            "Given that the position before was accepted: the draft's quality at that depth.",
            (("{{position}}", "avg by (position) (eyas:spec_conditional_acceptance:ratio_rate5m{$filter})"),),
            unit="percentunit",
            width=12,
            maximum=1,
        ),
    ),
)

FORWARDS = Row(
    "Forward passes",
    (
        Panel(
            "By phase and path",
            "Replayed from a CUDA graph, or eager.",
            (("{{phase}} {{path}}", f"sum by (phase, path) ({_rate('eyas_forward_total')})"),),
            unit="ops",
            stacked=True,
        ),
        Panel(
            "Eager, by reason",
            "prefill and no_graphs are no fault; above_bucket, contract, disabled and retry are.",
            (
                (
                    "{{reason}}",
                    "sum by (reason) (" + _rate("eyas_forward_total", 'path="eager", $filter') + ")",
                ),
            ),
            unit="ops",
            stacked=True,
        ),
        Panel(
            "Replay ratio",
            "Of the decoding forwards.",
            (
                ("{{instance}} replayed", "eyas:forward_replay:ratio_rate5m{$filter}"),
                ("{{instance}} fallback", "eyas:forward_fallback:ratio_rate5m{$filter}"),
            ),
            unit="percentunit",
            maximum=1,
        ),
    ),
)

GUARD = Row(
    "CUDA graphs and NaN guard",
    (
        Panel(
            "Replays by captured rows",
            "Steps a second, and the rows in them that were padding.",
            (
                ("{{phase}} {{rows}}", f"sum by (phase, rows) ({_rate('eyas_graph_replays_total')})"),
                ("padding rows", f"sum({_rate('eyas_graph_padding_rows_total')})"),
            ),
            unit="ops",
            width=6,
        ),
        Panel(
            "Contract violations",
            "Replays refused, by what had changed.",
            (
                (
                    "{{field}}",
                    "sum by (field) (increase(eyas_graph_contract_violations_total{$filter}[$__rate_interval]))",
                ),
            ),
            width=6,
        ),
        Panel(
            "Guard trips",
            "Non-finite steps, by phase and kind.",
            (
                (
                    "{{phase}} {{kind}}",
                    "sum by (phase, kind) (increase(eyas_nan_guard_trips_total{$filter}[$__rate_interval]))",
                ),
            ),
            width=6,
        ),
        Panel(
            "Guard actions",
            "What was done about them, and what caused them. Only failed is seen by a client.",
            (
                (
                    "{{action}} {{cause}}",
                    "sum by (action, cause) (increase(eyas_nan_guard_actions_total{$filter}[$__rate_interval]))",
                ),
            ),
            width=6,
        ),
    ),
)

AUDIT = Row(
    "Captured graphs, step time and audit",
    (
        Panel(
            "Captured graphs",
            "By phase; those that were turned off are below the line.",
            (
                ("{{phase}}", "sum by (phase) (eyas_graphs_captured{$filter})"),
                ("{{phase}} off", "-sum by (phase) (eyas_graphs_disabled{$filter})"),
            ),
            width=6,
        ),
        Panel(
            "Step on the device",
            "How long the device works on a step of the whole batch.",
            _percentiles("eyas_step_gpu_seconds"),
            unit="s",
            width=6,
        ),
        Panel(
            "Host gap",
            "How long the device waits for the launch of the next step.",
            _percentiles("eyas_step_host_gap_seconds"),
            unit="s",
            width=6,
        ),
        Panel(
            "Audit",
            "Tokens of finished requests that were scored again, those that are not the target's, and audits "
            "that were skipped.",
            (
                ("audited tokens", f"sum({_rate('eyas_audit_tokens_total')})"),
                ("mismatches at {{position}}", f"sum by (position) ({_rate('eyas_audit_mismatches_total')})"),
                ("audits {{outcome}}", f"sum by (outcome) ({_rate('eyas_audits_total')})"),
            ),
            width=6,
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From the arrival of the HTTP request, the queue included.",
            _percentiles("eyas_time_to_first_token_seconds"),
            unit="s",
            width=6,
        ),
        Panel(
            "Between tokens",
            "A step of m tokens after t seconds counts as m gaps of t/m.",
            _percentiles("eyas_inter_token_latency_seconds"),
            unit="s",
            width=6,
        ),
        Panel(
            "Whole request",
            "From arrival to the last token.",
            _percentiles("eyas_request_latency_seconds"),
            unit="s",
            width=6,
        ),
        Panel(
            "In the queue",
            "From arrival to first scheduled.",
            _percentiles("eyas_queue_time_seconds"),
            unit="s",
            width=6,
        ),
    ),
)

LOAD = Row(
    "Load",
    (
        Panel(
            "Tokens",
            "Per second. Prompt tokens found in the prefix cache count here, though nothing computes them.",
            (
                ("generated", f"sum({_rate('eyas_generation_tokens_total')})"),
                ("prompt", f"sum({_rate('eyas_prompt_tokens_total')})"),
            ),
        ),
        Panel(
            "Requests",
            "In the engine now.",
            (
                ("running", "sum(eyas_requests_running{$filter})"),
                ("waiting", "sum(eyas_requests_waiting{$filter})"),
            ),
        ),
        Panel(
            "Ended choices",
            "By outcome.",
            (("{{outcome}}", f"sum by (outcome) ({_rate('eyas_requests_total')})"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "KV pages",
            "Used, cached (free to be taken) and free.",
            (("{{state}}", "sum by (state) (eyas_kv_pages{$filter})"),),
            stacked=True,
        ),
        Panel(
            "Prefix cache",
            "Share of the looked-up prompt tokens whose KV was there.",
            (("{{instance}}", "eyas:prefix_cache_hit:ratio_rate5m{$filter}"),),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Preemptions and HTTP",
            "Requests that lost their slot; answers by status.",
            (
                ("preemptions", f"sum({_rate('eyas_preemptions_total')})"),
                ("HTTP {{status}}", f"sum by (status) ({_rate('eyas_http_requests_total')})"),
            ),
            unit="reqps",
        ),
        Panel(
            "Memory of the service",
            "Resident; the engine is a process of its own.",
            (("{{instance}}", "process_resident_memory_bytes{$filter}"),),
            unit="bytes",
        ),
    ),
)
