"""Incremental text: whole characters, stop strings, and independence of how tokens are grouped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.token_bytes import TokenBytes
from service.detokenize import ChoiceText, Detokenizer, StopMatcher
from service.text import Tokenizer
from tests.fixtures.tokenizers import word_tokenizer
from tests.service.harness import make_tokenizer, tokens_of

TOKENIZER = make_tokenizer()
BYTES = TOKENIZER.token_bytes

token_ids = st.lists(st.integers(0, 299), max_size=12)


def grouped(items: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """``items`` cut at the given places."""
    places = sorted({min(cut, len(items)) for cut in cuts} | {0, len(items)})
    return [list(items[a:b]) for a, b in pairwise(places)]


@given(token_ids, st.lists(st.integers(0, 12), max_size=4), st.booleans())
def test_text_is_that_of_the_tokenizers_own_decoder_in_any_grouping(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(BYTES, skip_special_tokens=skip)
    text = "".join(detokenizer.push(group) for group in grouped(ids, cuts)) + detokenizer.finish()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)


def test_words_without_a_decoder_are_separated_by_spaces() -> None:
    tokenizer = Tokenizer(word_tokenizer(30))
    detokenizer = Detokenizer(tokenizer.token_bytes)
    assert [detokenizer.push([i]) for i in (1, 3, 4, 0, 5)] == ["", "w3", " w4", "", " w5"]
    assert tokenizer.decode([1, 3, 4, 0, 5]) == "w3 w4 w5"


def test_c2_a_character_appears_only_when_its_last_byte_came() -> None:
    detokenizer = Detokenizer(BYTES)
    ids = tokens_of(b"\xf0\x9f", b"\x98\x80", b"\xe4\xbd", b"\xa0\xe5\xa5", b"\xbd!")
    assert [detokenizer.push([i]) for i in ids] == ["", "😀", "", "你", "好!"]


def test_c2_a_zwj_sequence_comes_whole_character_by_whole_character() -> None:
    family = "👩‍👩‍👧"
    detokenizer = Detokenizer(BYTES)
    pieces = [detokenizer.push([i]) for i in tokens_of(family)]
    assert "".join(pieces) == family and [piece for piece in pieces if piece] == list(family)


def test_c2_generation_that_ends_inside_a_character_ends_with_one_replacement_character() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(tokens_of("a", b"\xf0\x9f")) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_ids_beyond_the_tokenizer_add_nothing() -> None:
    detokenizer = Detokenizer(TokenBytes([b"a"], frozenset(), separated=False))
    assert detokenizer.push([0, 5, 0]) == "aa"


def reference(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Reads one character at a time and stops at the first completed stop string; the longest if several."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


small_text = st.text("abc", max_size=14)
small_stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


@given(small_text, small_stops, st.booleans(), st.lists(st.integers(0, 14), max_size=5))
def test_stop_matcher_agrees_with_reading_character_by_character(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    matcher = StopMatcher(stops, include=include)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    released = ""
    for start, end in pairwise(places):
        released += matcher.push(text[start:end])
        if matcher.matched is not None:
            break
        read = text[:end]
        held = read[len(released) :]
        could_be_stop = [read[i:] for i in range(len(read)) for s in stops if s.startswith(read[i:])]
        assert held == max(could_be_stop, key=len, default=""), "held back exactly what may become a stop"
    if matcher.matched is None:
        released += matcher.finish()
    assert (released, matcher.matched) == reference(text, stops, include)


def test_a_stop_string_completed_while_unarmed_does_not_count_but_one_that_began_then_does() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", armed=False) == "xab"
    assert matcher.push("a", armed=False) == ""
    assert matcher.push("b") == "" and matcher.matched == "ab"


def run(text: ChoiceText, groups: Sequence[Sequence[int]]) -> tuple[str, int, list[int]]:
    """Text, kept tokens and offsets of a whole choice that no stop id ends."""
    parts, kept, offsets = [], 0, []
    for i, group in enumerate(groups):
        piece = text.push(group, stopped=False, final=i == len(groups) - 1)
        parts.append(piece.text)
        kept += piece.num_tokens
        offsets += piece.offsets or []
        if text.matched_stop is not None:
            break
    return "".join(parts), kept, offsets


@given(st.data())
def test_b2_text_and_kept_tokens_do_not_depend_on_the_run_that_a_stop_string_ends_in(
    data: st.DataObject,
) -> None:
    ids = data.draw(
        st.lists(st.sampled_from(tokens_of("abst o!", b"stop", b"top!", b"ab", b"cab")), max_size=9)
    )
    stops = data.draw(st.sampled_from([["stop"], ["ab", "stop"], ["top!", "o"], ["b"]]))
    cuts = data.draw(st.lists(st.integers(0, 9), max_size=4))
    min_tokens = data.draw(st.integers(0, 3))

    def fresh() -> ChoiceText:
        return ChoiceText(BYTES, stops, min_tokens=min_tokens, offset=0)

    assert run(fresh(), grouped(ids, cuts) or [[]]) == run(fresh(), [[i] for i in ids] or [[]])


def test_the_token_that_completes_a_stop_string_is_the_last_one_kept() -> None:
    text = ChoiceText(BYTES, ["stop"])
    assert run(text, [tokens_of("x", "s", b"top!", "yz")]) == ("x", 3, [])


def test_offsets_are_where_each_tokens_text_begins() -> None:
    text = ChoiceText(BYTES, offset=0)
    ids = tokens_of("a", b"\xf0\x9f", b"\x98\x80", "b")
    assert run(text, [ids]) == ("a😀b", 4, [0, 1, 1, 2])


@pytest.mark.parametrize("include", [False, True])
def test_text_of_the_stopping_id_is_left_out_unless_asked_for(include: bool) -> None:
    text = ChoiceText(BYTES, include_stop=include)
    piece = text.push(tokens_of("ab"), stopped=True, final=True)
    assert (piece.text, piece.num_tokens) == ("ab" if include else "a", 2)
