"""Log lines of the engine process: in the service's form, whatever module they come from."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from engine.errors import EngineDeadError
from engine.logs import LogFormat, LogLevel
from engine.options import EngineOptions
from engine.process_client import ProcessEngineClient
from tests.engine.logging_engine import LOGGING_FACTORY


async def logged(log_level: LogLevel, log_format: LogFormat, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a worker process, from its start to its refusal."""
    client = ProcessEngineClient(
        EngineOptions(model="fake"), factory=LOGGING_FACTORY, log_level=log_level, log_format=log_format
    )
    with pytest.raises(EngineDeadError, match="logged enough"):
        await client.start()
    await client.stop()
    return capfd.readouterr().err.splitlines()


async def test_each_line_is_json_with_the_fields_of_the_services(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in await logged("info", "json", capfd)]
    by_logger = {line["logger"]: line for line in lines}
    assert set(by_logger) == {"service.lifecycle", "engine.ladder", "engine.bundle_writer", "py.warnings"}
    own, tripped, failed = (
        by_logger[name] for name in ("service.lifecycle", "engine.ladder", "engine.bundle_writer")
    )
    assert own["event"] == "from_the_service" and own["request"] == "r"
    assert set(tripped) == set(own) - {"request"} == {"event", "level", "logger", "timestamp"}
    assert (tripped["event"], tripped["level"]) == ("request r tripped at token 7", "warning")
    assert own["timestamp"][:10] == tripped["timestamp"][:10] and tripped["timestamp"].endswith("Z")
    assert (failed["event"], failed["level"]) == ("no bundle of request r", "error")
    assert failed["exception"][0]["exc_type"] == "OSError"
    assert "a library's warning" in by_logger["py.warnings"]["event"]


@pytest.mark.parametrize(("level", "loggers"), [("debug", 2), ("warning", 1), ("error", 0)])
async def test_the_level_is_the_services(
    level: LogLevel, loggers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in await logged(level, "json", capfd)]
    assert sum(line["logger"] == "engine.ladder" for line in lines) == loggers


async def test_lines_for_people_have_the_same_parts(capfd: pytest.CaptureFixture[str]) -> None:
    text = await logged("info", "text", capfd)
    [own] = [line for line in text if "from_the_service" in line]
    [tripped] = [line for line in text if "tripped at token 7" in line]
    assert "[warning" in own and "[service.lifecycle]" in own
    assert "[warning" in tripped and "[engine.ladder]" in tripped


FAILURE = """
import logging, structlog
from engine.logs import configure_logs

def render(prompt):
    inner = {"prompt": [prompt]}
    raise KeyError(len(inner))

configure_logs("info", %r)
try:
    render("-".join(["my", "secret"]))
except KeyError:
    structlog.get_logger("service").exception("own")
    logging.getLogger("uvicorn.error").exception("library's")
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_shows_no_local_variables(log_format: str) -> None:
    """They hold prompts."""
    run = subprocess.run(
        [sys.executable, "-c", FAILURE % log_format], capture_output=True, text=True, check=True
    )
    assert run.stderr.count("render") >= 2 and run.stderr.count("KeyError") >= 2, "both tracebacks are there"
    assert "my-secret" not in run.stderr
