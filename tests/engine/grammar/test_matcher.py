"""The masks of a grammar's matcher: what may stand at each place behind the drafts."""

from __future__ import annotations

import json

import numpy as np

from engine.grammar import job
from engine.grammar.matcher import Matcher
from engine.types import GrammarSpec
from tests.engine.grammar.support import VOCAB, ids, regex
from tests.fixtures.tokenizers import EOS_ID


def _matcher(spec: GrammarSpec, stop_ids: tuple[int, ...] = (EOS_ID,)) -> Matcher:
    """In this process, over the bytes and nothing else."""
    table = [b"", b"", *(bytes([byte]) for byte in range(256)), *[b""] * (VOCAB - 258)]
    silent = frozenset(token for token, text in enumerate(table) if not text)
    return Matcher(job.compile_grammar(spec, job.vocabulary(table)), VOCAB, silent, stop_ids)


def _allowed(matcher: Matcher, drafts: list[int]) -> tuple[list[list[int]], tuple[int | None, bool]]:
    mask = np.full((4, -(-VOCAB // 32)), -1, dtype=np.int32)
    end = matcher.fill(drafts, mask)
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    return [list(np.flatnonzero(row)) for row in bits], end


def test_masks_are_those_of_each_place_behind_the_drafts() -> None:
    matcher = _matcher(regex("ab?c"))
    free = list(range(VOCAB))
    a, b, c = ids("abc")
    going_on = (None, False)
    assert _allowed(matcher, []) == ([[a], free, free, free], going_on)
    assert _allowed(matcher, ids("abc")) == ([[a], [b, c], [c], [EOS_ID]], going_on)
    assert _allowed(matcher, ids("acb")) == ([[a], [b, c], [EOS_ID], free], going_on)
    assert _allowed(matcher, ids("xbc")) == ([[a], free, free, free], going_on)
    assert _allowed(matcher, [a, c, EOS_ID]) == ([[a], [b, c], [EOS_ID], free], going_on)
    matcher.advance(ids("ac"))
    assert _allowed(matcher, ids("aaa")) == ([[EOS_ID], free, free, free], going_on)


def test_masks_say_where_nothing_can_follow() -> None:
    matcher = _matcher(regex("ab"), stop_ids=())
    masks, end = _allowed(matcher, ids("abc"))
    assert masks[:2] == [ids("a"), ids("b")] and end == (2, True)


def test_strings_of_bounded_length_hold_no_control_characters() -> None:
    """The library itself would let them through, and the output would not be JSON."""
    schema = {
        "type": "object",
        "properties": {"enum": {"type": "string", "maxLength": 2}},
        "required": ["enum"],
    }
    matcher = _matcher(GrammarSpec("json_schema", json.dumps(schema)))
    matcher.advance(ids('{"enum":"'))
    text = [token - 2 for token in _allowed(matcher, [])[0][0] if token - 2 < 0x80]
    assert text == [byte for byte in range(0x20, 0x80) if chr(byte) != "\\"], "the quote ends the string"
