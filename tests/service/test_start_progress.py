"""What is told while graphs are captured: a bar on a terminal only, and log lines."""

from __future__ import annotations

import asyncio
import io

from rich.console import Console
from structlog.testing import capture_logs

from service.commands.start_progress import POLL_SECONDS, log_graphs, show_capturing
from tests.service.fake_engine import FakeEngine, engine_info


async def follow(console: Console) -> list[dict[str, object]]:
    """A start that captures six graphs, and is watched."""
    engine = FakeEngine(lambda _: [], auto_start=False)
    with capture_logs() as logs:
        watcher = asyncio.create_task(show_capturing(engine, console))
        for stage, done, total in (
            ("loading", 0, 1),
            ("capturing", 0, 6),
            ("capturing", 4, 6),
            ("warming", 1, 1),
        ):
            engine.report(stage, done, total)
            await asyncio.sleep(2.5 * POLL_SECONDS)
        assert not watcher.done()
        engine.become_ready()
        await asyncio.wait_for(watcher, 10)
    return [dict(entry) for entry in logs]


async def test_a_terminal_shows_a_bar_and_the_log_says_once_what_begins():
    terminal = io.StringIO()
    logs = await follow(Console(file=terminal, force_terminal=True, width=100))
    assert "capturing graphs" in terminal.getvalue() and "4/6" in terminal.getvalue()
    assert logs == [{"event": "capturing_graphs", "graphs": 6, "log_level": "info"}]


async def test_where_there_is_no_terminal_only_the_log_speaks():
    file = io.StringIO()
    logs = await follow(Console(file=file, force_terminal=False))
    assert file.getvalue() == "" and len(logs) == 1


async def test_a_start_that_fails_ends_the_watch():
    engine = FakeEngine(lambda _: [], auto_start=False)
    watcher = asyncio.create_task(show_capturing(engine, Console(file=io.StringIO())))
    await asyncio.sleep(0)
    engine.die()
    await asyncio.wait_for(watcher, 10)


def test_the_end_is_told_with_rows_seconds_and_memory():
    rows = {"step": [8, 8, 4, 4, 1, 1], "draft": [8, 4, 1]}
    with capture_logs() as logs:
        log_graphs(engine_info(graphs_captured=rows, graph_capture_seconds=2.341, graph_memory_bytes=3 << 20))
        log_graphs(engine_info())
    [line] = logs
    assert line["rows"] == {"step": "1,4,8", "draft": "1,4,8"} and line["graphs"] == 9
    assert (line["seconds"], line["mebibytes"]) == (2.34, 3.0)
