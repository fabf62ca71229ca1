"""What this code shows on a GPU, in one table: ``python -m tests.gpu.show [section ...]``.

Each section is a subprocess with a time limit. Figures come from this run or from files of earlier ones, and a line
that nothing measured says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.gpu.show_rows import Row, fill
from tests.gpu.show_sections import SECTIONS, Result

_WIDTH = 190


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if no bar was missed and no section failed, 1 if one was, 2 without a GPU to run on."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"{unknown[0]}: no such section")
    record = _read(options.known)
    chosen = [] if options.only_table else options.sections or _default()
    if any(SECTIONS[name].needs_gpu for name in chosen) and not torch.cuda.is_available():
        print(
            "tests.gpu.show: torch sees no CUDA device here; --only-table prints what is known",
            file=sys.stderr,
        )
        return 2
    if chosen:
        record |= _where(options.quick)
    for name in chosen:
        record["sections"][name] = _run(name, options.quick)
        _write(options.json, record)
    rows = fill(record["sections"])
    _write(options.json, record | {"rows": [vars(row) for row in rows]})
    _print(record, rows)
    broken = any(one["status"] in ("failed", "timed out") for one in record["sections"].values())
    return int(broken or any(row.verdict == "missed" for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.show", description=__doc__)
    names = ", ".join(SECTIONS)
    parser.add_argument(
        "sections", nargs="*", metavar="section",
        help=f"what to run: {names}. Default: all but lossless, steady and injection, which are parts of suite",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer batch sizes and tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")
    parser.add_argument(
        "--known", type=Path, nargs="*", default=[], metavar="FILE",
        help="files of earlier runs, for sections that are not run now; the last one counts",
    )  # fmt: skip
    parser.add_argument("--only-table", action="store_true", help="run nothing: the table of what is known")
    return parser


def _default() -> list[str]:
    return [name for name, section in SECTIONS.items() if section.by_default]


def _read(files: list[Path]) -> dict[str, Any]:
    record: dict[str, Any] = {"sections": {}}
    for file in files:
        known = json.loads(file.read_text(encoding="utf-8"))
        sections = record["sections"] | known["sections"]
        record |= known | {"sections": sections}
    return record


def _where(quick: bool) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "quick": quick,
    }


def _run(name: str, quick: bool) -> Result:
    print(f"{name} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = SECTIONS[name].run(Path(folder) / "result", quick)
    told = " ".join(filter(None, (result["status"], result["reason"])))
    print(f"{name}: {told} after {result['seconds']} s", file=sys.stderr, flush=True)
    if result["status"] != "done" or result["data"].get("failures"):
        print(result["output"][-4000:], file=sys.stderr, flush=True)
    return result


def _write(file: Path | None, record: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _print(record: dict[str, Any], rows: list[Row]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for name in ("regression", "twin", "trtllm"):
        data = record["sections"].get(name, {}).get("data") or {}
        for line in [*data.get("lines", []), *(f"skipped: {reason}" for reason in data.get("skips", []))]:
            console.print(f"{name}: {line}", markup=False, highlight=False)
    where = [record.get(key) for key in ("device", "torch", "date")]
    title = ", ".join(str(one) for one in where if one) + (", quick" if record.get("quick") else "")
    table = Table(title=title or "nothing is known", show_lines=False)
    for heading in ("what", "bar", "measured", "verdict"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row.title, row.bar, row.measured, row.verdict)
    console.print(table, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
