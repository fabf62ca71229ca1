"""Reads a request body as a JSON object, or says with a byte offset why it is not one."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import Request

from service.body_reader import SMALL_BODY_BYTES, BodyReader
from service.errors import ApiError, bad_request

LARGE_FIELDS = frozenset({"prompt", "messages", "tokens"})
"""Fields that may be as long as the body; every other one has a limit of its own."""
MAX_FIELD_BYTES = 256 * 1024

# One at a time, beside the event loop: the objects of a body may need many times its memory
_PARSER = ThreadPoolExecutor(1, "json")
_BY_FIELD = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Whole characters and escapes, a surrogate only with its other half; possessive, so that nothing is tried twice
_WELL_FORMED = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_MATCHED_BYTES = 32 * 1024
"""How much is matched in one go: no other thread runs meanwhile."""


async def read_json_object(request: Request, bodies: BodyReader) -> dict[str, Any]:
    """The body of ``request`` as a JSON object.

    Strict: UTF-8 only, no NaN or infinities, no lone surrogates, no key twice, bounded depth and size.

    Args:
        request: A request whose body was not read yet.
        bodies: Reads it.

    Raises:
        ApiError: 400, 415, or as `BodyReader.body`.
        starlette.requests.ClientDisconnect: The client went away while sending.
    """
    _check_content_type(request.headers.getlist("content-type"))
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"The Content-Encoding {encoding[:100]!r} is not supported: send the body as it is."
        raise _unsupported(message)
    async with bodies.body(request) as raw:  # it counts while it waits for the parser, too
        if len(raw) <= SMALL_BODY_BYTES:
            return parse_json_object(raw)
        return await asyncio.get_running_loop().run_in_executor(_PARSER, parse_json_object, raw)


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """``raw`` as a JSON object. Raises ``ApiError`` (400, code ``invalid_json``, or naming a field)."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise _invalid(f"not valid UTF-8 at byte {exc.start}") from None
    fields = _fields(raw)
    if len(raw) > MAX_FIELD_BYTES:
        _refuse_huge(fields)
    value = parse_json_value(raw, fields)
    if not isinstance(value, dict):
        raise _invalid("not an object")
    return value


def parse_json_value(raw: bytes, fields: Mapping[str, msgspec.Raw]) -> Any:
    """``raw``, UTF-8, as any JSON value, as strictly.

    Args:
        fields: Those of the outermost object, as far as they are known.

    Raises:
        ApiError: 400, code ``invalid_json``, or naming a field.
    """
    try:
        with _no_collection():
            value = msgspec.json.decode(raw)
            # With as many colons as fields there is no other key; so for lists of a million token ids
            if raw.count(b":") != len(fields):
                json.loads(raw, object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise _invalid("nested too deeply") from None
    except msgspec.ValidationError as exc:  # well-formed, but a number does not fit
        raise _out_of_range(fields, exc) from None
    except (msgspec.MsgspecError, ValueError) as exc:
        offset = _lone_surrogate(raw)
        if offset is not None:
            raise _invalid(f"half of a surrogate pair at byte {offset}") from None
        raise _invalid(str(exc).removeprefix("JSON is malformed: ")) from None
    return value


def _fields(raw: bytes) -> dict[str, msgspec.Raw]:
    """The fields of an object, unread. Scanning costs a fiftieth of decoding."""
    try:
        return _BY_FIELD.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}  # not an object, or malformed: told by who decodes it


def _refuse_huge(fields: Mapping[str, msgspec.Raw]) -> None:
    for name, field in fields.items():
        if name not in LARGE_FIELDS and len(memoryview(field)) > MAX_FIELD_BYTES:
            message = f"{name[:100]}: longer than {MAX_FIELD_BYTES} bytes."
            raise bad_request(message, name[:100])


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Raises ``ApiError`` if two of the pairs of one object have the same key; a decoder would keep the last."""
    if len(dict(pairs)) == len(pairs):
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise bad_request(f"{key[:100]}: the key is there twice in one object.", key[:100])
        seen.add(key)


def _out_of_range(fields: Mapping[str, msgspec.Raw], error: msgspec.ValidationError) -> ApiError:
    for name, field in fields.items():
        try:
            msgspec.json.decode(field)
        except msgspec.ValidationError:
            return bad_request(f"{name[:100]}: holds a number that is out of range.", name[:100])
    return _invalid(str(error))  # not an object


@contextmanager
def _no_collection() -> Iterator[None]:
    """Make no garbage collection while millions of small objects come into being: it would take seconds."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_content_type(values: list[str]) -> None:
    """Refuse what a page of another origin may send unasked, which may be without any type. Raises ``ApiError``."""
    if len(values) != 1:
        raise _unsupported("Exactly one Content-Type header is needed, application/json.")
    kind, *parameters = (part.strip().lower() for part in values[0].split(";"))
    if kind != "application/json":
        raise _unsupported("The Content-Type must be application/json.")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
            raise _unsupported("The charset of the Content-Type must be utf-8.")


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def _invalid(why: str) -> ApiError:
    return bad_request(f"The body is not a valid JSON object: {why}.", code="invalid_json")


def _lone_surrogate(raw: bytes) -> int | None:
    r"""Offset of the first ``\uD800``..``\uDFFF`` escape of ``raw`` that is not part of a pair."""
    end, begin = 0, -1
    while end > begin:
        begin = end
        match = _WELL_FORMED.match(raw, begin, begin + _MATCHED_BYTES)
        assert match is not None  # of nothing, if need be
        end = match.end()
    return end if _SURROGATE.match(raw, end) else None
