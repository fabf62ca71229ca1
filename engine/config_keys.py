"""Typed reads of a checkpoint's JSON files; every failure names the file or the key and its value."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from engine.errors import ConfigError

MOST = 1 << 17
"""Largest size that a key may state, where no other is named: well above any model's, and small enough that no
product of sizes leaves 64 bits."""
_REQUIRED = object()
_SHOWN_CHARS = 100
_FP32 = torch.finfo(torch.float32)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: The file is absent, unreadable, not JSON or not an object, or an object of it repeats a key.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unrepeated)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: of a repeated one, readers would take this value or that."""
    value = dict(pairs)
    if len(value) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} is there more than once")
    return value


def _shown(value: Any) -> str:
    """A value for a message of one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


class Keys:
    """Typed reads of config.json that name key and value when they fail."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self._raw = raw
        self._where = where

    def fail(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"config.json: {self._where}{key}={_shown(self._raw.get(key))}: {why}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"config.json: {self._where}{key} is missing")
        return default

    def integer(self, key: str, default: Any = None, *, least: int = 1, most: int = MOST) -> int:
        value = self._get(key, _REQUIRED if default is None else default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(key, f"expected an integer >= {least}")
        if value > most:
            raise self.fail(key, f"expected an integer <= {most}")
        return value

    def number(self, key: str, default: Any = None, *, positive: bool = True) -> float:
        value = self._get(key, _REQUIRED if default is None else default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "expected a finite number")
        # Compared before it is converted, which an integer may be too large for; a NaN is refused too.
        if not abs(value) <= _FP32.max or 0 < abs(value) < _FP32.tiny:
            raise self.fail(key, "expected a finite number in fp32's range")
        if value < 0 or (positive and value == 0):
            raise self.fail(key, f"expected a number {'>' if positive else '>='} 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """``None`` or a number that may be 0."""
        return None if self._raw.get(key) is None else self.number(key, positive=False)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, _REQUIRED if default is None else default)
        if not isinstance(value, bool):
            raise self.fail(key, "expected true or false")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str | None = None) -> str:
        value = self._get(key, _REQUIRED if default is None else default)
        if value not in choices:
            raise self.fail(key, f"supported: {', '.join(choices)}")
        return cast(str, value)

    def agreeing(self, names: tuple[str, ...], default: str) -> str:
        """The one text value of a setting that goes by several names."""
        values = [self._raw[name] for name in names if self._raw.get(name) is not None]
        if not all(isinstance(value, str) and value == values[0] for value in values):
            raise ConfigError(f"config.json: {self._where}{' and '.join(names)}: unusable values {values!r}")
        return values[0] if values else default


def read_eos_token_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: the union of generation_config.json, config.json and the tokenizer's own.

    Raises:
        ConfigError: An id that is not a non-negative integer, naming the file.
    """
    ids = set(_eos_list("config.json", raw.get("eos_token_id")))
    if (path / "generation_config.json").exists():
        generation = read_json_object(path / "generation_config.json")
        ids |= set(_eos_list("generation_config.json", generation.get("eos_token_id")))
    token = tokenizer_eos_id(path)
    return tuple(sorted(ids | ({token} if token is not None else set())))


def _eos_list(file: str, value: Any) -> list[int]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in values):
        raise ConfigError(f"{file}: eos_token_id={value!r}: expected an id or a list of ids")
    return values


def tokenizer_eos_id(path: Path) -> int | None:
    """Id of the tokenizer's ``eos_token``; ``None`` if the directory names none or lacks its files.

    Raises:
        ConfigError: A file that is damaged where the id is looked for, naming it and the key.
    """
    if not (path / "tokenizer_config.json").exists() or not (path / "tokenizer.json").exists():
        return None
    token = read_json_object(path / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return None
    file = path / "tokenizer.json"
    tokenizer = read_json_object(file)
    added, model = tokenizer.get("added_tokens") or [], tokenizer.get("model") or {}
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        raise ConfigError(f"{file}: added_tokens is not a list of objects")
    if not isinstance(model, dict):
        raise ConfigError(f"{file}: model is not an object")
    ids = [one.get("id") for one in added if one.get("content") == content]
    vocab = model.get("vocab")
    if not ids and isinstance(vocab, dict) and content in vocab:
        ids = [vocab[content]]
    if not ids and isinstance(vocab, list):  # of pairs, a token and its score, in the order of their ids
        ids = [index for index, pair in enumerate(vocab) if isinstance(pair, list) and pair[:1] == [content]]
    if not ids:
        return None
    if type(ids[0]) is not int or ids[0] < 0:
        raise ConfigError(f"{file}: the id of {content!r} is {_shown(ids[0])}, not an integer >= 0")
    return ids[0]
