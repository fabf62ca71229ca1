"""``eyas replay``: a bundled step again, eager against captured, and where it goes wrong."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.bundle import read_bundle
from engine.options import Device, Graphs
from engine.replay import replay as run_again
from engine.replay_report import Finding, ReplayReport, Run
from service.targets import refuse_unwritable_file, write_json

EXIT_NOT_REPRODUCED = 3
"""No run raised a flag for which the bundle was written."""


def replay(
    path: Path, model: Path | None, device: Device, graphs: Graphs, force: bool, json_file: Path | None
) -> int:
    """Print a table of places and the verdict; write the report as JSON too where asked.

    Returns:
        The exit status: 0, or ``EXIT_NOT_REPRODUCED``.

    Raises:
        EngineError: A damaged bundle, another checkpoint, something that cannot be honoured here, a file that
            cannot be written.
    """
    refuse_unwritable_file("--json", json_file)
    bundle = read_bundle(path)
    with Console(stderr=True).status("loading"):
        report = run_again(bundle, model=model, device=device, graphs=graphs, force=force)
    console = Console()
    console.print(_table(report))
    for line in verdict(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    write_json("--json", json_file, report)
    return 0 if report.reproduced else EXIT_NOT_REPRODUCED


def _table(report: ReplayReport) -> Table:
    width = report.stride if report.verify_drafts else 1
    title = (
        f"request {report.request_id}: {report.rows} rows of {width}, {report.device}, {report.dtype}, "
        f"graphs {report.graphs}, {report.kv} KV"
    )
    table = Table(title=Text(title))  # no markup: a request's id is whatever its client chose
    for name in ("phase", "place", "eager", "replay"):
        table.add_column(name)
    table.add_column("max difference", justify="right")
    table.add_column("")
    for row in report.places:
        table.add_row(
            row.phase,
            row.part,
            _finite(row.eager_finite),
            "-" if row.replay_finite is None else _finite(row.replay_finite),
            "-" if row.max_difference is None else f"{row.max_difference:.3g}",
            "parts" if row.parts else "",
        )
    return table


def _finite(finite: bool) -> str:
    return "finite" if finite else "NOT FINITE"


def verdict(report: ReplayReport) -> list[str]:
    """The report in sentences, one a line."""
    cause = f", cause {report.bundle_cause}" if report.bundle_cause is not None else ""
    lines = [f"flags in the bundle: {_names(report.bundle_flags)}{cause}"]
    for name, run in (("prefill", report.prefill), ("eager", report.eager), ("replay", report.replay)):
        if run is not None:
            lines += _run_lines(name, run)
    if report.replay is not None:
        lines.append(_parting_line(report))
    elif not report.verify_drafts:
        lines.append(
            "the step verified its next token alone: no graph is captured of that, so none is compared"
        )
    lines += _state_lines(report)
    lines.append("the trip was reproduced" if report.reproduced else "the trip was NOT reproduced")
    return lines


def _run_lines(name: str, run: Run) -> list[str]:
    emitted = f", emitted {' '.join(map(str, run.emitted))}" if run.emitted else ""
    first = (
        "every value is finite"
        if run.first_non_finite is None
        else (f"first non-finite: {_place(run.first_non_finite)}")
    )
    return [f"{name}: flags {_names(run.flags)}{emitted}; {first}"]


def _parting_line(report: ReplayReport) -> str:
    assert report.eager is not None and report.replay is not None
    limit = f"tolerance {report.tolerance:.3g} of the largest magnitude"
    if report.first_parting is not None:
        return f"eager and replay part first: {_place(report.first_parting)} ({limit})"
    if report.eager.emitted != report.replay.emitted:
        return f"eager and replay emit different tokens from equal logits ({limit})"
    return f"eager and replay agree everywhere ({limit})"


def _state_lines(report: ReplayReport) -> list[str]:
    lines = []
    if not report.same_checkpoint:
        lines.append(f"the checkpoint {report.model} is not that of the bundle")
    if report.kv == "recomputed":
        lines.append(
            "the bundle holds only a part of the KV pages: they were computed anew from the token ids"
        )
    if report.stored_kv_faults:
        faults = ", ".join(
            f"plane {plane} position {position}" for plane, position in report.stored_kv_faults
        )
        lines.append(f"stored KV holds non-finite values: {faults}")
    else:
        lines.append("stored KV is finite")
    if report.block_table_differs:
        lines.append("the device's block table did not name the pages that the scheduler held")
    if report.state_differs:
        lines.append("the device's length or next token was not that of the known tokens")
    return lines


def _place(finding: Finding) -> str:
    return f"{finding.phase}, {finding.part}, position {finding.position}"


def _names(flags: list[str]) -> str:
    return " ".join(flags) or "none"
