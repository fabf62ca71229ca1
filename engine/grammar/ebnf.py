"""Grammars as EBNF, written anew so that the library reads what is meant and their texts are UTF-8."""

from __future__ import annotations

import re

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{[^{}"\[\]]*\}|#[^\n]*', re.DOTALL)
_CHAR = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[^xuU])|[^\\]"
_CHARS = re.compile(_CHAR, re.DOTALL)
_ITEM = re.compile(f"(?P<low>{_CHAR})(?:-(?P<high>{_CHAR}))?", re.DOTALL)
_BARE_HEX = re.compile(r"(?<!\\)(?:\\\\)*\\(?:x(?![0-9A-Fa-f]{2})|u(?![0-9A-Fa-f]{4})|U(?![0-9A-Fa-f]{8}))")
_LONG_NUMBER = re.compile(r"\d{10}")
_REGEX_CALL = re.compile(r"(?<![\w.-])Regex\s*\(")
_SURROGATES = r"\ud800-\udfff"


class EbnfError(Exception):
    """A grammar that would be misread, or whose texts would not be UTF-8; the message is for who wrote it."""


def rewrite(grammar: str) -> str:
    r"""The same grammar without halves of surrogate pairs, and with ``\xHH`` of two digits, as ``\u00HH``.

    Sets lose those halves, which alone are no UTF-8, whether they name them or not.

    Raises:
        EbnfError: The grammar cannot be meant as it is written, or not be read as it is meant.
    """
    if "\0" in grammar:  # where the library would stop to read
        raise EbnfError("it has a NUL character")
    return _TOKEN.sub(lambda token: _rewritten(token[0]), grammar)


def check_written(grammar: str) -> None:
    """Refuse what only the library's own grammars may have. Raises ``EbnfError``."""
    if _REGEX_CALL.search(_TOKEN.sub(" ", grammar)):
        raise EbnfError("Regex(...) is not supported: its patterns would not be checked")


def _rewritten(token: str) -> str:
    if token[0] == "{" and _LONG_NUMBER.search(token):
        raise EbnfError("it has a number of repetitions that is too large")
    if token[0] in "#{":
        return token
    inside = token[1:-1]
    if _BARE_HEX.search(inside):
        raise EbnfError("it has an escape with too few digits: \\xHH, \\uHHHH and \\UHHHHHHHH are possible")
    if token[0] == '"':
        return '"' + _CHARS.sub(lambda char: _checked(char[0]), inside) + '"'
    if inside.startswith("^"):
        return "[^" + _CHARS.sub(lambda char: _known(char[0]), inside[1:]) + _SURROGATES + "]"
    first = _CHARS.match(inside)
    if first is not None and (first[0] == r"\^" or _code(first[0]) == ord("^")):
        raise EbnfError("it has a set that begins with an escaped ^, which would negate it: put it last")
    return "[" + _ITEM.sub(_without_surrogates, inside) + "]"


def _without_surrogates(item: re.Match[str]) -> str:
    low = _checked(item["low"])
    if item["high"] is None:
        return low
    high = _checked(item["high"])
    if _code(low) < 0xD800 and _code(high) > 0xDFFF:
        return rf"{low}-\ud7ff\ue000-{high}"
    return f"{low}-{high}"


def _checked(char: str) -> str:
    """A character as the library reads it. Raises ``EbnfError`` for half of a surrogate pair."""
    if 0xD800 <= _code(char) <= 0xDFFF:
        raise EbnfError("it has half of a surrogate pair, which is no character: write the whole one")
    return _known(char)


def _known(char: str) -> str:
    if _code(char) > 0x10FFFF:
        raise EbnfError("it has an escape beyond the last character, U+10FFFF")
    # The library takes for \x as many digits as there are
    return rf"\u00{char[2:]}" if char.startswith(r"\x") else char


def _code(char: str) -> int:
    """The code point; that of a short escape such as ``\\n`` is not looked up, but below 128."""
    if char[0] != "\\":
        return ord(char)
    return int(char[2:], 16) if char[1] in "xuU" else 0
