"""The engine's own counters as metrics: name in ``StepStats.counts``, help text, labels."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple


class EngineCount(NamedTuple):
    """How the service shows one counter of the engine."""

    text: str
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ()
    """Label values that exist, at 0, from the start: an increase from nothing would be missed by a query."""


ENGINE_COUNTS: dict[str, EngineCount] = {
    "graph_replays": EngineCount(
        "Replays of captured phases by captured rows; per forward of a whole batch.", ("phase", "rows")
    ),
    "graph_padding_rows": EngineCount("Padding rows in replayed steps; per row."),
    "graph_contract_checks": EngineCount(
        "Comparisons of what a captured step holds frozen with the present; per forward asked for."
    ),
    "graph_contract_violations": EngineCount(
        "Replays refused because something that the captured step holds frozen has changed; per forward asked for.",
        ("field",),
    ),
    "nan_guard_rows_checked": EngineCount("Rows checked for NaN and infinity; per row.", ("phase",)),
    "nan_guard_trips": EngineCount(
        "Steps of a request whose logits or hidden states were not finite; per request and step.",
        ("phase", "kind"),
        tuple(product(("prefill", "verify", "draft"), ("nan", "inf"))),
    ),
    "nan_guard_actions": EngineCount(
        "What the guard did: failed a request, dropped its drafts for one step, or ignored a row that "
        "decided nothing; per event.",
        ("action", "cause"),
        (("failed", "model"), ("drafts_dropped", "draft"), ("ignored", "none")),
    ),
    "nan_guard_pages_scrubbed": EngineCount("Pages zeroed after a fault; per page."),
}
