"""What patterns and EBNF mean: matched as they are meant, or refused, and never text that is no UTF-8."""

from __future__ import annotations

import json
import random
import re
import warnings

import pytest
import xgrammar

from engine.grammar.job import GrammarError, compile_grammar, vocabulary
from engine.types import GrammarSpec

BYTES = [bytes([byte]) for byte in range(256)]
INFO = vocabulary(BYTES)


def matches(compiled: xgrammar.CompiledGrammar, text: bytes) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(token) for token in [*text, len(BYTES)])


def compiled(kind: str, text: str) -> xgrammar.CompiledGrammar:
    return compile_grammar(GrammarSpec(kind, text), INFO)  # type: ignore[arg-type]


MEANT: list[tuple[str, list[str], list[str]]] = [
    ("^ab$", ["ab"], ["a", "^ab$"]),
    ("^a|^b$|c$", ["a", "b", "c"], ["ab", "^b"]),
    (r"\^a\$", ["^a$"], ["a"]),
    ("a.b", ["a-b", "aéb", "a\u2028b"], ["a\nb", "a\rb", "ab"]),
    (r"[.]\.", [".."], ["a.", ".a"]),
    (r"\d\D\w\W", ["1a_-", "9\nZé"], ["٣a_-", "1aé-"]),
    (r"\s\S", [" a", "\ta", "\u2003é"], ["aa", "  "]),
    (r"\n\r\t\f\v\a\e", ["\n\r\t\f\v\a\x1b"], ["nrtfvae"]),
    (r"\x411", ["A1"], ["\u0411"]),
    (r"\u00411\u{1F600}\cA", ["A1\U0001f600\x01"], []),
    (r"\_\#\ \-\/\"\'\é", ["_# -/\"'é"], []),
    (r"[\^a]", ["^", "a"], ["b"]),
    (r"[\x5e-a]", ["^", "_", "a"], ["]", "b"]),
    (r"[\^]", ["^"], ["a"]),
    (r"[^\^]", ["a", "\n"], ["^"]),
    (r"[a^-]", ["a", "^", "-"], ["b"]),
    (r"[+--]", ["+", ",", "-"], ["."]),
    (r"[a-c-e]", ["b", "-", "e"], ["d"]),
    (r"[[\]\\]", ["[", "]", "\\"], ["a"]),
    ("[a\n]", ["a", "\n"], ["b"]),
    (r"[^\D5]", ["4"], ["5", "a"]),
    (r"[\b]", ["\b"], ["b"]),
    (r"[\0-\x1f][^\0a]", ["\0b", "\n\n"], ["\0\0", "\0a", "\x20b"]),
    ("a*?b+?c??d{2}?", ["bdd", "aabcdd"], ["bd"]),
    ("(?:a|b)(?<x>c)(?P<y>d)", ["acd", "bcd"], ["cd"]),
    ("a||b", ["a", "", "b"], ["ab"]),
    ("]}", ["]}"], []),
    ("", [""], ["a"]),
]


@pytest.mark.parametrize(("pattern", "texts", "others"), MEANT)
def test_d9_patterns_match_what_they_mean(pattern: str, texts: list[str], others: list[str]) -> None:
    grammar = compiled("regex", pattern)
    assert [text for text in texts if not matches(grammar, text.encode())] == []
    assert [text for text in others if matches(grammar, text.encode())] == []
    of_string = compiled("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    plain = [text for text in texts if json.dumps(text, ensure_ascii=False) == f'"{text}"']
    assert [text for text in plain if not matches(of_string, f'"{text}"'.encode())] == []
    assert [text for text in others if matches(of_string, f'"{text}"'.encode())] == []


REFUSED = [
    *(rf"\{char}" for char in "ABCDEFGHIJKLMNOPQRTUVXYZbcghijklmopquxyz123456789" if char not in "D"),
    *(rf"[\{char}]" for char in "ABEGHKNQRZkpz19"),
    r"\x4", r"\u041", r"\u{}", r"\u{110000}", r"\U00000041", r"\c1", r"\01", r"\0", r"[\x00]", "\0", "\\",
    "a$b", "a^b", "(a$)b", "x(^a)", "(^a)", "(a$)", "a$$", "^*a", "$*", r"\|^a",
    "(?=a)a", "(?!a)b", "(?<=a)b", "(?<!a)b", r"(a)\1", "(?P<n>a)(?P=n)", "(?i)a", "(?i:a)", "(?#a)", "(?>a)",
    "(?|a)", "(?R)", "(", "(a", "a)", "*a", "a|*", "(*a)", "a**", "a*+", "a++", "a{2}{3}", "a{2}*",
    "a{", "a{,3}", "a{x}", "a{3,1}", "a{99999999999}",
    "[", "[a", "[]", "[^]", "[]a]", "[z-a]", r"[\d-z]", r"[a-\d]",
    "[[:alpha:]]", r"\ud800", r"[\ud800-\udfff]", r"\ud83d\ude00", r"[a-\udc00]",
]  # fmt: skip


@pytest.mark.parametrize("pattern", REFUSED)
def test_d9_patterns_that_would_be_misread_are_refused(
    pattern: str, capfd: pytest.CaptureFixture[str]
) -> None:
    schema = json.dumps({"type": "object", "properties": {"pattern": {"type": "string", "pattern": pattern}}})
    for kind, text in (("regex", pattern), ("json_schema", schema)):
        with pytest.raises(GrammarError) as error:
            compiled(kind, text)
        assert "\n" not in str(error.value) and "EBNF" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_d9_patterns_of_a_schema_mean_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    grammar = compiled("json_schema", json.dumps({"type": "string", "pattern": r"^a$|^[\^b]\x411$"}))
    assert all(matches(grammar, text) for text in (b'"a"', b'"bA1"', b'"^A1"'))
    assert not any(matches(grammar, text) for text in (b'"aA1"', b'"b"', b'"b\xd0\x91"'))
    assert capfd.readouterr() == ("", "")


def test_d9_random_patterns_match_as_pythons_do(capfd: pytest.CaptureFixture[str]) -> None:
    pieces = [
        "a",
        "b",
        "^",
        "$",
        "|",
        "(",
        ")",
        "[",
        "]",
        "-",
        "*",
        "?",
        "{1,2}",
        ".",
        r"\d",
        r"\W",
        r"\^",
        r"\x2d",
        "1",
    ]
    texts = ["".join(text) for size in range(3) for text in _words("ab1^-[]$", size)]
    rng, compared = random.Random(0), 0
    for _ in range(4000):
        pattern = "".join(rng.choices(pieces, k=rng.randint(1, 7)))
        try:
            grammar = compiled("regex", pattern)
            with warnings.catch_warnings(action="error", category=FutureWarning):
                known = re.compile(pattern, re.ASCII)
        except (GrammarError, re.error, FutureWarning):
            continue
        compared += 1
        for text in texts:
            assert matches(grammar, text.encode()) == bool(known.fullmatch(text)), (pattern, text)
    assert compared > 500 and capfd.readouterr() == ("", "")


def _words(letters: str, size: int) -> list[str]:
    return [""] if not size else [word + letter for word in _words(letters, size - 1) for letter in letters]


@pytest.mark.parametrize(
    ("kind", "text", "before"),
    [
        ("regex", ".+", b""),
        ("regex", "[^a]", b""),
        ("regex", r"\W", b""),
        ("regex", r"\S", b""),
        ("regex", r"[\0-\u{10ffff}]", b""),
        ("regex", r"[\ud700-\uffff]".replace(r"\ud700", r"\u{d700}"), b""),
        ("ebnf", "root ::= [^a]", b""),
        ("ebnf", r"root ::= [^\ud800-\udfff]", b""),
        ("ebnf", r"root ::= [\ud700-\uffff]+ [\U00010000-\U0010ffff]", b""),
        ("json_schema", '{"type": "string"}', b'"'),
        ("json_schema", '{"type": "object"}', b'{"'),
        ("json_schema", '{"type": "string", "maxLength": 9}', b'"'),
    ],
)
def test_d9_no_grammar_writes_half_of_a_surrogate_pair(kind: str, text: str, before: bytes) -> None:
    matcher = xgrammar.GrammarMatcher(compiled(kind, text))
    assert all(matcher.accept_token(token) for token in before)
    assert matcher.accept_token(0xED)
    assert not any(matcher.accept_token(second) for second in range(0xA0, 0xC0))
    assert matcher.accept_token(0x9F) and matcher.accept_token(0xBF)  # U+D7FF, just before them


BAD_EBNF = [
    r'root ::= "\ud800"', r'root ::= "\U0000dfff"', r"root ::= [\ud800-\udfff]", r"root ::= [a-\udc00]",
    r'root ::= "\U00110000"', r"root ::= [^\U00110000]", r'root ::= "\x4"', r"root ::= [\^a]", r"root ::= [\x5ea]",
    'root ::= "a" \0 "b"', 'root ::= "a"{99999999999}', "root ::= (", r'root ::= "\q"',
    r'root ::= Regex("\\h")', "root ::= Token(99999)",
]  # fmt: skip


@pytest.mark.parametrize("grammar", BAD_EBNF)
def test_d9_ebnf_that_would_be_misread_is_refused_in_one_clear_line(grammar: str) -> None:
    with pytest.raises(GrammarError) as error:
        compiled("ebnf", grammar)
    message = str(error.value)
    assert message and "\n" not in message and "Check failed" not in message and not message.endswith("got")


def test_d9_ebnf_matches_what_it_means() -> None:
    grammar = compiled("ebnf", 'root ::= "\\x411" [a^] x{2} # "[\nx ::= "\\\\x" | [\\]"#] | "\\""')
    assert matches(grammar, b'A1^\\x"') and matches(grammar, b"A1a]#")
    assert not matches(grammar, "\u0411^\\x\\x".encode())


@pytest.mark.parametrize(
    "schema",
    ['{"type": "integer", "minimum": 99999999999999999999}', '{"enum": ["\\ud800"]}', '{"const": 1e999}'],
)
def test_d9_errors_of_the_library_are_one_clear_line(schema: str) -> None:
    with pytest.raises(GrammarError) as error:
        compiled("json_schema", schema)
    message = str(error.value)
    assert message and not re.search(r"\n|Check failed|is false|\.cc|The JSON string", message)
