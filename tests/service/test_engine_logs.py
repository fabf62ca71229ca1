"""A server's log is of one form, the engine process's lines included."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.engine.fake_engine import RAISE
from tests.service.test_serve import Server, model, start

__all__ = ["model", "start"]  # fixtures


def test_a_crash_of_the_engine_is_told_in_json(start: Callable[..., Server]) -> None:
    server = start()
    server.until(server.ready)
    server.complete(RAISE, max_tokens=5)
    server.until(lambda: "running the engine failed" in server.log and server.log.endswith("\n"))
    lines = [json.loads(line) for line in server.lines]
    [crash] = [line for line in lines if line["event"].startswith("running the engine failed")]
    assert (crash["logger"], crash["level"]) == ("engine.worker", "critical")
    assert "IndexError: in iterate" in crash["event"] and crash["timestamp"]
