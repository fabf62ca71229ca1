"""A scripted engine for the tests of the worker and its clients; no model, no torch.

A prompt's first id chooses what happens, the class how the load goes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from engine.errors import ConfigError, RequestError
from engine.options import EngineOptions
from engine.types import EngineInfo, Outputs, Progress, Request, StepStats, TokenDelta

FACTORY = "tests.engine.fake_engine:FakeEngine"
REFUSING_FACTORY = "tests.engine.fake_engine:RefusingEngine"
HANGING_FACTORY = "tests.engine.fake_engine:HangingEngine"
CRASHING_FACTORY = "tests.engine.fake_engine:CrashingEngine"

COUNT = 1
"""Emits 0, 1, 2, ... in steps of at most two tokens."""
RAISE = 901
LOOP = 902
REFUSE = 903
ENDLESS = 904
"""Emits fives until aborted."""
SIGTERM_SELF = 905
"""Sends the process SIGTERM and SIGINT, then counts."""


class FakeEngine:
    def __init__(self, options: EngineOptions) -> None:
        self.requests: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}
        self.aborted = 0
        self.info = EngineInfo(
            model_type="fake",
            vocab_size=1000,
            max_model_len=100,
            max_num_seqs=options.max_num_seqs,
            num_speculative_tokens=options.num_speculative_tokens,
            num_pages=10,
            page_size=options.kv_page_size,
            max_request_tokens=100,
            eos_token_ids=(0,),
            device="cpu",
            dtype="float32",
            attention_backend="none",
            schedule="sync",
            resolved={"pid": str(os.getpid())},
        )

    @classmethod
    def load(cls, options: EngineOptions, progress: Callable[[Progress], None]) -> FakeEngine:
        progress(Progress(stage="loading", done=1, total=2))
        progress(Progress(stage="loading", done=2, total=2))
        return cls(options)

    def add(self, request: Request) -> None:
        kind = request.prompt_token_ids[0]
        if kind == REFUSE:
            raise RequestError("prompt of 200 tokens, at most 100", "prompt_token_ids")
        if kind == SIGTERM_SELF:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        self.requests[request.request_id] = [kind, 0]
        self.limits[request.request_id] = request.params.max_tokens

    def abort(self, request_id: str) -> None:
        if self.requests.pop(request_id, None):
            self.aborted += 1

    def has_work(self) -> bool:
        return bool(self.requests)

    def iterate(self) -> Outputs:
        deltas = [self._step(request_id) for request_id in list(self.requests)]
        running = len(self.requests)
        stats = StepStats(
            requests_running=running,
            requests_waiting=0,
            pages_used=running,
            pages_cached=0,
            pages_free=9 - running,
            forwards=[],
        )
        return Outputs(deltas=deltas, stats=stats)

    def close(self) -> None:
        if self.requests:
            self.requests.clear()

    def _step(self, request_id: str) -> TokenDelta:
        state = self.requests[request_id]
        kind, done = state
        if kind == RAISE:
            raise IndexError("in iterate")
        if kind == LOOP:
            while True:
                pass
        if kind == ENDLESS:
            time.sleep(0.002)
            return TokenDelta(request_id=request_id, token_ids=[5])
        limit = self.limits[request_id]
        tokens = list(range(done, min(done + 2, limit)))
        state[1] += len(tokens)
        ended = state[1] == limit
        if ended:
            del self.requests[request_id]
        return TokenDelta(request_id=request_id, token_ids=tokens, finish_reason="length" if ended else None)


class RefusingEngine:
    @classmethod
    def load(cls, options: EngineOptions, progress: Callable[[Progress], None]) -> FakeEngine:
        raise ConfigError("model_type='x': not supported")


class CrashingEngine:
    @classmethod
    def load(cls, options: EngineOptions, progress: Callable[[Progress], None]) -> FakeEngine:
        raise ZeroDivisionError("in load")


class HangingEngine:
    @classmethod
    def load(cls, options: EngineOptions, progress: Callable[[Progress], None]) -> FakeEngine:
        progress(Progress(stage="loading", done=1, total=2))
        time.sleep(3600)
        raise AssertionError("nobody waits that long")
