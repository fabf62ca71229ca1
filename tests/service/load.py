"""A load generator on bare sockets, and what it is for: ``python -m tests.service.load`` measures how many
streamed tokens a second of the service process's CPU time carries, with an engine that costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from engine.options import EngineOptions
from engine.types import EngineInfo, ForwardCount, Outputs, Request, StepStats, TokenDelta
from tests.fixtures.tokenizers import word_tokenizer, write_tokenizer

FACTORY = "tests.service.load:FreeEngine"
STEP_SECONDS = 0.0025


class FreeEngine:
    """Every step gives each request one token, at a fixed pace."""

    def __init__(self, options: EngineOptions) -> None:
        self.left: dict[str, int] = {}
        self.next_step = 0.0
        self.info = EngineInfo(
            model_type="fake",
            vocab_size=1000,
            max_model_len=10**6,
            max_num_seqs=options.max_num_seqs,
            num_speculative_tokens=3,
            num_pages=10,
            page_size=64,
            max_request_tokens=10**6,
            eos_token_ids=(0,),
            device="cpu",
            dtype="float32",
            attention_backend="none",
            schedule="sync",
            resolved={},
        )

    @classmethod
    def load(cls, options: EngineOptions, progress: object) -> FreeEngine:
        return cls(options)

    def add(self, request: Request) -> None:
        self.left[request.request_id] = request.params.max_tokens

    def abort(self, request_id: str) -> None:
        self.left.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.left)

    def close(self) -> None:
        self.left.clear()

    def iterate(self) -> Outputs:
        time.sleep(max(0.0, self.next_step - time.monotonic()))
        self.next_step = max(self.next_step, time.monotonic()) + STEP_SECONDS
        deltas = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            ended = self.left[request_id] == 0
            deltas.append(
                TokenDelta(
                    request_id=request_id,
                    token_ids=[7],
                    num_drafts=3,
                    finish_reason="length" if ended else None,
                )
            )
            if ended:
                del self.left[request_id]
        stats = StepStats(
            requests_running=len(self.left),
            requests_waiting=0,
            pages_used=0,
            pages_cached=0,
            pages_free=9,
            forwards=[ForwardCount("step", "replay", "none", 1)],
        )
        return Outputs(deltas=deltas, stats=stats)


class Reply(NamedTuple):
    """What came over one connection."""

    status: int
    headers: str
    body: bytes
    seconds: float


async def post(port: int, path: str, body: dict[str, Any], *, leave_after: float | None = None) -> Reply:
    """One request on a connection of its own; with ``leave_after`` seconds the client goes away then."""
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        raw = bytearray()
        try:
            async with asyncio.timeout(leave_after):
                while part := await reader.read(2**20):
                    raw += part
        except TimeoutError:
            return Reply(0, "", b"", time.monotonic() - started)
        headers, _, rest = bytes(raw).partition(b"\r\n\r\n")
        status = int(headers.split(b" ", 2)[1]) if headers else 0
        return Reply(status, headers.decode("latin-1").lower(), rest, time.monotonic() - started)
    finally:
        writer.close()


async def burst(port: int, num_requests: int, body: dict[str, Any]) -> list[Reply]:
    """``num_requests`` at once."""
    return await asyncio.gather(*(post(port, "/v1/completions", body) for _ in range(num_requests)))


async def soak(port: int, num_streams: int, seconds: float, bodies: list[dict[str, Any]], seed: int) -> int:
    """``num_streams`` at a time for some seconds, a third of which leave; the number of those that ended."""
    random_source = random.Random(seed)
    end = time.monotonic() + seconds
    ended = 0

    async def client() -> None:
        nonlocal ended
        while time.monotonic() < end:
            body = {**random_source.choice(bodies), "stream": random_source.random() < 0.7}
            leave = random_source.random() * 0.5 if random_source.random() < 0.33 else None
            reply = await post(port, "/v1/completions", body, leave_after=leave)
            assert reply.status in (0, 200, 429), reply
            if reply.status == 429:
                await asyncio.sleep(0.1)
            if reply.status == 200:
                assert not body["stream"] or b"data: [DONE]" in reply.body
                ended += 1

    await asyncio.gather(*(client() for _ in range(num_streams)))
    return ended


async def _measure(port: int, pid: int, num_streams: int, num_tokens: int) -> str:
    process = psutil.Process(pid)
    before, started = sum(process.cpu_times()[:2]), time.monotonic()
    replies = await burst(port, num_streams, {"prompt": [5], "max_tokens": num_tokens, "stream": True})
    seconds = time.monotonic() - started
    cpu = sum(process.cpu_times()[:2]) - before
    assert all(reply.status == 200 and reply.body.count(b"data: ") >= num_tokens for reply in replies)
    total = num_streams * num_tokens
    return (
        f"{num_streams} streams, {total} tokens in as many events: {cpu:.2f} s of CPU time in {seconds:.2f} s; "
        f"{total / cpu:.0f} tokens a second of CPU time"
    )


def main() -> None:
    from tests.service.test_serve import Server

    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), word_tokenizer(1000))
        server = Server(Path(directory), FACTORY)
        try:
            server.until(server.ready)
            for num_streams in (16, 64, 256):
                print(asyncio.run(_measure(server.port, server.process.pid, num_streams, 1000)))
        finally:
            server.process.kill()
            server.process.wait()


if __name__ == "__main__":
    main()
