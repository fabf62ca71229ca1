"""Reads a request body as a JSON object, or says with a byte offset why it is not one."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import Request

from service.errors import ApiError, bad_request

DISCARD_LIMIT = 64 * 1024 * 1024
"""Bytes of a refused body that are read and dropped: a client that is still sending when the connection
closes may never see the answer."""

LARGE_FIELDS = frozenset({"prompt", "messages", "tools", "tokens"})
"""Fields that may be as long as the body; every other one has a limit of its own."""
MAX_FIELD_BYTES = 256 * 1024

_BY_FIELD = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Groups of \uXXXX escapes, each preceded by an even number of backslashes.
_ESCAPES = re.compile(rb"(?<!\\)(?:\\\\)*((?:\\u[0-9a-fA-F]{4})+)")


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body of ``request`` as a JSON object.

    Strict: UTF-8 only, no NaN or infinities, no lone surrogates, bounded depth and size.

    Args:
        request: A request whose body was not read yet.
        max_bytes: Largest body accepted.

    Raises:
        ApiError: 400, 413 or 415.
        starlette.requests.ClientDisconnect: The client went away while sending.
    """
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "The Content-Type must be application/json.", code="unsupported_media_type")
    return parse_json_object(await _read(request, max_bytes))


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        elif size > max_bytes + DISCARD_LIMIT:
            break
    if size > max_bytes:
        raise ApiError(413, f"The body is longer than {max_bytes} bytes.", code="request_too_large")
    return b"".join(parts)


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """``raw`` as a JSON object. Raises ``ApiError`` (400, code ``invalid_json``, or naming a huge field)."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise _invalid(f"not valid UTF-8 at byte {exc.start}") from None
    if len(raw) > MAX_FIELD_BYTES:
        _refuse_huge_fields(raw)
    try:
        with _no_collection():
            value = msgspec.json.decode(raw)
    except RecursionError:
        raise _invalid("nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as exc:
        offset = _lone_surrogate(raw)
        if offset is not None:
            raise _invalid(f"half of a surrogate pair at byte {offset}") from None
        raise _invalid(str(exc).removeprefix("JSON is malformed: ")) from None
    if not isinstance(value, dict):
        raise _invalid("not an object")
    return value


def _refuse_huge_fields(raw: bytes) -> None:
    """Scanning costs a fiftieth of decoding, during which the event loop stands still."""
    try:
        fields = _BY_FIELD.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return  # not an object, or malformed: told by who decodes it
    for name, field in fields.items():
        if name not in LARGE_FIELDS and len(memoryview(field)) > MAX_FIELD_BYTES:
            message = f"{name[:100]}: longer than {MAX_FIELD_BYTES} bytes."
            raise bad_request(message, name[:100])


@contextmanager
def _no_collection() -> Iterator[None]:
    """Make no garbage collection while millions of small objects come into being: it would take seconds."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _invalid(why: str) -> ApiError:
    return bad_request(f"The body is not a valid JSON object: {why}.", code="invalid_json")


def _lone_surrogate(raw: bytes) -> int | None:
    r"""Offset of the first ``\uD800``..``\uDFFF`` escape of ``raw`` that is not part of a pair."""
    for run in _ESCAPES.finditer(raw):
        units = [int(unit, 16) for unit in run[1].split(b"\\u")[1:]]
        i = 0
        while i < len(units):
            high = 0xD800 <= units[i] < 0xDC00
            paired = high and i + 1 < len(units) and 0xDC00 <= units[i + 1] < 0xE000
            if 0xD800 <= units[i] < 0xE000 and not paired:
                return run.start(1) + 6 * i
            i += 2 if paired else 1
    return None
