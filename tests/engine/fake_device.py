"""A device in miniature for the scheduler's tests: pages of cells, slots, ordered work, late results.

Its model's next token is a function of *all* tokens before it, read back through the block table, so a page
that was lost, shared wrongly or rewritten changes the output or trips an assertion here.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass, field
from zlib import crc32

from engine.kv.prefix import Digest, sha256
from engine.scheduler import Plan, RowResult, Scheduler, SchedulerConfig
from engine.sequence import PrefillChunk
from engine.types import FinishReason, Request, SamplingParams, TokenDelta

VOCAB = 40
GARBAGE = -1


def next_token(tokens: list[int]) -> int:
    return crc32(array("q", tokens).tobytes()) % VOCAB


def expected_output(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What the request must emit, computed alone, without pages or speculation."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if token in request.params.stop_token_ids:
            return output, "stop"
        if len(output) == request.params.max_tokens or len(tokens) == max_model_len:
            return output, "length"


def make_config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "num_pages": 65,
        "page_size": 4,
        "prefill_chunk_size": 16,
        "max_model_len": 100,
        "stride": 4,
        "prefix_cache": True,
        "cache_salt": b"test",
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    stop: tuple[int, ...] = (),
    priority: int = 0,
    arrival_time: float = 0.0,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        arrival_time=arrival_time,
        priority=priority,
    )


@dataclass(slots=True)
class Slot:
    seq_len: int = 0
    next_token: int = GARBAGE
    has_drafts: bool = False
    table: list[int] = field(default_factory=list)


class FakeDevice:
    """Runs plans at once, in order, as a stream would; only the host learns of it later.

    A cell of the pool is ``[token at i, token at i + 1]``: the target's and the draft's KV of position i.

    Args:
        accept: Drafts that each step accepts, where there are as many; ``None``: at random.
    """

    def __init__(self, config: SchedulerConfig, rng: random.Random, accept: int | None = None) -> None:
        self.config = config
        self.rng = rng
        self.accept = accept
        self.pool = [[[GARBAGE, GARBAGE] for _ in range(config.page_size)] for _ in range(config.num_pages)]
        self.slots = [Slot() for _ in range(config.max_num_seqs)]

    def run(self, plan: Plan) -> list[RowResult]:
        for sequence in plan.bind:
            assert sequence.slot is not None
            width = -(-self.config.max_model_len // self.config.page_size)
            self.slots[sequence.slot] = Slot(next_token=sequence.tokens[-1], table=[0] * width)
        for index, first, pages in plan.pages:
            self.slots[index].table[first : first + len(pages)] = pages
        results = []
        for sequence in plan.rows:
            assert sequence.slot is not None
            emitted, num_drafts = self._step(self.slots[sequence.slot])
            results.append(RowResult(sequence, sequence.epoch, emitted, num_drafts, len(emitted) - 1))
        for chunk in plan.prefill:
            self._prefill(chunk)
        return results

    def _cell(self, slot: Slot, position: int) -> list[int]:
        """Where a position is stored. Positions past the context end go to the scratch page."""
        if position >= self.config.max_model_len:
            return [GARBAGE, GARBAGE]
        page = slot.table[position // self.config.page_size]
        assert page != 0, f"position {position} has no page"
        return self.pool[page][position % self.config.page_size]

    def _read(self, slot: Slot, count: int, following: int) -> list[int]:
        """The first ``count`` tokens, out of the pool; their draft pairs must fit, up to ``following``."""
        cells = [self._cell(slot, position) for position in range(min(count, self.config.max_model_len))]
        tokens = [cell[0] for cell in cells]
        assert GARBAGE not in tokens, "attention reads a position that nobody wrote"
        if count <= self.config.max_model_len:
            assert [cell[1] for cell in cells] == [*tokens, following][1:], "a draft pair has the wrong token"
        return tokens

    def _step(self, slot: Slot) -> tuple[list[int], int]:
        k, start = self.config.stride - 1, slot.seq_len
        tokens = [*self._read(slot, start, slot.next_token), slot.next_token]
        num_drafts = k if slot.has_drafts else 0
        accepted = self.rng.randint(0, num_drafts) if self.accept is None else min(self.accept, num_drafts)
        for _ in range(accepted + 1):
            tokens.append(next_token(tokens))
        for position in range(start, start + k + 1):
            self._cell(slot, position)[:] = [GARBAGE, GARBAGE]
        slot.seq_len = start + accepted + 1
        for position in range(start, slot.seq_len):
            self._cell(slot, position)[:] = tokens[position - len(tokens) :][:2]
        self._draft(slot)
        emitted = tokens[-accepted - 1 :]
        slot.next_token = emitted[-1]
        return emitted, num_drafts

    def _draft(self, slot: Slot) -> None:
        """K - 1 draft steps write draft KV behind the known tokens."""
        slot.has_drafts = True
        for position in range(slot.seq_len, slot.seq_len + self.config.stride - 2):
            self._cell(slot, position)[1] = GARBAGE

    def _prefill(self, chunk: PrefillChunk) -> None:
        slot = self.slots[chunk.slot]
        self._read(slot, chunk.start, chunk.token_ids[0])
        for index, pair in enumerate(zip(chunk.token_ids, chunk.shifted_ids, strict=True)):
            self._cell(slot, chunk.start + index)[:] = pair
        if chunk.is_last:
            assert chunk.shifted_ids[-1] == slot.next_token, "the last pair ends in the last known token"
            slot.seq_len = chunk.start + len(chunk.token_ids)
            self._draft(slot)


class Harness:
    """Scheduler and device in the engine's order; every invariant is checked twice an iteration."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        overlap: bool = False,
        seed: int = 0,
        accept: int | None = None,
        digest: Digest = sha256,
    ) -> None:
        self.config = config
        self.overlap = overlap
        rng = random.Random(seed)
        order = list(range(1, config.num_pages))
        rng.shuffle(order)
        self.scheduler = Scheduler(config, page_order=order, digest=digest)
        self.device = FakeDevice(config, rng, accept)
        self.in_flight: deque[list[RowResult]] = deque()
        self.requests: dict[str, Request] = {}
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.finished_at: dict[str, int] = {}
        """Iteration in which the last delta came."""
        self.iterations = 0

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.deltas[request.request_id] = []

    def iterate(self) -> Plan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        results = self.device.run(plan)
        for sequence in self.scheduler._running:
            assert sequence.slot is not None
            table = self.device.slots[sequence.slot].table
            assert table[: len(sequence.pages)] == sequence.pages, "the device has another block table"
        if plan.rows:
            self.in_flight.append(results)
        # Overlap: results are read one iteration late, or at once when nothing new was launched.
        while self.in_flight and (len(self.in_flight) > 1 or not self.overlap or not plan.rows):
            for delta in self.scheduler.process(self.in_flight.popleft()):
                self.deltas[delta.request_id].append(delta)
                if delta.finish_reason is not None:
                    self.finished_at[delta.request_id] = self.iterations
            self.scheduler.check()
        self.iterations += 1
        return plan

    def drain(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work():
                break
            in_flight = len(self.in_flight)
            plan = self.iterate()
            assert in_flight or plan.rows or plan.prefill, "an iteration without progress"
        assert not self.scheduler.has_work(), "requests never finish"

    def output(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas[request_id] for token in delta.token_ids]

    def assert_exact(self) -> None:
        """Every finished request emitted what it emits alone, for the right reason."""
        for request_id in self.finished_at:
            output, reason = expected_output(self.requests[request_id], self.config.max_model_len)
            last = self.deltas[request_id][-1]
            assert self.output(request_id) == output
            assert last.finish_reason == reason
            assert last.stop_token_id == (output[-1] if reason == "stop" else None)

    def assert_idle(self) -> None:
        """Nothing is held: free + cached = total."""
        stats = self.scheduler.stats()
        assert (stats.requests_running, stats.requests_waiting, stats.pages_used) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == self.config.num_pages - 1

    def run(self, *requests: Request) -> None:
        """Serve these, together, to the end."""
        for request in requests:
            self.add(request)
        self.drain()
        self.assert_exact()
