"""What the fields of request bodies are made of: a strict base, and validators that refuse at small cost."""

from __future__ import annotations

from typing import Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from service.errors import ApiError, bad_request
from service.unsupported import drop_nulls

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
SHOWN = 100
"""Most characters of a client's own text in an error message."""

Refusal = Literal["invalid_value", "invalid_type", "unsupported_parameter"]


def invalid(message: str, kind: Refusal = "invalid_value") -> NoReturn:
    """Refuse a field from inside its validator; ``kind`` becomes the error's code."""
    raise PydanticCustomError(kind, "{reason}", {"reason": message})


def stop_list(value: object) -> list[str]:
    """``stop`` as a list, its length checked before its items are looked at."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        invalid("Input should be a string or a list of strings", "invalid_type")
    if len(stops) > MAX_STOPS:
        invalid(f"At most {MAX_STOPS} stop strings are possible")
    for stop in stops:
        if not isinstance(stop, str):
            invalid("Every stop must be a string", "invalid_type")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            invalid(f"A stop string must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def bounded(limit: int) -> BeforeValidator:
    """Refuse a container before its items are validated, so that a huge one costs nothing."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            invalid(f"At most {limit} entries are possible")
        return value

    return BeforeValidator(check)


def token_id_keys(value: dict[str, float]) -> dict[str, float]:
    """Refuse keys that are not token ids written as text, and second spellings of one, as 01."""
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and key == str(int(key))):
            invalid(f"Keys must be token ids, not {key[:SHOWN]!r}")
    return value


class Body(BaseModel):
    """Strict types, no unknown fields, and an explicit null is the same as an absent field."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        return drop_nulls(value)

    def check(self) -> None:
        """Refuse fields that contradict each other. Raises ``ApiError``."""


def missing(param: str) -> ApiError:
    """A 400 for a field that is needed."""
    return bad_request(f"Missing required field: {param}.", param, "missing_required_parameter")
