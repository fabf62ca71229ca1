"""The dialect of regular expressions: what ECMAScript and Python mean alike, and nothing that the library misreads.

The library matches the plain character for an escape that it does not know, and drops anchors wherever they are.
So patterns are written anew for it, out of what was found to mean the same to it, and all else is refused.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

MAX_REPEATS = 100_000
"""Largest bound of a quantifier."""

_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7, "e": 27, "0": 0}
_SETS = frozenset("dDwWsS")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_CONTROL_LETTER = re.compile(r"c([A-Za-z])")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>)?(?!\?)")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d+)(?:,(\d*))?\})(\??)")
_EXTENSIONS = {
    "(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind",
    "(?P=": "a back-reference", "(?#": "a comment", "(?>": "an atomic group",
}  # fmt: skip
_SURROGATES = r"\ud800-\udfff"
_ANY_IN_LINE = rf"[^\n\r{_SURROGATES}]"
_CARET = r"\u{5e}"
_NUL = r"\0"


class RegexError(Exception):
    """A pattern that is not of the dialect; the message says what of it, and where."""


class _Item(NamedTuple):
    """A character, or a set such as ``\\d``, and what the library reads as it."""

    text: str
    code: int | None


def translate(pattern: str) -> str:
    """``pattern`` as the library reads it.

    Raises:
        RegexError: It is not of the dialect.
    """
    return _Translation(pattern).run()


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        self._out: list[str] = []

    def run(self) -> str:
        """Go through the pattern once; each piece is written as soon as it is read."""
        repeatable = False
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            if char in "*+?{":
                self._quantify(repeatable)
                repeatable = False
            else:
                repeatable = self._piece(char)
        if self._depth:
            self._refuse("( without a ) after it")
        return "".join(self._out)

    def _piece(self, char: str) -> bool:
        """Take what is not a quantifier; whether one may follow."""
        if char in "^$":
            self._anchor(char)
            return False
        if char == "(":
            self._group()
            return False
        if char == "|":
            self._write("|", 1)
            return False
        if char == ")":
            if not self._depth:
                self._refuse(") without a ( before it")
            self._depth -= 1
            self._write(")", 1)
        elif char == ".":
            self._write(_ANY_IN_LINE, 1)
        elif char == "[":
            self._set()
        elif char == "\\":
            self._out.append(self._not_nul(self._escape(in_set=False).text))
        else:
            self._write(self._not_nul(_literal(ord(char))), 1)
        return True

    def _write(self, text: str, length: int) -> None:
        self._out.append(text)
        self._at += length

    def _anchor(self, char: str) -> None:
        """The whole output matches anyway: anchors at the ends of a branch say nothing more, others cannot hold."""
        if char == "^":
            is_outer = not self._out or self._out[-1] == "|"
        else:
            is_outer = self._pattern[self._at + 1 : self._at + 2] in ("", "|")
        if self._depth or not is_outer:
            self._refuse(f"{char} elsewhere than at the {'start' if char == '^' else 'end'}")
        self._at += 1

    def _group(self) -> None:
        opening = _GROUP.match(self._pattern, self._at)
        if opening is None:
            known = (what for mark, what in _EXTENSIONS.items() if self._pattern.startswith(mark, self._at))
            self._refuse(next(known, "a group of another kind than (...), (?:...) and (?<name>...)"))
        self._depth += 1
        self._write("(", len(opening[0]))

    def _quantify(self, repeatable: bool) -> None:
        quantifier = _QUANTIFIER.match(self._pattern, self._at)
        if quantifier is None:
            self._refuse("{ that begins none of {n}, {n,} and {n,m}")
        if not repeatable:
            self._refuse("a quantifier after nothing that it could repeat")
        low, high, lazy = quantifier.groups()
        bounds = [bound for bound in (low, high) if bound]
        if any(len(bound) > 9 or int(bound) > MAX_REPEATS for bound in bounds):
            self._refuse(f"a quantifier above {MAX_REPEATS}")
        if bounds != sorted(bounds, key=int):
            self._refuse("a quantifier whose first bound is the larger one")
        # A lazy quantifier matches the same texts
        self._write(quantifier[0].removesuffix("?") if lazy else quantifier[0], len(quantifier[0]))

    def _set(self) -> None:
        self._at += 1
        is_negated = self._next() == "^"
        self._at += is_negated
        if self._next() == "]":
            self._refuse("an empty set, or one that begins with ]: write \\]")
        items: list[str] = []
        while self._next() != "]":
            low = self._set_item()
            if self._next() != "-" or self._pattern[self._at + 1 : self._at + 2] in ("", "]"):
                items.append(low.text)
                continue
            self._at += 1
            items += self._range(low.code, self._set_item().code)
        self._write(self._written_set(items, is_negated=is_negated), 1)

    def _written_set(self, items: list[str], *, is_negated: bool) -> str:
        """A set with ^ as its last item: at the start the library takes it for a negation, even an escaped one."""
        others = [item for item in items if item != _CARET]
        if is_negated:
            return f"[^{''.join(items)}{_SURROGATES}]"
        if not others:
            return _CARET
        if set(items) == {_NUL}:
            self._not_nul(_NUL)
        return f"[{''.join(others)}{_CARET if _CARET in items else ''}]"

    def _not_nul(self, text: str) -> str:
        if text == _NUL:  # which the library forgets, but in a set of more
            self._refuse("a NUL character")
        return text

    def _range(self, low: int | None, high: int | None) -> list[str]:
        if low is None or high is None or low > high:
            self._refuse("a range that does not go from one character to a later one")
        if low < high and _literal(low) == _CARET:
            return [_CARET, *self._range(low + 1, high)]
        if low < 0xD800 and high > 0xDFFF:
            return [*self._range(low, 0xD7FF), *self._range(0xE000, high)]
        return [_literal(low) if low == high else f"{_literal(low)}-{_literal(high)}"]

    def _set_item(self) -> _Item:
        char = self._next()
        if not char:
            self._refuse("[ without a ] after it")
        if self._pattern.startswith("[:", self._at):
            self._refuse("a named set such as [:alpha:]")
        if char == "\\":
            return self._escape(in_set=True)
        self._at += 1
        return _Item(_literal(ord(char)), ord(char))

    def _escape(self, *, in_set: bool) -> _Item:
        start = self._at
        self._at += 1
        char = self._next()
        if not char:
            self._refuse("\\ with nothing after it")
        if char in _SETS:
            self._at += 1
            return _Item("\\" + char, None)
        code = self._code(char, in_set)
        if code is None:
            self._at = start
            self._refuse(f"the escape \\{char}")
        return _Item(_literal(code), code)

    def _code(self, char: str, in_set: bool) -> int | None:
        """The character that an escape stands for; ``None`` if it is not of the dialect."""
        digits = _HEX.match(self._pattern, self._at)
        letter = _CONTROL_LETTER.match(self._pattern, self._at)
        length, code = 1, None
        if digits is not None:
            length, code = len(digits[0]), int(digits[digits.lastindex or 0], 16)
        elif letter is not None:
            length, code = 2, ord(letter[1]) % 32
        elif char == "b" and in_set:
            code = 8
        elif char == "0" and self._pattern[self._at + 1 : self._at + 2].isdecimal():
            pass  # octal in some dialects
        elif char in _CONTROLS:
            code = _CONTROLS[char]
        elif not (char.isascii() and char.isalnum()):
            code = ord(char)
        if code is not None and 0xD800 <= code <= 0xDFFF:
            self._refuse(r"half of a surrogate pair (the whole character is \u{...})")
        self._at += length
        return code if code is None or code <= 0x10FFFF else None

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _refuse(self, what: str) -> NoReturn:
        raise RegexError(f"the regular expression has {what}, at character {self._at + 1}")


def _literal(code: int) -> str:
    """The character, inside of a set and outside, as the library reads it in both places."""
    if code == 0:
        return _NUL
    char = chr(code)
    return char if char.isascii() and char.isalnum() else rf"\u{{{code:x}}}"
