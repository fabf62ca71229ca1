"""What a starting server tells of the capture of CUDA graphs: a bar on a terminal, two lines in the log."""

from __future__ import annotations

import asyncio

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine.client import EngineClient
from engine.types import EngineInfo

POLL_SECONDS = 0.1

_log = structlog.get_logger(__name__)


async def show_capturing(client: EngineClient, console: Console | None = None) -> None:
    """Follow the client's progress until its start ends: log when capturing begins, and show how far it is.

    Args:
        client: An engine client that starts, or will.
        console: Where the bar goes, if that is a terminal. Default: standard error.
    """
    columns = (TextColumn("capturing graphs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = console or Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task: TaskID | None = None
    try:
        while client.state == "starting":
            told = client.progress
            if told is not None and told.stage == "capturing":
                if task is None:
                    _log.info("capturing_graphs", graphs=told.total)
                    task = bar.add_task("", total=told.total)
                    bar.start()
                bar.update(task, completed=told.done)
            await asyncio.sleep(POLL_SECONDS)
    finally:
        bar.stop()


def log_graphs(info: EngineInfo) -> None:
    """The captured graphs of an engine that is ready, if it has any: row counts by phase, time and memory."""
    if not info.graphs_captured:
        return
    rows = {
        phase: ",".join(map(str, sorted(set(captured)))) for phase, captured in info.graphs_captured.items()
    }
    _log.info(
        "graphs_captured",
        rows=rows,
        graphs=sum(map(len, info.graphs_captured.values())),
        seconds=round(info.graph_capture_seconds, 2),
        mebibytes=round(info.graph_memory_bytes / 2**20, 1),
    )
