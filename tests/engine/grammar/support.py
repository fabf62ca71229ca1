"""Grammars, and requests with them, over a vocabulary whose token ``2 + b`` is the byte ``b``."""

from __future__ import annotations

import json
from typing import Any

from engine.types import GrammarSpec, SamplingParams
from tests.fixtures.tokenizers import EOS_ID

VOCAB = 300


def regex(pattern: str) -> GrammarSpec:
    return GrammarSpec("regex", pattern)


def ids(text: str) -> list[int]:
    return [2 + byte for byte in text.encode()]


def text_of(token_ids: list[int]) -> str:
    return bytes(token - 2 for token in token_ids if 2 <= token < 258).decode(errors="replace")


def sampled(spec: GrammarSpec | None, max_tokens: int = 400, **changes: Any) -> SamplingParams:
    stops = changes.pop("stop_token_ids", (EOS_ID,))
    return SamplingParams(max_tokens=max_tokens, grammar=spec, stop_token_ids=stops, **changes)


def nested(depth: int) -> str:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return json.dumps(schema)
