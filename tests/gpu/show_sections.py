"""What ``tests.gpu.show`` runs: commands with time limits, and how their results are read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Result = dict[str, Any]
"""``status`` (done, failed, timed out or not run), ``reason``, ``seconds``, ``command``, ``output``, ``data``."""
Reader = Callable[[Path], Any]
"""From a command's result file, what was measured.

Raises:
    OSError, ValueError: There is no readable result.
"""

_FIGURES = ("relative error", "trtllm-gen here")
"""In the lines that tests print to be shown."""
MOST_OUTPUT = 60_000
"""Characters kept of a command's output, from its end."""


@dataclass(frozen=True)
class Section:
    """One subprocess."""

    name: str
    arguments: tuple[str, ...]
    """Behind the interpreter; ``{file}`` is where the result goes."""
    limit: float
    """Seconds."""
    read: Reader
    quick: tuple[str, ...] = ()
    """Further arguments for a quick look; options given twice are taken as given last."""
    by_default: bool = True
    needs_gpu: bool = True

    def run(self, file: Path, quick: bool) -> Result:
        """Run it to its end, or to its time limit."""
        extra = self.quick if quick else ()
        command = [sys.executable, *(one.format(file=file) for one in (*self.arguments, *extra))]
        start = time.monotonic()
        output, code = _run(command, self.limit)
        result: Result = {
            "command": " ".join(command).replace(str(file), "FILE"),
            "seconds": round(time.monotonic() - start, 1),
            "output": output[-MOST_OUTPUT:],
            "reason": "",
        }
        if code is None:
            return result | {"status": "timed out", "reason": f"longer than {self.limit:g} s"}
        try:
            return result | {"status": "done", "data": self.read(file)}
        except (OSError, ValueError) as error:
            lines = [line.strip() for line in output.splitlines() if line.strip()]
            told = lines[-1] if lines else str(error)
            return result | {"status": "failed", "reason": f"exit status {code}: {told[:200]}"}


def _run(command: list[str], limit: float) -> tuple[str, int | None]:
    """Output of both kinds, and the exit status or ``None`` where the limit ended it, with all that it started."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], None


def read_json(file: Path) -> Any:
    """What a benchmark wrote."""
    return json.loads(file.read_text(encoding="utf-8"))


def read_tests(file: Path) -> Any:
    """Outcomes, reasons of skips, names of failures, recorded properties and printed figures of a pytest run.

    Raises:
        ValueError: No test was collected, or the file is damaged.
    """
    try:
        cases = list(ElementTree.parse(file).iter("testcase"))
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from error
    if not cases:
        raise ValueError("no test was collected")
    outcomes: dict[str, Counter[str]] = {}
    skips: Counter[str] = Counter()
    failures, properties, lines = [], {}, []
    for case in cases:
        module = case.get("classname", "").rsplit(".", 1)[-1] or case.get("name", "")
        outcome = _outcome(case)
        outcomes.setdefault(module, Counter())[outcome] += 1
        if outcome == "failed":
            failures.append(f"{module}::{case.get('name')}")
        if outcome == "skipped":
            skips[case.find("skipped").get("message", "")] += 1  # type: ignore[union-attr]
        for one in case.iter("property"):
            properties[one.get("name", "")] = one.get("value", "")
        for one in case.iter("system-out"):
            lines += [
                line for line in (one.text or "").splitlines() if any(mark in line for mark in _FIGURES)
            ]
    return {
        "modules": {module: dict(counts) for module, counts in outcomes.items()},
        "skips": dict(skips),
        "failures": failures,
        "properties": properties,
        "lines": lines,
    }


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def _pytest(*arguments: str) -> tuple[str, ...]:
    """Settings of the project's plugins are only warned about where a plugin is missing."""
    options = ("addopts=--strict-markers", "junit_family=xunit1", "junit_logging=system-out")
    fixed = (*(part for option in options for part in ("-o", option)), "-p", "no:cacheprovider")
    return ("-m", "pytest", "-q", "-rs", *fixed, "--junitxml={file}", *arguments)


def _gpu(*arguments: str) -> tuple[str, ...]:
    return ("-m", "service.cli", "bench", "gpu", "--device", "cuda", "--json", "{file}", *arguments)


def _v2_lite(routing: str, *arguments: str) -> tuple[str, ...]:
    return _gpu("--preset", "v2-lite", "--routing", routing, *arguments)


_PARALLEL = ("-n", "7", "--dist", "loadfile") if find_spec("xdist") else ()
"""A module a process, where the plugin is at hand: some minutes become two."""
_MTP = ("--speculative-tokens", "3", "--synthetic-accept-length", "3.0")
_SHORT = ("--output-tokens", "96")
_TESTS = [
    Section("suite", _pytest("-m", "gpu", "tests/gpu", *_PARALLEL), 480, read_tests),
    *(
        Section(name, _pytest("-m", "gpu", f"tests/gpu/test_{name}.py"), 300, read_tests, by_default=False)
        for name in ("lossless", "steady", "injection")
    ),
    Section("regression", _pytest("-m", "gpu", "tests/gpu/test_flashinfer.py"), 240, read_tests),
    Section("twin", _pytest("tests/engine/test_historical_fault.py"), 240, read_tests, needs_gpu=False),
    Section("trtllm", _pytest("tests/engine/test_trtllm_mla.py"), 180, read_tests, needs_gpu=False),
]
_BENCHES = [
    *(
        section
        for routing in ("concentrated", "spread")
        for section in (
            Section(
                f"bench-{routing}",
                _v2_lite(routing, *_MTP, "--batch-sizes", "1,8,32,64"),
                300,
                read_json,
                ("--batch-sizes", "1,64", *_SHORT),
            ),
            Section(
                f"plain-{routing}",
                _v2_lite(
                    routing, "--speculative-tokens", "0", "--batch-sizes", "1", "--first-token", "17,129,512"
                ),
                180,
                read_json,
                _SHORT,
            ),
        )
    ),
    Section(
        "bench-sampled",
        _v2_lite("concentrated", *_MTP, "--batch-sizes", "1,64", "--variants", "full"),
        240,
        read_json,
        _SHORT,
    ),
    Section(
        "bench-shipped",
        _gpu(
            "--preset", "shipped", "--speculative-tokens", "0,3", "--batch-sizes", "1,8,64",
            "--variants", "greedy,full", "--first-token", "17,129,512",
        ),
        240,
        read_json,
        ("--batch-sizes", "1", *_SHORT),
    ),
    Section(
        "transformers",
        (
            "-m", "service.cli", "bench", "--device", "cuda", "--batch-sizes", "1", "--rounds", "2",
            "--max-num-seqs", "1", "--json", "{file}",
        ),
        240,
        read_json,
        ("--rounds", "1"),
    ),
    Section(
        "overhead-v2-lite",
        _v2_lite("concentrated", *_MTP, "--batch-sizes", "1", "--overhead"),
        300,
        read_json,
        _SHORT,
    ),
    Section(
        "overhead-shipped", _gpu("--preset", "shipped", "--batch-sizes", "1", "--overhead"), 240, read_json, _SHORT
    ),
]  # fmt: skip
SECTIONS = {section.name: section for section in (*_TESTS, *_BENCHES)}
