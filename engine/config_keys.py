"""Typed reads of a checkpoint's JSON files; every failure names the file or the key and its value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from engine.errors import ConfigError

_REQUIRED = object()


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: The file is absent, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class Keys:
    """Typed reads of config.json that name key and value when they fail."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self._raw = raw
        self._where = where

    def fail(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"config.json: {self._where}{key}={self._raw.get(key)!r}: {why}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"config.json: {self._where}{key} is missing")
        return default

    def integer(self, key: str, default: Any = None, *, least: int = 1) -> int:
        value = self._get(key, _REQUIRED if default is None else default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(key, f"expected an integer >= {least}")
        return value

    def number(self, key: str, default: Any = None, *, positive: bool = True) -> float:
        value = self._get(key, _REQUIRED if default is None else default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(key, "expected a finite number")
        if positive and value <= 0:
            raise self.fail(key, "expected a number > 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
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
    """Id of the tokenizer's ``eos_token``; ``None`` if the directory names none or lacks its files."""
    if not (path / "tokenizer_config.json").exists() or not (path / "tokenizer.json").exists():
        return None
    token = read_json_object(path / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return None
    tokenizer = read_json_object(path / "tokenizer.json")
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == content:
            return int(added["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return vocab.get(content) if isinstance(vocab, dict) else None
