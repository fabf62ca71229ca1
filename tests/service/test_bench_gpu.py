"""``eyas bench gpu`` on a CPU with the tiny preset: what it measures, what it prints, what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from engine.errors import ConfigError
from engine.graph import StepGraphs
from engine.memory import free_bytes
from engine.prefill import Tokens
from service.cli import app, main
from service.commands.bench import Plan
from service.commands.bench_gpu import read_depths
from service.settings import SHIPPED_MODEL, Settings

SMALL = ["--device", "cpu", "--prompt-tokens", "20", "--output-tokens", "48"]


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["bench", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def measured(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    file = tmp_path / "out.json"
    text = run("gpu", *SMALL, "--json", str(file), *arguments)
    return json.loads(file.read_bytes()), text


def test_every_combination_is_measured_beside_its_floor(tmp_path: Path):
    report, text = measured(
        tmp_path, "--preset", "tiny", "--batch-sizes", "1,3", "--speculative-tokens", "0,3", "--variants",
        "greedy,full", "--synthetic-accept-length", "2.5",
    )  # fmt: skip
    assert (report["model"], report["routing"], report["device"]) == ("tiny", "spread", "cpu")
    bandwidth = report["read_bytes_per_second"]
    assert bandwidth > 0
    rows = report["rows"]
    assert [(r["num_speculative_tokens"], r["batch_size"], r["variant"]) for r in rows] == [
        (k, size, variant) for k in (0, 3) for size in (1, 3) for variant in ("greedy", "full")
    ]
    for row in rows:
        size, length = row["batch_size"], 2.5 if row["num_speculative_tokens"] else 1.0
        if row["num_speculative_tokens"]:
            assert row["accept_length"] == pytest.approx(2.5, abs=0.1)
        else:
            assert row["accept_length"] is None
        assert row["tokens_per_second"] == pytest.approx(1e3 * size * length / row["mean_step_ms"], rel=0.05)
        assert row["floor_ms"] == pytest.approx(1e3 * sum(row["bytes"].values()) / bandwidth)
        assert row["ratio"] == pytest.approx(row["step_ms"] / row["floor_ms"])
        assert row["eager_forwards"] == row["steps"] >= 4
        assert size * 20 < row["live_positions"] < size * (20 + 48)
        # One token a row chooses four experts; W of them no fewer, and at most 4 W each
        assert 4 <= row["touched"]["verify"] <= min(32, 4 * size * (1 + row["num_speculative_tokens"]))
    assert "step/floor" in text


def test_concentrated_routing_touches_top_k_experts(tmp_path: Path):
    report, text = measured(tmp_path, "--preset", "tiny", "--batch-sizes", "2", "--routing", "concentrated")
    [row] = report["rows"]
    assert row["touched"] == {"verify": 4, "extend": 4, "draft": 4}
    assert "concentrated routing" in text


def test_a_captured_step_runs_nothing_eager(tmp_path: Path):
    report, _ = measured(tmp_path, "--preset", "tiny", "--batch-sizes", "1", "--graphs", "simulate")
    assert [row["eager_forwards"] for row in report["rows"]] == [0]


def test_checks_are_measured_on_and_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.bench_gpu.OVERHEAD_PAIRS", 3)
    report, text = measured(tmp_path, "--preset", "tiny", "--batch-sizes", "1", "--overhead")
    [overhead] = report["overheads"]
    assert len(overhead["percent"]) == 3
    assert overhead["median_percent"] == sorted(overhead["percent"])[1]
    assert "3 alternating pairs" in text


def test_first_tokens_are_measured_with_prefills_captured_and_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    replays: list[int] = []
    replay = StepGraphs.prefill

    def counted(self: StepGraphs, tokens: Tokens, count: int) -> Any:
        replays.append(len(tokens.ids))
        return replay(self, tokens, count)

    monkeypatch.setattr(StepGraphs, "prefill", counted)
    monkeypatch.setattr("engine.bench_prefill.PAIRS", 2)
    monkeypatch.setattr("engine.build.GRAPH_PREFILL_TOKENS", 16)
    monkeypatch.setattr("engine.attention.torch_mla.TorchMla.gathers", False)
    report, text = measured(
        tmp_path, "--preset", "tiny", "--batch-sizes", "1", "--graphs", "simulate", "--first-token", "5,12"
    )
    assert [one["prompt_tokens"] for one in report["first_tokens"]] == [5, 12]
    for one in report["first_tokens"]:
        assert one["ratio"] == pytest.approx(one["eager_ms"] / one["captured_ms"])
    assert replays == [4] * 3 + [11] * 3, "by one of two engines"
    assert "eager/captured" in text


def test_the_shipped_checkpoint_can_be_measured(tmp_path: Path):
    report, _ = measured(tmp_path, "--preset", "shipped", "--batch-sizes", "1")
    assert (report["model"], report["routing"]) == (str(SHIPPED_MODEL), None)
    assert report["rows"][0]["accept_length"] >= 1


def test_written_weights_can_be_measured_as_a_checkpoint(tmp_path: Path):
    weights = tmp_path / "weights"
    arguments = ("--batch-sizes", "1", "--synthetic-accept-length", "3")
    made, _ = measured(tmp_path, "--preset", "tiny", "--save-weights", str(weights), *arguments)
    read, _ = measured(tmp_path, "--model", str(weights), *arguments)
    same = ("touched", "bytes", "accept_length", "steps")
    assert [made["rows"][0][name] for name in same] == [read["rows"][0][name] for name in same]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "v4"], "--preset v4: must be one of v2-lite, v3-like, tiny, shipped"),
        (["--preset", "tiny", "--model", "x"], "--preset tiny: --model x"),
        (["--preset", "tiny", "--routing", "even"], "--routing even: must be one of spread, concentrated"),
        (["--preset", "shipped", "--routing", "spread"], "--routing spread: only for random weights"),
        (["--model", "x", "--save-weights", "y"], "--save-weights y: only for random weights"),
        (["--batch-sizes", "1,0"], "--batch-sizes 1,0: must be integers from 1"),
        (["--batch-sizes", "1,x"], "--batch-sizes 1,x: must be integers from 1"),
        (["--variants", "greedy,all"], "--variants greedy,all: must be of greedy, full"),
        (
            ["--preset", "tiny", "--first-token", "600"],
            "--first-token 600: more than the 20 of --prompt-tokens",
        ),
        (
            ["--preset", "tiny", "--first-token", "5"],
            "--first-token 5: --graphs auto and --attention-backend auto capture prefills of up to 0 tokens here",
        ),
        (
            ["--preset", "tiny", "--graphs", "simulate", "--first-token", "2"],
            "--first-token 2: --graphs simulate and --attention-backend auto capture prefills of up to 0",
        ),
        (["--first-token", "1"], "--first-token 1: must be integers from 2"),
        (["--speculative-tokens", "9"], "--speculative-tokens 9: must be integers from 0 to 8"),
        (["--synthetic-accept-length", "4.5"], "--synthetic-accept-length 4.5: a step of K = 3 emits 1 to 4"),
        (["--synthetic-accept-length", "nan"], "--synthetic-accept-length nan: a step of K = 3"),
        (
            ["--preset", "tiny", "--prompt-tokens", "2000", "--output-tokens", "49"],
            "--prompt-tokens 2000 and",
        ),
        (["--preset", "tiny", "--output-tokens", "8"], "--output-tokens 8: a request emits 8"),
        (
            ["--preset", "tiny", "--synthetic-accept-length", "4", "--output-tokens", "31"],
            "--output-tokens 31: a request emits 31",
        ),
        (["--preset", "tiny", "--graphs", "cuda"], "--graphs='cuda': needs a CUDA device"),
        (["--preset", "tiny", "--attention-backend", "flash_mla"], "--attention-backend='flash_mla': "),
        (["--batch-sizes", "4,2,4"], "--batch-sizes 4,2,4: 4 is there twice"),
        (["--batch-sizes", "4,04"], "--batch-sizes 4,04: a number is there twice"),
        (["--batch-sizes", "9" * 5000], "--batch-sizes 999"),
        (["--speculative-tokens", "3,3"], "--speculative-tokens 3,3: 3 is there twice"),
        (["--variants", "full,full"], "--variants full,full: full is there twice"),
        (["--preset", "tiny", "--json", "/proc/r.json"], "--json /proc/r.json: "),
        (["--preset", "tiny", "--json", "/proc"], "--json /proc: is a directory"),
        (["--preset", "tiny", "--save-weights", "/proc/w"], "--save-weights /proc/w: "),
        (["--preset", "tiny", "--save-weights", "/dev/null"], "--save-weights /dev/null: is not a directory"),
    ],
)
def test_impossible_options_are_named(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    for name in ("read_bandwidth", "random_model", "load_model"):
        monkeypatch.setattr(f"service.commands.bench_gpu.{name}", work)
    monkeypatch.setattr(sys, "argv", ["eyas", "bench", "gpu", *SMALL, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"eyas: {words}" in capsys.readouterr().err


def test_a_preset_larger_than_the_memory_is_refused_before_there_are_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    for name in ("read_bandwidth", "random_model"):
        monkeypatch.setattr(f"service.commands.bench_gpu.{name}", work)
    monkeypatch.setattr("engine.memory.free_bytes", lambda device: 16 * 10**9)
    monkeypatch.setattr(sys, "argv", ["eyas", "bench", "gpu", "--device", "cpu", "--batch-sizes", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    # The documented 33 GB of bfloat16 weights twice, for a CPU computes in float32
    assert re.search(r"eyas: --preset v2-lite: .* take 65\.\d GB in float32, cpu has 16\.0 GB free", told)


def test_free_memory_is_that_of_the_control_group_where_it_is_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    unlimited, limited = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    unlimited.write_text("max\n")
    limited.write_text("12345\n")
    cpu = torch.device("cpu")
    monkeypatch.setattr("engine.memory._CGROUP_LIMITS", (unlimited, tmp_path / "absent"))
    assert free_bytes(cpu) > 1 << 20
    monkeypatch.setattr("engine.memory._CGROUP_LIMITS", (unlimited, limited))
    assert free_bytes(cpu) == 12345


def test_accept_length_needs_drafts():
    assert read_depths("0,2", 3.0) == [0, 2]
    with pytest.raises(Exception, match="--synthetic-accept-length 2: --speculative-tokens 0"):
        read_depths("0", 2.0)


def test_bench_without_a_subcommand_is_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen: list[tuple[Settings, Plan, Path | None, Path | None]] = []
    monkeypatch.setattr("service.commands.bench.bench", lambda *arguments: seen.append(arguments))
    run(
        "--device",
        "cpu",
        "--batch-sizes",
        "1,2",
        "--rounds",
        "2",
        "--no-transformers",
        "--json",
        str(tmp_path),
    )
    [(settings, plan, prompts, file)] = seen
    assert settings.device == "cpu"
    assert plan == Plan([1, 2], 128, 0.0, 2, False)
    assert (prompts, file) == (None, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "1985"], "--max-tokens 1985: .* that is 2049, the model and its KV pool hold 2048"),
        (
            ["--max-tokens", "50", "--num-kv-pages", "3", "--kv-page-size", "40"],
            "--max-tokens 50: .* that is 114, the model and its KV pool hold 80",
        ),
    ],
)
def test_bench_refuses_what_the_engine_would_cut_short(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
):
    def work(*_: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr("service.commands.bench.compare", work)
    with pytest.raises(ConfigError, match=words):
        run("--device", "cpu", "--batch-sizes", "1", "--no-transformers", *arguments)


def test_options_of_bench_do_not_pass_for_those_of_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["eyas", "bench", "--rounds", "2", "gpu"])
    with pytest.raises(SystemExit):
        main()
    assert "--rounds: not an option of gpu" in capsys.readouterr().err
