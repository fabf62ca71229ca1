"""Bodies on their way: how long, how large and how many; what they cost the requests that are complete."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from service import body_reader, json_body
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
    bodies = harness.app.state.service.bodies
    reads = bodies._reads
    before = len(reads)
    slow = [Connection(harness.app, path, BEGUN, more_body=True) for _ in range(number)]
    await until(lambda: len(reads) == before + number)
    yield slow
    for connection in slow:
        connection.leave()
        await ended(connection)
    assert not reads and not bodies._held


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


@pytest.fixture
def few_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies longer than 40 bytes count with those of others."""
    for module in (body_reader, json_body):
        monkeypatch.setattr(module, "SMALL_BODY_BYTES", 40)


async def send(harness: Harness, connection: Connection, size: int) -> None:
    """``size`` bytes of a body that is not complete, until they count."""
    bodies = harness.app.state.service.bodies
    before = bodies._held
    connection.send(b" " * size, more_body=True)
    await until(lambda: bodies._held == before + size + len(BEGUN))


def begin(harness: Harness, body: bytes = BEGUN, *, more_body: bool = True) -> Connection:
    declared = [(b"content-length", b"100")]
    return Connection(harness.app, PATHS[0], body, declared, more_body=more_body)


@pytest.mark.usefixtures("few_are_small")
async def test_bodies_are_bounded_together_by_the_bytes_that_came() -> None:
    async with (
        serving(output=OUTPUT, max_body_bytes=100, max_total_body_bytes=250) as harness,
        sending(harness, 2) as slow,
    ):
        for connection in slow:
            await send(harness, connection, 81)
        assert harness.app.state.service.bodies._held == 182  # 10 + 81 each
        fits = begin(harness)
        await send(harness, fits, 58)  # 250
        fits.send(b" ", more_body=True)
        await ended(fits)
        assert error_code(fits, 429) == "queue_full" and int(fits.headers[b"retry-after"]) >= 1
        assert b"250 bytes" in fits.body
        assert all(connection.status is None for connection in slow), "they are young"
        again = begin(harness, b'{"prompt": "hi"}'.ljust(68), more_body=False)
        await ended(again)
        assert again.status == 200, "what was refused holds nothing"
        assert harness.app.state.service.bodies._held == 182


@pytest.mark.usefixtures("few_are_small")
async def test_the_oldest_of_the_long_bodies_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        serving(output=OUTPUT, max_body_bytes=100, max_total_body_bytes=250) as harness,
        sending(harness, 4) as slow,
    ):
        for connection in slow[1:]:  # the first one sends nothing more, and holds nothing
            await send(harness, connection, 70)
        monkeypatch.setattr(body_reader, "YIELD_SECONDS", 0.0)
        late = begin(harness, b'{"prompt": "hi"}'.ljust(90), more_body=False)
        await ended(late)
        assert late.status == 200
        await ended(slow[1])
        assert error_code(slow[1], 408) == "request_timeout"
        assert slow[1].headers[b"connection"] == b"close"
        assert [slow[i].status for i in (0, 2, 3)] == [None, None, None]


@pytest.mark.usefixtures("few_are_small")
async def test_no_body_gives_way_to_an_older_one_or_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        serving(output=OUTPUT, max_body_bytes=100, max_total_body_bytes=250) as harness,
        sending(harness, 3) as slow,
    ):
        for connection in slow:
            await send(harness, connection, 70)
        reads = list(harness.app.state.service.bodies._reads)
        monkeypatch.setattr(body_reader, "YIELD_SECONDS", 60.0)
        reads[0].start_time -= 100.0
        reads[0].held -= 75  # all but 5 bytes were another's
        late = begin(harness, b" " * 90)
        await ended(late)
        assert error_code(late, 429) == "queue_full"
        assert [connection.status for connection in slow] == [None] * 3, "5 bytes would not do"
        reads[0].held += 75
        monkeypatch.setattr(body_reader, "YIELD_SECONDS", 0.0)
        slow[0].send(b" " * 15, more_body=True)
        await ended(slow[0])
        assert error_code(slow[0], 429) == "queue_full"
        assert [connection.status for connection in slow[1:]] == [None, None]


@pytest.mark.usefixtures("few_are_small")
async def test_a_body_that_gave_way_is_not_received_further(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        serving(output=OUTPUT, max_body_bytes=100, max_total_body_bytes=100) as harness,
        sending(harness, 2) as [older, younger],
    ):
        await send(harness, older, 70)
        monkeypatch.setattr(body_reader, "YIELD_SECONDS", 0.0)
        younger.send(b'"hi"}'.ljust(70))
        older.send(b'"hi"}')  # it is there when the other one takes the room
        await ended(older)
        await ended(younger)
        assert (error_code(older, 408), younger.status) == ("request_timeout", 200)


@pytest.mark.usefixtures("few_are_small")
async def test_long_bodies_keep_no_short_one_out() -> None:
    async with (
        serving(output=OUTPUT, max_body_bytes=100, max_total_body_bytes=160) as harness,
        sending(harness, 12) as slow,
    ):
        for connection in slow[:2]:  # the others are short so far
            await send(harness, connection, 70)
        assert (await harness.complete()).status_code == 200
        assert [connection.status for connection in slow] == [None] * 12


@pytest.mark.usefixtures("few_are_small")
async def test_one_body_has_room_whatever_the_bound() -> None:
    async with serving(output=OUTPUT, max_body_bytes=100, max_total_body_bytes=1) as harness:
        whole = begin(harness, b'{"prompt": "hi"}'.ljust(100), more_body=False)
        await ended(whole)
        assert whole.status == 200


@pytest.mark.usefixtures("few_are_small")
async def test_a_body_counts_while_it_waits_to_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "YIELD_SECONDS", 0.0)
    go_on = threading.Event()
    parse = json_body.parse_json_object

    def held_up(raw: bytes) -> dict[str, object]:
        assert len(raw) <= 40 or go_on.wait(30)
        return parse(raw)

    monkeypatch.setattr(json_body, "parse_json_object", held_up)
    long = b'{"prompt": "hi"}'.ljust(90)
    async with serving(output=OUTPUT, max_body_bytes=100, max_total_body_bytes=180) as harness:
        bodies = harness.app.state.service.bodies
        try:
            waiting = [begin(harness, long, more_body=False) for _ in range(2)]
            await until(lambda: bodies._held == 180 and not bodies._reads)
            refused = begin(harness, long, more_body=False)
            await ended(refused)
            assert error_code(refused, 429) == "queue_full"
            assert (await harness.complete()).status_code == 200
        finally:
            go_on.set()
        for connection in waiting:
            await ended(connection)
        assert [connection.status for connection in waiting] == [200, 200]
        assert not bodies._held


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
