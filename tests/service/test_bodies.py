"""Bodies on their way: how long, how large and how many; what they cost the requests that are complete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from service import body_reader
from tests.service.fake_engine import FakeEngine
from tests.service.harness import Connection, Harness, serving, tokens_of, until

OUTPUT = [*tokens_of("ok"), 1]
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
BEGUN = b'{"prompt":'


@asynccontextmanager
async def sending(
    harness: Harness, number: int, path: str = PATHS[0]
) -> AsyncGenerator[list[Connection], None]:
    """``number`` requests whose bodies are not complete."""
    reads = harness.app.state.service.bodies._reads
    before = len(reads)
    slow = [Connection(harness.app, path, BEGUN, more_body=True) for _ in range(number)]
    await until(lambda: len(reads) == before + number)
    yield slow
    for connection in slow:
        connection.leave()
        await ended(connection)
    assert not reads


async def ended(connection: Connection) -> None:
    await asyncio.wait_for(connection.task, 10)


def error_code(connection: Connection, status: int) -> str:
    assert connection.status == status, connection.body
    return str(json.loads(connection.body)["error"]["code"])


async def test_an_unfinished_body_takes_no_place_from_a_complete_request() -> None:
    async with (
        serving(output=OUTPUT, max_num_seqs=1, max_queued_requests=0) as harness,
        sending(harness, 5) as slow,
    ):
        assert harness.app.state.service.admission.num_choices == 0
        assert (await harness.complete()).status_code == 200
        slow[0].send(b'"hi"}')
        await ended(slow[0])
        assert slow[0].status == 200


async def test_a_full_queue_is_told_before_the_body_and_again_after_it() -> None:
    event = asyncio.Event()
    engine = FakeEngine(lambda request: OUTPUT, gate=lambda request, step: event)
    async with (
        serving(engine, max_num_seqs=1, max_queued_requests=0) as harness,
        sending(harness, 1) as [slow],
    ):
        running = asyncio.create_task(harness.complete())
        await until(lambda: len(engine.requests) == 1)
        early = Connection(harness.app, PATHS[0], BEGUN, more_body=True)
        await ended(early)
        assert error_code(early, 429) == "queue_full"
        slow.send(b'"hi"}')
        await ended(slow)
        assert error_code(slow, 429) == "queue_full"
        event.set()
        assert (await running).status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_the_time_of_a_request_counts_from_its_arrival_on(path: str) -> None:
    async with serving(output=OUTPUT, request_timeout=0.05) as harness:
        slow = Connection(harness.app, path, BEGUN, more_body=True)
        await ended(slow)
        assert error_code(slow, 408) == "request_timeout"
        assert slow.headers[b"connection"] == b"close"


async def test_a_body_has_its_time_without_a_limit_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "READ_SECONDS", 0.05)
    for limit in (None, 100.0):
        async with serving(output=OUTPUT, request_timeout=limit) as harness:
            slow = Connection(harness.app, PATHS[0], BEGUN, more_body=True)
            await ended(slow)
            assert error_code(slow, 408) == "request_timeout"


async def test_a_body_declared_too_long_is_refused_unread() -> None:
    async with serving(output=OUTPUT, max_body_bytes=100) as harness:
        for length in (b"101", b"9" * 100):
            long = Connection(harness.app, PATHS[0], b"", [(b"content-length", length)], more_body=True)
            await ended(long)
            assert error_code(long, 413) == "request_too_large"
            assert long._messages.qsize() == 1, "nothing was read"


async def test_a_body_of_no_declared_length_is_refused_as_soon_as_it_is_too_long() -> None:
    async with serving(output=OUTPUT, max_body_bytes=100) as harness:
        long = Connection(harness.app, PATHS[0], b" " * 100, more_body=True)
        long.send(b" ", more_body=True)
        await ended(long)
        assert error_code(long, 413) == "request_too_large"
        fits = b'{"prompt": "hi"}'.ljust(100)
        whole = Connection(harness.app, PATHS[0], fits, [(b"content-length", b"100")])
        await ended(whole)
        assert whole.status == 200


async def test_bodies_are_bounded_in_number_and_the_slowest_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_reader, "MAX_READS", 3)
    async with serving(output=OUTPUT) as harness, sending(harness, 3) as slow:
        refused = Connection(harness.app, PATHS[0], BEGUN, more_body=True)
        await ended(refused)
        assert error_code(refused, 429) == "queue_full" and refused.headers[b"retry-after"]
        assert all(connection.status is None for connection in slow), "they are young"
        monkeypatch.setattr(body_reader, "YIELD_SECONDS", 0.0)
        assert (await harness.complete()).status_code == 200
        await ended(slow[0])
        assert error_code(slow[0], 408) == "request_timeout"
        assert [connection.status for connection in slow[1:]] == [None, None]


@pytest.mark.parametrize("path", PATHS)
async def test_a_drain_ends_the_reads_at_once(path: str) -> None:
    async with serving(output=OUTPUT) as harness, sending(harness, 2, path) as slow:
        assert await harness.app.state.service.lifecycle.drain(10)
        for connection in slow:
            await ended(connection)
            assert error_code(connection, 503) == "shutting_down"


async def test_a_client_that_leaves_gives_its_read_back() -> None:
    async with serving(output=OUTPUT) as harness, sending(harness, 2) as slow:
        slow[0].leave()
        await ended(slow[0])
        assert len(harness.app.state.service.bodies._reads) == 1


async def test_d2_a_large_body_is_decoded_beside_the_loop() -> None:
    """Its keys are compared in Python; the event loop goes round meanwhile."""
    async with serving(output=OUTPUT) as harness:
        messages = [{"role": "user", "content": "hi", "name": "a"}] * 100_000
        task = asyncio.create_task(harness.chat(messages=messages))
        rounds = 0
        while not task.done():
            await asyncio.sleep(0)
            rounds += 1
        assert task.result().json()["error"]["param"] == "messages"
        assert rounds > 10, "the loop stood still"
