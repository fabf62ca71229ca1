"""A scripted engine behind the real client interface: what it generates, and in which runs, is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from engine.client import BaseClient
from engine.types import (
    AbortRequest,
    AddRequest,
    EngineInfo,
    ErrorInfo,
    Fatal,
    Progress,
    Ready,
    Request,
    ToEngine,
    TokenDelta,
    TokenLogprobs,
)

Output = Callable[[Request], Sequence[int]]
Accepts = Callable[[int], int]
Gate = Callable[[Request, int], "asyncio.Event | None"]


def engine_info(**changes: object) -> EngineInfo:
    """An engine over the 300 tokens of the byte tokenizer."""
    values: dict[str, object] = {
        "model_type": "deepseek_v3",
        "vocab_size": 300,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "num_speculative_tokens": 3,
        "num_pages": 64,
        "page_size": 16,
        "max_request_tokens": 256,
        "eos_token_ids": (1,),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_mla",
        "schedule": "sync",
        "resolved": {},
    }
    return EngineInfo(**{**values, **changes})  # type: ignore[arg-type]


class FakeEngine(BaseClient):
    """Emits ``output(request)`` in runs: step ``i`` of a request accepts ``accepts(i)`` drafts.

    Like the real engine it cuts at ``max_tokens`` and at stop ids, and ends a refused request with an error.
    """

    def __init__(
        self,
        output: Output,
        *,
        accepts: Accepts = lambda step: 0,
        info: EngineInfo | None = None,
        gate: Gate = lambda request, step: None,
        errors: Callable[[Request], ErrorInfo | None] = lambda request: None,
        auto_start: bool = True,
    ) -> None:
        """
        Args:
            output: The tokens that a request would generate without any limit.
            accepts: Accepted drafts of a request's i-th step, at most K.
            info: What the engine tells when it is ready.
            gate: An event to wait for before a request's i-th step.
            errors: An error that ends a request instead of its first step.
            auto_start: Become ready in ``start``; else when ``become_ready`` is called.
        """
        super().__init__()
        self.engine_info = info or engine_info()
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.stopped = False
        self._output = output
        self._accepts = accepts
        self._gate = gate
        self._errors = errors
        self._auto_start = auto_start
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        """Requests that the engine still works on."""
        return sum(not task.done() for task in self._tasks.values())

    async def start(self) -> None:
        if self._auto_start:
            self.become_ready()
        await self._until_ready()

    async def stop(self) -> None:
        self.stopped = True
        if self._state != "dead":
            self._state = "draining"
        self._die("the engine was stopped")

    def become_ready(self) -> None:
        self._receive(Ready(self.engine_info))

    def report(self, stage: str, done: int, total: int) -> None:
        self._receive(Progress(stage, done, total))

    def die(self) -> None:
        """What a client sees of a killed engine process."""
        for task in self._tasks.values():
            task.cancel()
        self._receive(Fatal("killed"))

    def _send(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            self.requests.append(message.request)
            task = asyncio.get_running_loop().create_task(self._serve(message.request))
            self._tasks[message.request.request_id] = task
        elif isinstance(message, AbortRequest):
            self.aborted.append(message.request_id)
            self._tasks[message.request_id].cancel()

    async def _serve(self, request: Request) -> None:
        if (error := self._errors(request)) is not None:
            self._deliver(
                TokenDelta(request_id=request.request_id, token_ids=[], finish_reason="error", error=error)
            )
            return
        for step, delta in enumerate(self._deltas(request)):
            if (event := self._gate(request, step)) is not None:
                await event.wait()
            await asyncio.sleep(0)
            self._deliver(delta)

    def _deltas(self, request: Request) -> Iterator[TokenDelta]:
        params, num_drafts = request.params, self.engine_info.num_speculative_tokens
        tokens = list(self._output(request))[: params.max_tokens]
        stop = next((i for i, token in enumerate(tokens) if token in params.stop_token_ids), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
        done = step = 0
        scores = None
        if params.prompt_logprobs is not None:
            scores = [_logprobs(token, params.prompt_logprobs, 7) for token in request.prompt_token_ids[1:]]
        if not tokens:
            yield TokenDelta(
                request_id=request.request_id, token_ids=[], finish_reason="length", prompt_logprobs=scores
            )
        while done < len(tokens):
            run = tokens[done : done + self._accepts(step) + 1]
            done += len(run)
            last = done == len(tokens)
            logprobs = [_logprobs(token, params.logprobs) for token in run if params.logprobs is not None]
            yield TokenDelta(
                request_id=request.request_id,
                token_ids=run,
                num_drafts=num_drafts,
                num_accepted=min(self._accepts(step), len(run)) if num_drafts else 0,
                logprobs=logprobs if params.logprobs is not None else None,
                prompt_logprobs=scores if step == 0 else None,
                finish_reason=None if not last else "length" if stop is None else "stop",
                stop_token_id=tokens[-1] if last and stop is not None else None,
                num_cached_tokens=2 if step == 0 else 0,
                scheduled_time=time.monotonic() if step == 0 else None,
            )
            step += 1


def _logprobs(token: int, num_top: int | None, rank: int | None = None) -> TokenLogprobs:
    """The token at -0.5; the most probable ids are 2, 3, ... at -0, -1, ..., the last at minus infinity."""
    top = [(2 + i, -float(i)) for i in range(num_top or 0)]
    if top:
        top[-1] = (top[-1][0], float("-inf"))
    return TokenLogprobs(token, -0.5, top, rank)
