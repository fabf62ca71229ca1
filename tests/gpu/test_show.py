"""The table of ``tests.gpu.show`` says what was measured and what was not. Needs no GPU."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.drive import make_engine
from tests.fixtures.checkpoints import build_f1
from tests.gpu.lossless import Verdict, compare, in_batches, summary, tokens_of
from tests.gpu.show import main
from tests.gpu.show_rows import Row, fill, lines
from tests.gpu.show_sections import SECTIONS, Result, Section, read_json, read_tests


def _done(data: Any) -> Result:
    return {"status": "done", "reason": "", "data": data}


def _bench_row(k: int, size: int, step_ms: float, **changes: Any) -> dict[str, Any]:
    row = {
        "num_speculative_tokens": k, "batch_size": size, "variant": "greedy", "step_ms": step_ms, "floor_ms": 2.0,
        "ratio": step_ms / 2.0, "tokens_per_second": 100.0, "host_gap": 0.01, "eager_forwards": 0, "steps": 50,
    }  # fmt: skip
    return row | changes


def _rows(results: dict[str, Result]) -> dict[str, Row]:
    return {row.title: row for row in fill(results)}


def test_what_was_not_run_is_said_and_never_passes() -> None:
    rows = fill({})
    assert len(rows) == len(list(lines())) == len({row.title for row in rows})
    assert {row.verdict for row in rows} == {"not run"}
    limit = {"status": "timed out", "reason": "longer than 9 s"}
    row = _rows({"bench-spread": limit})["host gap, spread"]
    assert (row.measured, row.verdict) == ("bench-spread: timed out, longer than 9 s", "not run")


def test_every_section_of_a_line_exists() -> None:
    assert {name for line in lines() for name in line.sections} == set(SECTIONS)


@pytest.mark.parametrize(
    ("step", "verdict"), [(2.9, "ok, aim met"), (4.39, "ok, aim missed"), (4.4, "missed"), (5.0, "missed")]
)
def test_a_step_against_its_bar_and_aim(step: float, verdict: str) -> None:
    row = _rows({"bench-concentrated": _done({"rows": [_bench_row(3, 1, step)]})})[
        "MTP step, batch 1, concentrated"
    ]
    assert row.verdict == verdict and row.measured.startswith(f"{step:.3f} ms")


def test_a_size_that_was_left_out_is_not_run() -> None:
    rows = _rows({"bench-concentrated": _done({"rows": [_bench_row(3, 1, 4.0)]})})
    assert rows["MTP step, batch 8, concentrated"].verdict == "not run"
    assert "K = 3, batch 8" in rows["MTP step, batch 8, concentrated"].measured


def test_one_bad_row_misses_the_bar() -> None:
    good, bad = _bench_row(3, 1, 3.0), _bench_row(3, 8, 3.0, host_gap=0.031, eager_forwards=2)
    rows = _rows({"bench-spread": _done({"rows": [good, bad]})})
    assert rows["host gap, spread"].verdict == "missed"
    assert rows["eager forwards, spread"].verdict == "missed"
    assert rows["MTP step over floor, batch 8, spread"].verdict == "ok, aim missed"


@pytest.mark.parametrize(("rate", "verdict"), [(999.0, "missed"), (1000.0, "ok")])
def test_ratios_of_rates(rate: float, verdict: str) -> None:
    rates = {"K = 0": 600.0, "K = 3": rate, "transformers": 100.0}
    results = [{"name": name, "batch_size": 1, "tokens_per_second": value} for name, value in rates.items()]
    rows = _rows({"transformers": _done({"results": results})})
    assert rows["shipped against Transformers, batch 1"].verdict == verdict
    assert rows["shipped, K = 3 against K = 0"].verdict == "ok"
    assert (
        _rows({"transformers": _done({"results": results[:2]})})[
            "shipped against Transformers, batch 1"
        ].verdict
        == "not run"
    )


def test_the_overheads_median_counts() -> None:
    one = {"batch_size": 1, "percent": [0.1, 5.0, 0.2], "median_percent": 0.2}
    row = _rows({"overhead-v2-lite": _done({"overheads": [one]})})["guard and contract, v2-lite"]
    assert (row.measured, row.verdict) == ("+0.20 % at 1 (+0.10 to +5.00 over 3 pairs)", "ok")


TESTS = """
import pytest
def test_good(record_property):
    record_property("steady K=3 greedy", "0 eager")
def test_bad():
    assert False
@pytest.mark.skip(reason="no such GPU")
def test_left_out():
    pass
def test_tells():
    print("trtllm-gen here: no further than this")
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("ran")
    test = folder / "test_steady.py"
    test.write_text(TESTS, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    options = SECTIONS["suite"].arguments
    arguments = (
        *options[: options.index("--junitxml={file}") + 1],
        "-c",
        str(folder / "pytest.ini"),
        str(test),
    )
    return Section("steady", arguments, 120, read_tests).run(folder / "result", quick=False)


def test_a_run_of_tests_is_read(ran: Result) -> None:
    assert ran["status"] == "done", ran
    data = ran["data"]
    assert data["modules"] == {"test_steady": {"passed": 2, "failed": 1, "skipped": 1}}
    assert data["failures"] == ["test_steady::test_bad"]
    assert data["skips"] == {"no such GPU": 1}
    assert data["properties"] == {"steady K=3 greedy": "0 eager"}
    assert data["lines"] == ["trtllm-gen here: no further than this"]


def test_a_failed_test_misses_its_lines(ran: Result) -> None:
    rows = _rows({"steady": ran, "suite": ran})
    assert rows["tests/gpu"].verdict == rows["steady decode, 1 to 20 live"].verdict == "missed"
    assert rows["tests/gpu"].measured == "2 passed, 1 failed, 1 skipped: test_steady::test_bad"
    assert rows["on = off = solo, shipped, bf16"].verdict == "not run"


def test_tests_that_were_all_skipped_are_not_run() -> None:
    data = {"modules": {"test_flashinfer": {"skipped": 3}}, "skips": {"no flashinfer": 3}, "failures": []}
    row = _rows({"regression": _done(data | {"properties": {}, "lines": []})})["historical fault, fa3 kernel"]
    assert (row.measured, row.verdict) == ("regression: skipped: no flashinfer", "not run")


def test_a_check_that_needs_flashinfer_is_not_passed_by_others() -> None:
    data = {"modules": {"test_trtllm_mla": {"passed": 40, "skipped": 2}}, "failures": [], "properties": {}}
    missing = data | {"skips": {"flashinfer-python is not installed": 2}, "lines": []}
    row = _rows({"trtllm": _done(missing)})["trtllm_mla call against flashinfer"]
    assert (row.measured, row.verdict) == (
        "trtllm: flashinfer-python is not installed; 40 others passed",
        "not run",
    )
    whole = data | {"modules": {"test_trtllm_mla": {"passed": 42}}, "skips": {}, "lines": []}
    assert _rows({"trtllm": _done(whole)})["trtllm_mla call against flashinfer"].verdict == "ok"


def test_a_section_that_breaks_or_hangs_says_so(tmp_path: Path) -> None:
    broken = Section("a", ("-c", "import sys; print('it broke'); sys.exit(3)"), 60, read_json)
    result = broken.run(tmp_path / "result", quick=False)
    assert (result["status"], result["reason"]) == ("failed", "exit status 3: it broke")
    hanging = Section("b", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 2, read_json)
    result = hanging.run(tmp_path / "result", quick=False)
    assert (result["status"], result["output"]) == ("timed out", "begun\n")


def test_records_of_earlier_runs_make_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = {
        "a": {"bench-spread": _done({"rows": [_bench_row(3, 1, 9.9)]})},
        "b": {"bench-spread": _done({"rows": [_bench_row(3, 1, 3.0)]}), "twin": {"status": "not run"}},
    }
    files = []
    for name, sections in records.items():
        files.append(tmp_path / f"{name}.json")
        known = {"device": "some GPU", "torch": "2.11", "date": "2026-01-01", "sections": sections}
        files[-1].write_text(json.dumps(known), encoding="utf-8")
    out = tmp_path / "out.json"
    assert main(["--only-table", "--known", *map(str, files), "--json", str(out)]) == 0
    table = capsys.readouterr().out
    assert "some GPU, 2.11, 2026-01-01" in table and "1.50 x (3.000 of 2.000 ms)" in table
    written = json.loads(out.read_text(encoding="utf-8"))
    assert set(written["sections"]) == {"bench-spread", "twin"} and len(written["rows"]) == len(list(lines()))


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench-nothing"])
    assert "bench-nothing: no such section" in capsys.readouterr().err


def test_commands_name_this_interpreter_and_their_file(tmp_path: Path) -> None:
    echo = Section("a", ("-c", "import sys; print(sys.argv[1:])", "{file}"), 60, read_json, quick=("--few",))
    result = echo.run(tmp_path / "result", quick=True)
    assert result["output"].strip() == str([str(tmp_path / "result"), "--few"])
    assert result["command"].startswith(sys.executable)


# --- comparison of answers ----------------------------------------------------------------------------------


def test_a_difference_is_judged_by_the_targets_own_odds(tmp_path: Path) -> None:
    """Behind token 20 two tokens are nearly as likely, everywhere else one is certain."""
    odds = [0.1 / 62] * 64
    odds[40], odds[50] = 0.5, 0.4
    f1 = build_f1(tmp_path / "m", eos=None, next_probs={20: odds})
    engine = make_engine(f1.path, prefix_cache=False)
    prompts = [[5, 9], [5, 20], [7, 30]]
    right = tokens_of(in_batches(engine, prompts, (2, 1), 6))
    assert right == [f1.walk(prompt[-1], 6) for prompt in prompts] and right[1][0] == 40
    close, wrong = ([list(tokens) for tokens in right] for _ in range(2))
    close[1] = [50, *f1.walk(50, 5)]
    wrong[0][3] = right[0][4]
    verdict = compare(engine, "a = b", prompts, right, close)
    [difference] = verdict.differences
    assert (difference.request, difference.place, difference.tokens) == (1, 0, (40, 50))
    assert difference.gap == pytest.approx(math.log(0.5 / 0.4), abs=1e-4)
    assert verdict.beyond(0.25) == [] and verdict.beyond(0.2) == [difference]
    assert summary([verdict]) == "a = b 1 of 3 part, at most 0.223 nats below the best token"
    [difference] = compare(engine, "a = b", prompts, right, wrong).beyond(0.25)
    assert (difference.request, difference.place) == (0, 3) and difference.gap > 19
    far = Verdict("c = d", 3, [replace(difference, gap=math.inf)])
    assert summary([verdict, far]) == "a = b 1 of 3, c = d 1 of 3 part, some beyond the 20 best tokens"
    assert compare(engine, "same", prompts, right, right[:2]).differences == []
