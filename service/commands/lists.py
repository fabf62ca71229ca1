"""Options that take several values, comma-separated; each value once."""

from __future__ import annotations

from engine.errors import ConfigError


def read_list(option: str, text: str) -> list[str]:
    """The values, stripped.

    Raises:
        ConfigError: Naming the option, where a value is there twice.
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if parts.count(part) > 1:
            raise ConfigError(f"{option} {text}: {part} is there twice")
    return parts


def read_numbers(option: str, text: str, low: int, high: int) -> list[int]:
    """Integers.

    Raises:
        ConfigError: Naming the option, where one is not an integer from ``low`` to ``high``, or is there twice.
    """
    parts = read_list(option, text)
    digits = len(str(high))
    if not all(part.isdecimal() and len(part) <= digits and low <= int(part) <= high for part in parts):
        raise ConfigError(f"{option} {text}: must be integers from {low} to {high}, comma-separated")
    numbers = [int(part) for part in parts]
    if len(set(numbers)) < len(numbers):  # 1 and 01
        raise ConfigError(f"{option} {text}: a number is there twice")
    return numbers
