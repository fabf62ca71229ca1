"""Connections as such: silent ones, too many of them, those that a client leaves, and pipelined requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import structlog

from engine.types import Request
from service import connections
from service.app import create_app
from service.commands.serve import Server, _server_config
from service.metrics import ServiceMetrics
from service.settings import Settings
from tests.service import test_serve
from tests.service.fake_engine import FakeEngine
from tests.service.harness import make_tokenizer, tokens_of, until

OUTPUT = tokens_of("xyz")
BOUND = 10.0
"""A hang is a failure; far above what anything here takes."""
FEW = 3
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def completion(prompt: str = "hi", *, close: bool = False, stream: bool = False) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": 3, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    end = "Connection: close\r\n\r\n" if close else "\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{end}".encode() + body


class Listening:
    """A server on a port of its own, whose engine waits with each request until ``go_on`` is set."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.engine = FakeEngine(lambda request: OUTPUT, gate=self._gate)
        self.port = 0

    def _gate(self, request: Request, step: int) -> asyncio.Event | None:
        return self.go_on if step == 1 else None

    async def connect(self, data: bytes = b"") -> Stream:
        """A connection on which ``data`` was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def health(self) -> int:
        async with httpx.AsyncClient(timeout=BOUND) as client:
            return (await client.get(f"http://127.0.0.1:{self.port}/health")).status_code


@asynccontextmanager
async def listening(max_connections: int = 1000) -> AsyncGenerator[Listening, None]:
    made = Listening()
    settings = Settings(model=Path("fake"), port=0, drain_timeout=0.2)
    app = create_app(settings, made.engine, ServiceMetrics(), make_tokenizer())
    config = _server_config(app, settings, max_connections)

    async def nothing() -> None:
        pass

    server = Server(config, app.state.service.lifecycle, 0.2, on_start=nothing, on_ready=lambda: None)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    await app.state.service.lifecycle.started()
    made.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        made.go_on.set()
        server.should_exit = True
        await asyncio.wait_for(task, BOUND)


async def closed(stream: Stream) -> bytes:
    """What came until the server closed the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(BOUND):
            while part := await stream[0].read(65536):
                data += part
    return data


async def answer(stream: Stream) -> tuple[int, bytes]:
    """Status and body of the next answer, which has a length."""
    head = await asyncio.wait_for(stream[0].readuntil(b"\r\n\r\n"), BOUND)
    lines = head.lower().split(b"\r\n")
    [length] = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
    return int(lines[0].split()[1]), await stream[0].readexactly(length)


def is_open(stream: Stream) -> bool:
    return not stream[0].at_eof() and stream[0].exception() is None


# --- no request comes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"])
async def test_a_connection_without_a_request_is_closed(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    async with listening() as server:
        assert await closed(await server.connect(begun)) == b""


@pytest.mark.parametrize("kept_alive", [False, True], ids=["first", "later"])
async def test_a_head_that_comes_bit_by_bit_is_closed(
    kept_alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    async with listening() as server:
        stream = await server.connect(HEALTH if kept_alive else b"")
        if kept_alive:
            assert (await answer(stream))[0] == 200
        stream[1].write(b"GET /health HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                stream[1].write(b"X-A: b\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        try:
            assert await closed(stream) == b""
        finally:
            dripping.cancel()


async def test_an_answer_has_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    async with listening() as server:
        stream = await server.connect(completion())
        await asyncio.sleep(0.4)
        server.go_on.set()
        assert (await answer(stream))[0] == 200
        stream[1].write(HEALTH)
        assert (await answer(stream))[0] == 200


# --- too many ----------------------------------------------------------------------------------------------


async def test_idle_connections_give_way_to_new_ones_the_oldest_first() -> None:
    async with listening(FEW) as server:
        idle = [await server.connect() for _ in range(FEW)]
        idle[0][1].write(HEALTH)
        assert (await answer(idle[0]))[0] == 200  # it waits for a request since now only
        await server.connect()
        await closed(idle[1])
        assert [is_open(stream) for stream in idle] == [True, False, True]
        for _ in range(3 * FEW):
            assert await server.health() == 200


async def test_connections_with_a_request_stay_and_new_ones_are_closed() -> None:
    with structlog.testing.capture_logs() as logs:
        await fill_with_requests()
    warnings = [line for line in logs if line["event"] == "too_many_connections"]
    assert [line["limit"] for line in warnings] == [FEW], "logged once, not at each connection"


async def fill_with_requests() -> None:
    async with listening(FEW) as server:
        running = [await server.connect(completion()) for _ in range(FEW)]
        await until(lambda: len(server.engine.requests) == FEW)
        for _ in range(5):
            assert await closed(await server.connect(HEALTH)) == b""
        server.go_on.set()
        for stream in running:
            assert (await answer(stream))[0] == 200
        assert await server.health() == 200, "what was answered is idle"


def test_connections_leave_a_reserve_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(100, 5000)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.append(new))
    assert connections.allow_many_connections() == 5000 - connections.RESERVED_DESCRIPTORS
    limits[:] = [(60, 60)]
    assert connections.allow_many_connections() == 30


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., test_serve.Server]]:
    model = tmp_path / "fake"
    test_serve.write_tokenizer(model, test_serve.word_tokenizer(1000))
    yield from test_serve.starting(model)


def test_without_descriptors_the_log_is_not_flooded(start: Callable[[], test_serve.Server]) -> None:
    server = start()
    server.until(server.ready)
    server.client.close()
    process = psutil.Process(server.process.pid)
    few = process.num_fds() + 3
    process.rlimit(psutil.RLIMIT_NOFILE, (few, few))
    waiting = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    server.until(lambda: "cannot_accept_connections" in server.log)
    time.sleep(2.5)  # asyncio tries again each second
    for connection in waiting:
        connection.close()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=test_serve.BOUND) as client:
        assert client.get("/health").status_code == 200
    lines = [line for line in server.lines if "out of system resource" in line or "cannot_accept" in line]
    assert len(lines) == 1 and json.loads(lines[0])["reason"] == "Too many open files"


# --- a client that leaves, and one that does not -------------------------------------------------------------


@pytest.mark.parametrize("close", [False, True], ids=["keep-alive", "close"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("after", [b"", b"\r\n", HEALTH, b"x" * 1000], ids=["nothing", "end", "request", "x"])
async def test_a_client_that_leaves_is_noticed_whatever_it_sent_after_its_request(
    after: bytes, stream: bool, close: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as server:
        sent = await server.connect(completion(close=close, stream=stream))
        await until(lambda: server.engine.running == 1)
        sent[1].write(after)
        await asyncio.sleep(0.05)
        assert server.engine.running == 1, "it still waits for its answer"
        sent[1].close()
        await until(lambda: len(server.engine.aborted) == 1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_what_follows_an_announced_close_is_ignored() -> None:
    async with listening() as server:
        sent = await server.connect(completion(close=True))
        await until(lambda: server.engine.running == 1)
        sent[1].write(HEALTH)
        await asyncio.sleep(0.05)
        server.go_on.set()
        assert (await closed(sent)).count(b"HTTP/1.1 200 OK") == 1


@pytest.mark.parametrize("length", [2, connections.MAX_AHEAD_BYTES])
async def test_pipelined_requests_are_answered_in_order(length: int) -> None:
    async with listening() as server:
        sent = await server.connect(completion("a"))
        await until(lambda: server.engine.running == 1)
        sent[1].write(completion("b" * 100) + completion("c") + HEALTH)
        sent[1].write(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        body = json.dumps({"prompt": "b" * length}).encode()
        sent[1].write(b"Content-Length: %d\r\n\r\n" % len(body) + body + HEALTH)
        await asyncio.sleep(0.1)
        assert len(server.engine.requests) == 1
        server.go_on.set()
        answers = [await answer(sent) for _ in range(6)]
        assert [status for status, _ in answers] == [200] * 6
        assert [json.loads(body)["usage"]["prompt_tokens"] for _, body in answers[:3]] == [1, 100, 1]
        assert json.loads(answers[4][1])["count"] == length
