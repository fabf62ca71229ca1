"""``eyas check``: what it prints of a checkpoint, and its exit status."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from service.cli import main
from service.commands import check as command
from tests.fixtures.checkpoints import build_f1

FILE = "model.safetensors"


def run(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["eyas", "check", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_a_sound_checkpoint_is_told_to_be_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = build_f1(tmp_path / "m").path
    code, out, _ = run(path, monkeypatch, capsys)
    assert code == 0
    assert "architecture" in out and out.endswith("values            all finite\n")


def test_a_poisoned_one_names_each_tensor_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = build_f1(tmp_path / "m", nan_tokens=[30]).path
    tensors = load_file(path / FILE)
    width = tensors["model.embed_tokens.weight"].shape[1]
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name][0, :2] = math.inf
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    code, out, err = run(path, monkeypatch, capsys)
    assert code == 2
    assert "architecture" in out
    size = tensors["model.embed_tokens.weight"].numel()
    assert f"NOT FINITE        model.embed_tokens.weight in {FILE}: {width} NaN of {size:,} values\n" in out
    assert f"NOT FINITE        {name} in {FILE}: 2 infinite of " in out
    assert f"eyas: {path}: not finite: 2 tensors, first " in err


def test_of_many_tensors_some_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "MOST_SHOWN", 1)
    path = build_f1(tmp_path / "m").path
    tensors = load_file(path / FILE)
    # Not the routers' biases, which loading looks at
    poisoned = [name for name in tensors if "_proj" in name]
    for name in poisoned:
        tensors[name].fill_(math.nan)
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    code, out, _ = run(path, monkeypatch, capsys)
    assert code == 2
    assert out.count(" NaN of ") == 1 and f"and {len(poisoned) - 1} more tensors" in out
