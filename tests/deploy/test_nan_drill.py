"""The drill's copy of a checkpoint: one row of NaN, everything else as it was; and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deploy.nan_drill import TENSOR, DrillError, poison
from tests.fixtures.checkpoints import build_f1

ROOT = Path(__file__).parents[2]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.name}/{name}": tensor
        for path in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("token", [0, 63])
def test_one_row_is_nan_and_nothing_else_differs(tmp_path: Path, dtype: torch.dtype, shards: int, token: int):
    checkpoint = build_f1(tmp_path / "f1", vocab=64, dtype=dtype, shards=shards).path
    poison(checkpoint, tmp_path / "copy", token)
    before, after = tensors(checkpoint), tensors(tmp_path / "copy")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.endswith(TENSOR):
            assert after[name][token].isnan().all() and not tensor.isnan().any()
            tensor[token] = after[name][token] = 0.0
        assert torch.equal(tensor, after[name]), name
    others = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.suffix != ".safetensors"}
    assert others == {path.name: (tmp_path / "copy" / path.name).read_bytes() for path in checkpoint.iterdir()
                      if path.suffix != ".safetensors"}  # fmt: skip


@pytest.mark.parametrize("token", [-1, 64])
def test_a_token_that_does_not_exist_is_refused(tmp_path: Path, token: int):
    checkpoint = build_f1(tmp_path / "f1", vocab=64).path
    with pytest.raises(DrillError, match="not in the vocabulary of 64"):
        poison(checkpoint, tmp_path / "copy", token)
    assert not (tmp_path / "copy").exists()


def test_a_directory_that_is_no_checkpoint_or_already_there_is_refused(tmp_path: Path):
    with pytest.raises(DrillError, match="no safetensors file"):
        poison(tmp_path, tmp_path / "copy", 1)
    checkpoint = build_f1(tmp_path / "f1").path
    with pytest.raises(DrillError, match="exists"):
        poison(checkpoint, checkpoint, 1)


def test_the_command_needs_nothing_but_python(tmp_path: Path):
    checkpoint = build_f1(tmp_path / "f1", vocab=64).path
    command = [sys.executable, "-S", "-I", str(ROOT / "deploy" / "nan_drill.py"), str(checkpoint)]
    result = subprocess.run(
        [*command, str(tmp_path / "copy"), "--token-id", "9"], capture_output=True, text=True
    )
    assert result.returncode == 0 and "token 9 is NaN" in result.stdout
    again = subprocess.run(
        [*command, str(tmp_path / "copy"), "--token-id", "9"], capture_output=True, text=True
    )
    assert again.returncode == 2 and again.stderr.endswith("copy exists\n")
