"""``eyas replay``: what it prints, what it writes, and its exit status."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from engine.errors import EngineError
from engine.guard import HALTING
from service.cli import app, main
from service.commands.replay import EXIT_NOT_REPRODUCED
from tests.engine.drive import greedy
from tests.engine.live import Live
from tests.fixtures.checkpoints import F1, build_f1

NAN_TOKEN = 30


@pytest.fixture(scope="module")
def f3(tmp_path_factory: pytest.TempPathFactory) -> F1:
    """F1 with the embedding of one token NaN."""
    return build_f1(tmp_path_factory.mktemp("f3") / "m", nan_tokens=[NAN_TOKEN], eos=None)


@pytest.fixture(scope="module")
def reproducible(f3: F1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    live = Live.start(f3.path, [4, NAN_TOKEN], greedy(9))
    return live.bundle(tmp_path_factory.mktemp("b"), live.run_until(HALTING)).path


@pytest.fixture(scope="module")
def passing(f1: F1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a fault that the model does not show again."""
    live = Live.start(f1.path, [4, 5], greedy(9))

    def poison(_: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        return torch.full_like(out, math.nan)

    handle = live.parts.runner.decoder.head.register_forward_hook(poison)
    result = live.step()
    handle.remove()
    return live.bundle(tmp_path_factory.mktemp("b"), result).path


def run_cli(*arguments: str | Path) -> tuple[int, str]:
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    result = runner.invoke(app, ["replay", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_reproduced_trip_prints_the_table_and_the_first_bad_place(
    reproducible: Path, tmp_path: Path
) -> None:
    code, text = run_cli(reproducible, "--json", tmp_path / "report.json")
    assert code == 0
    assert "request r: 4 rows of 4, cpu, float32, graphs simulate, stored KV" in text
    assert re.search(r"verify +│ embedding +│ NOT FINITE +│ NOT FINITE", text)
    assert re.search(r"draft 3 +│ logits", text)
    assert "flags in the bundle: TARGET_NAN" in text and "cause replay" in text
    for name in ("eager", "replay"):
        assert re.search(
            rf"{name}: flags TARGET_NAN[A-Z_ ]*; first non-finite: verify, embedding, position 1\n", text
        )
    assert "eager and replay agree everywhere (tolerance 1e-05 of the largest magnitude)" in text
    assert "stored KV is finite" in text
    assert text.endswith("the trip was reproduced\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["reproduced"] and report["eager"]["first_non_finite"] == {
        "phase": "verify",
        "part": "embedding",
        "position": 1,
    }


def test_a_trip_that_does_not_come_again_has_an_exit_status_of_its_own(passing: Path) -> None:
    code, text = run_cli(passing)
    assert code == EXIT_NOT_REPRODUCED == 3
    assert "NOT FINITE" not in text
    assert re.search(r"eager: flags none, emitted [\d ]+; every value is finite", text)
    assert text.endswith("the trip was NOT reproduced\n")


def test_without_graphs_only_the_eager_run_is_shown(reproducible: Path) -> None:
    code, text = run_cli(reproducible, "--graphs", "off")
    assert code == 0 and "graphs off" in text
    assert re.search(r"verify +│ embedding +│ NOT FINITE +│ - ", text)
    assert "replay:" not in text and "eager and replay" not in text


def test_another_checkpoint_is_refused_and_forced(reproducible: Path, f1: F1) -> None:
    with pytest.raises(EngineError, match="--force"):
        run_cli(reproducible, "--model", f1.path)
    code, text = run_cli(reproducible, "--model", f1.path, "--force")
    assert code == EXIT_NOT_REPRODUCED
    assert f"the checkpoint {f1.path} is not that of the bundle" in text


def test_a_damaged_bundle_ends_with_status_2_and_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eyas", "replay", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"eyas: {tmp_path}/bundle.json: No such file or directory" in capsys.readouterr().err


def test_a_request_id_is_no_markup_and_a_state_that_differs_is_told(
    reproducible: Path, tmp_path: Path
) -> None:
    path = tmp_path / "b"
    shutil.copytree(reproducible, path)
    manifest = json.loads((path / "bundle.json").read_text())
    (path / "bundle.json").write_text(json.dumps(manifest | {"request_id": "[/red] :bug: \0"}))
    tensors = load_file(path / "tensors.safetensors")
    tensors["core"][0, 0] += 1
    save_file(tensors, path / "tensors.safetensors")
    _, text = run_cli(path, "--graphs", "off")
    assert "request [/red] :bug:" in text
    assert "length or next token" in text


@pytest.mark.parametrize("file", ["bundle.json", "tensors.safetensors"])
def test_a_cut_bundle_ends_with_status_2_and_one_line(
    reproducible: Path,
    tmp_path: Path,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "b"
    shutil.copytree(reproducible, path)
    (path / file).write_bytes((path / file).read_bytes()[:-9])
    monkeypatch.setattr(sys, "argv", ["eyas", "replay", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"eyas: {path / file}: ")
