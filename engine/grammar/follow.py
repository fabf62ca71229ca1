"""The walking process: follows the outputs of all requests with a grammar, one question at a time."""

from __future__ import annotations

import time
from functools import lru_cache
from multiprocessing.connection import Connection

import numpy as np
import xgrammar

from engine.grammar.job import vocabulary
from engine.grammar.limits import limit_memory, limit_time
from engine.grammar.matcher import Matcher
from engine.grammar.questions import Answer, Question

MEMORY_BYTES = 4 << 30
"""What all grammars together may allocate."""
KEPT_GRAMMARS = 64
"""Grammars that are kept read besides those in use."""


def run(connection: Connection, table: list[bytes]) -> None:
    """Answer each ``Question``; a process that takes longer than the question allows is ended by the kernel."""
    info = vocabulary(table)
    silent_ids = frozenset(token for token, text in enumerate(table) if not text)
    matchers: dict[int, Matcher] = {}

    @lru_cache(KEPT_GRAMMARS)
    def read(grammar: str) -> xgrammar.CompiledGrammar:
        return xgrammar.CompiledGrammar.deserialize_json(grammar, info)

    limit_memory(MEMORY_BYTES)
    connection.send(None)
    while True:
        try:
            question: Question = connection.recv()
        except EOFError:  # the engine is gone
            return
        limit_time(question.seconds)
        for request in question.ended:
            matchers.pop(request, None)
        if question.opening is not None:
            compiled = read(question.opening.grammar)
            matchers[question.request] = Matcher(compiled, len(table), silent_ids, question.opening.stop_ids)
        matcher = matchers[question.request]
        started = time.process_time()
        matcher.advance(question.token_ids)
        mask = np.full((question.stride, -(-len(table) // 32)), -1, dtype=np.int32)
        end, is_complete = matcher.fill(question.drafts, mask)
        limit_time(0)
        connection.send(Answer(end, is_complete, mask.tobytes(), time.process_time() - started))
