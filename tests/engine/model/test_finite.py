"""NaN and infinity in a checkpoint's files: which tensors, how many values, one tensor in memory."""

from __future__ import annotations

import math
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model import finite
from engine.model.finite import NonFinite, find_non_finite
from engine.model.reader import CheckpointReader
from tests.fixtures.checkpoints import build_f2

FILE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.layers.1.input_layernorm.weight"


def poison(path: Path, values: dict[str, list[float]], file: str = FILE) -> None:
    """Put values at the end of tensors."""
    tensors = load_file(path / file)
    for name, ones in values.items():
        tensors[name].view(-1)[-len(ones) :] = torch.tensor(ones).to(tensors[name].dtype)
    save_file(tensors, path / file, metadata={"format": "pt"})


@pytest.mark.parametrize("slice_elements", [1 << 24, 7])
def test_each_tensor_is_told_with_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_elements: int
) -> None:
    monkeypatch.setattr(finite, "SLICE", slice_elements)
    path = build_f2(tmp_path / "m")
    assert find_non_finite(path) == []
    poison(path, {EMBEDDING: [math.nan, 1.0, math.inf, -math.inf], NORM: [math.nan] * 9})
    shapes = {info.key: torch.Size(info.shape).numel() for info in CheckpointReader(path).tensors.values()}
    assert {one.key: one for one in find_non_finite(path)} == {
        EMBEDDING: NonFinite(FILE, EMBEDDING, 1, 2, shapes[EMBEDDING]),
        NORM: NonFinite(FILE, NORM, 9, 0, shapes[NORM]),
    }


def test_shards_are_all_read(tmp_path: Path) -> None:
    path = build_f2(tmp_path / "m", shards=3)
    [last] = sorted(path.glob("*.safetensors"))[-1:]
    name = next(iter(load_file(last)))
    poison(path, {name: [math.inf]}, last.name)
    [found] = find_non_finite(path)
    assert (found.file, found.key, found.num_nan, found.num_infinite) == (last.name, name, 0, 1)


def test_fp8_weights_and_their_scales_are_read_as_stored(tmp_path: Path) -> None:
    path = build_f2(tmp_path / "m", fp8=True)
    assert find_non_finite(path) == []
    weight = "model.layers.0.self_attn.o_proj.weight"
    poison(path, {weight: [math.nan, 448.0, -math.nan], f"{weight}_scale_inv": [math.inf]})
    found = {one.key: (one.num_nan, one.num_infinite) for one in find_non_finite(path)}
    assert found == {weight: (2, 0), f"{weight}_scale_inv": (0, 1)}


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_f2(tmp_path / "m")
    read = CheckpointReader.raw
    alive: list[weakref.ref[Tensor]] = []

    def watched(reader: CheckpointReader, name: str) -> Tensor:
        assert all(one() is None for one in alive)
        tensor = read(reader, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(CheckpointReader, "raw", watched)
    seen: list[tuple[int, int]] = []
    find_non_finite(path, lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(alive)) for done in range(len(alive))] and len(alive) > 10
