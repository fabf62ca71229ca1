"""Reads the safetensors files of a checkpoint directory; headers first, one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config_keys import read_json_object
from engine.errors import CheckpointError, ConfigError
from engine.model.quant import dequantise

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file's header says of a tensor."""

    file: str
    key: str
    """Its name in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class CheckpointReader:
    """Every tensor of a directory, by its name without a leading ``model.``.

    Raises:
        CheckpointError: No files, a file that is damaged or not listed, an index that names what is absent, a
            name that occurs twice, an unsupported data type; the message names file or tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        """By normalised name, in the order of the files (which is the cheapest to read in)."""
        self._handles: dict[str, Any] = {}
        files, weight_map = _list_files(path)
        for file in files:
            self._add(file)
        if weight_map is not None:
            self._check_index(weight_map)

    def _add(self, file: str) -> None:
        try:
            handle: Any = safe_open(self.path / file, framework="pt", device="cpu")
            keys = handle.keys()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / file}: damaged or unreadable: {error}") from error
        self._handles[file] = handle
        for key in keys:
            view = handle.get_slice(key)
            name = key.removeprefix("model.")
            dtype = view.get_dtype()
            if dtype not in DTYPES:
                raise CheckpointError(f"{file}: {key}: data type {dtype} is not one of {', '.join(DTYPES)}")
            if name in self.tensors:
                raise CheckpointError(f"{file}: {key}: also in {self.tensors[name].file}")
            self.tensors[name] = TensorInfo(file, key, DTYPES[dtype], tuple(view.get_shape()))

    def _check_index(self, weight_map: dict[str, str]) -> None:
        held = {info.key: info.file for info in self.tensors.values()}
        for key, file in weight_map.items():
            if held.get(key) != file:
                raise CheckpointError(f"{INDEX}: {key} is not in {file}")
        for key, file in held.items():
            if key not in weight_map:
                raise CheckpointError(f"{file}: {key} is not listed in {INDEX}")

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        info = self.tensors[name]
        try:
            tensor: Tensor = self._handles[info.file].get_tensor(info.key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: {info.key}: {error}") from error
        return tensor

    def read(self, name: str) -> Tensor:
        """A tensor, dequantised to fp32 if it is stored as FP8."""
        tensor = self.raw(name)
        if tensor.dtype == torch.float8_e4m3fn:
            return dequantise(tensor, self.raw(name + SCALE_SUFFIX))
        return tensor


def _list_files(path: Path) -> tuple[list[str], dict[str, str] | None]:
    """The files to read, and the index if the directory has one."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a directory")
    present = sorted(entry.name for entry in path.glob("*.safetensors"))
    for name in present:
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name}: not a file")
    if not present:
        raise CheckpointError(f"{path}: holds no .safetensors file")
    if not (path / INDEX).exists():
        if len(present) > 1:
            raise CheckpointError(f"{path}: {len(present)} .safetensors files but no {INDEX}")
        return present, None
    weight_map = _read_index(path)
    listed = sorted(set(weight_map.values()))
    for name in listed:
        if name not in present:
            raise CheckpointError(f"{path / name}: named in {INDEX} but absent")
    for name in present:
        if name not in listed:
            raise CheckpointError(f"{path / name}: not named in {INDEX}")
    return listed, weight_map


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = read_json_object(path / INDEX).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path / INDEX}: weight_map is not an object of file names")
    return weight_map
