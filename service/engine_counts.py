"""The engine's own counters as metrics: name in ``StepStats.counts``, help text, labels."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from engine.options import MAX_SPECULATIVE_TOKENS

CONTRACT_FIELDS = (
    # Values that the device checks at each replay
    "slots", "core", "seq_lens", "block_table", "cu_seqlens_q", "prefill_inputs",
    # What the host compares before it
    "stride", "variant", "table_width", "num_pages", "padding_slot", "backend", "reads", "bindings",
    "allowed", "hidden", "pages",
    "draft_probs", "keys", "top_k", "has_tables", "min_position", "floats", "logit_bias", "stop_mask",
    "output_counts", "prompt_seen",
)  # fmt: skip
"""What a captured step holds frozen, and can find changed, by the names of the engine's contract."""


class EngineCount(NamedTuple):
    """How the service shows one counter of the engine."""

    text: str
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ()
    """Label values that exist, at 0, from the start: an increase from nothing would be missed by a query."""


ENGINE_COUNTS: dict[str, EngineCount] = {
    "graph_replays": EngineCount(
        "Replays of captured phases by captured rows (of a prefill, tokens); per forward of a whole batch.",
        ("phase", "rows"),
    ),
    "graph_padding_rows": EngineCount("Padding rows in replayed steps; per row."),
    "graph_contract_checks": EngineCount(
        "Comparisons of what a captured step holds frozen with the present; per forward asked for."
    ),
    "graph_contract_violations": EngineCount(
        "Captured steps that were refused, or found void by their own checks, because something that they hold "
        "frozen had changed; per forward asked for.",
        ("field",),
        tuple((field,) for field in CONTRACT_FIELDS),
    ),
    "nan_guard_rows_checked": EngineCount("Rows checked for NaN and infinity; per row.", ("phase",)),
    "nan_guard_trips": EngineCount(
        "Steps of a request whose logits or hidden states held a NaN or an infinity, or a token outside of the "
        "vocabulary (oov); per request and step, the steps of a rescue itself left out.",
        ("phase", "kind"),
        (*product(("prefill", "verify", "draft"), ("nan", "inf")), ("verify", "oov")),
    ),
    "nan_guard_actions": EngineCount(
        "What the guard did: rebuilt a request and went on (retried), made it go on alone after too many trips "
        "(isolated), failed it, dropped its drafts for one step, or ignored a row that decided nothing; and what "
        "it found to be the cause; per event.",
        ("action", "cause"),
        (
            ("retried", "replay"),
            ("retried", "draft_token"),
            ("isolated", "replay"),
            ("isolated", "draft_token"),
            ("failed", "model"),
            ("failed", "contract"),
            ("drafts_dropped", "draft"),
            ("ignored", "none"),
        ),
    ),
    "nan_guard_pages_scrubbed": EngineCount("Pages zeroed after a fault; per page."),
    "nan_bundles": EngineCount(
        "Bundles of tripped steps by how it went: written, skipped (another row of the same iteration had one), "
        "limit (the directory is full) or failed; per row.",
        ("outcome",),
        (("written",), ("skipped",), ("limit",), ("failed",)),
    ),
    "audits": EngineCount(
        "Audits of finished greedy requests by how they ended: scored, skipped (too many waited, or it gave way to "
        "users too often) or failed; per request.",
        ("outcome",),
        (("scored",), ("skipped",), ("failed",)),
    ),
    "audit_tokens": EngineCount("Emitted tokens that an audit scored again; per token."),
    "audit_mismatches": EngineCount(
        "Audited tokens that are not the target's most probable one by more than the margin, by position in the "
        "run that one step emitted; per token.",
        ("position",),
        tuple((str(position),) for position in range(MAX_SPECULATIVE_TOKENS + 1)),
    ),
}
