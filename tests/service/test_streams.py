"""Streams: shape, usage, errors after the first byte; and clients that leave (C11, C12)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.types import ErrorInfo, Request
from tests.service.fake_engine import FakeEngine
from tests.service.harness import (
    Connection,
    Harness,
    error_of,
    events_of,
    parse_events,
    serving,
    tokens_of,
    until,
)

EOS = 1
HELLO = [*tokens_of("hello"), EOS]
PATHS = ("/v1/completions", "/v1/chat/completions")


def body_for(path: str, **fields: Any) -> bytes:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    )
    return json.dumps({**prompt, **fields}).encode()


class Gate:
    """Lets every request do its first ``steps`` steps, and the rest once it is opened."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.event = asyncio.Event()

    def __call__(self, request: Request, step: int) -> asyncio.Event | None:
        return self.event if step >= self.steps else None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_c11_no_usage_unless_asked_for(path: str, options: dict[str, Any] | None) -> None:
    async with serving(output=HELLO) as harness:
        body = body_for(path, stream=True, stream_options=options)
        response = await harness.http.post(path, content=body, headers={"content-type": "application/json"})
        for chunk in events_of(response):
            assert chunk["choices"] and "usage" not in chunk and "metrics" not in chunk


@pytest.mark.parametrize("chat", [False, True])
async def test_c11_usage_is_one_extra_last_chunk(chat: bool) -> None:
    async with serving(FakeEngine(lambda request: HELLO, accepts=lambda step: 2)) as harness:
        call = harness.chat if chat else harness.complete
        for ask in ({}, {"n": 3}, {"stop": "l"}, *([] if chat else [{"prompt": ["a", "bc"], "n": 2}])):
            whole = (await call(**ask)).json()
            *chunks, last = events_of(await call(**ask, stream=True, stream_options={"include_usage": True}))
            assert last["choices"] == [] and last["usage"] == whole["usage"]
            assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("tokens", [HELLO, tokens_of("hello")])
async def test_c12_each_choice_ends_once_with_a_reason(chat: bool, tokens: list[int]) -> None:
    async with serving(output=tokens) as harness:
        call = harness.chat if chat else harness.complete
        reasons: dict[int, list[str | None]] = {}
        for chunk in events_of(await call(n=2, max_tokens=5 if tokens[-1] != EOS else 9, stream=True)):
            for choice in chunk["choices"]:
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
        for seen in reasons.values():
            assert set(seen[:-1]) == {None}
            assert seen[-1] == ("stop" if tokens[-1] == EOS else "length")


async def test_chat_stream_begins_with_the_role() -> None:
    async with serving(output=HELLO) as harness:
        chunks = events_of(await harness.chat(stream=True, n=2))
        for index in range(2):
            deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert all("role" not in delta for delta in deltas[1:])
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_c12_engine_death_in_a_stream_is_an_error_event_and_no_done(path: str) -> None:
    engine = FakeEngine(lambda request: HELLO, gate=Gate(2))
    async with serving(engine) as harness:
        connection = Connection(harness.app, path, body_for(path, stream=True, n=2))
        await connection.wait_for(lambda c: b'"e"' in c.body)
        engine.die()
        await asyncio.wait_for(connection.task, 10)
        events = parse_events(connection.body)
        error = json.loads(events[-1])["error"]
        assert error["code"] == "engine_dead" and error["type"] == "server_error"
        for event in events[:-1]:
            assert all(choice["finish_reason"] is None for choice in json.loads(event)["choices"])
        assert harness.sample("requests_total", outcome="error") == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_death_before_the_first_token_is_503(stream: bool) -> None:
    engine = FakeEngine(lambda request: HELLO, gate=Gate(0))
    async with serving(engine) as harness:
        task = asyncio.create_task(harness.complete(stream=stream))
        await until(lambda: engine.running == 1)
        engine.die()
        response = await task
        assert error_of(response, 503)["code"] == "engine_dead" and response.headers["retry-after"]
        assert error_of(await harness.complete(stream=stream), 503)["code"] == "engine_dead"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("info", "status", "code", "param"),
    [
        (ErrorInfo("invalid_request", "top_k is too large", "top_k"), 400, "invalid_value", "top_k"),
        (ErrorInfo("numerical_error", "a non-finite logit"), 500, "numerical_error", None),
        (ErrorInfo("internal_error", "secret path /x"), 500, "internal_error", None),
        (ErrorInfo("engine_dead", "gone"), 503, "engine_dead", None),
        (ErrorInfo("unavailable", "interrupted; try again"), 503, "unavailable", None),
    ],
)
async def test_what_the_engine_refuses_has_a_status_even_for_a_stream(
    stream: bool, info: ErrorInfo, status: int, code: str, param: str | None
) -> None:
    """An internal error's details are for the log only."""

    def second_fails(request: Request) -> ErrorInfo | None:
        return info if request.request_id.endswith("-1") else None

    gate = Gate(0)
    engine = FakeEngine(lambda request: HELLO, errors=second_fails, gate=gate)
    async with serving(engine) as harness:
        with capture_logs() as logs:
            response = await harness.complete(stream=stream, n=3)
        error = error_of(response, status)
        assert (error["code"], error["param"]) == (code, param)
        told = [entry["message"] for entry in logs if entry["event"] == "engine_error"]
        assert told == ([info.message] if code == "internal_error" else [])
        assert ("retry-after" in response.headers) == (status == 503)
        assert response.headers.get("x-should-retry") == ("false" if code == "numerical_error" else None)
        assert "secret" not in error["message"]
        await until(lambda: engine.running == 0)
        gate.event.set()
        assert (await harness.complete()).status_code == 200
        assert harness.sample("requests_total", outcome="error") == 3


async def leaving(harness: Harness, engine: FakeEngine, path: str, **fields: Any) -> Connection:
    """A client that leaves once its requests run (and, if it streams, after the first bytes)."""
    connection = Connection(harness.app, path, body_for(path, **fields))
    await until(lambda: engine.running == fields.get("n", 1))
    if fields.get("stream"):
        await connection.wait_for(lambda c: b"data: " in c.body)
    connection.leave()
    await asyncio.wait_for(connection.task, 10)
    await until(lambda: engine.running == 0)
    return connection


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_aborts_all_its_requests(path: str, stream: bool, n: int) -> None:
    gate = Gate(1)
    engine = FakeEngine(lambda request: HELLO, gate=gate)
    async with serving(engine) as harness:
        connection = await leaving(harness, engine, path, stream=stream, n=n)
        assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
        assert b"[DONE]" not in connection.body
        assert harness.sample("requests_total", outcome="abort") == n
        assert harness.sample("requests_started_total") == n
        gate.event.set()
        assert (await harness.complete()).status_code == 200


async def test_a_client_that_leaves_before_the_first_token_of_a_stream() -> None:
    engine = FakeEngine(lambda request: HELLO, gate=Gate(0))
    async with serving(engine) as harness:
        connection = Connection(harness.app, PATHS[0], body_for(PATHS[0], stream=True))
        await until(lambda: engine.running == 1)
        connection.leave()
        await asyncio.wait_for(connection.task, 10)
        assert connection.status is None and len(engine.aborted) == 1
        assert harness.sample("http_requests_total", route=PATHS[0], method="POST", status="499") == 1


async def test_a_finished_choice_is_not_aborted_when_the_client_leaves() -> None:
    engine = FakeEngine(
        lambda request: HELLO,
        gate=lambda request, step: Gate(0).event if request.request_id.endswith("-1") else None,
    )
    async with serving(engine) as harness:
        connection = Connection(harness.app, PATHS[0], body_for(PATHS[0], stream=True, n=2))
        await connection.wait_for(lambda c: b'"finish_reason":"stop"' in c.body)
        connection.leave()
        await asyncio.wait_for(connection.task, 10)
        assert [request_id[-2:] for request_id in engine.aborted] == ["-1"]


async def test_ready_deltas_of_many_choices_come_in_one_write() -> None:
    writes: list[bytes] = []
    async with serving(output=HELLO) as harness:
        connection = Connection(harness.app, PATHS[0], body_for(PATHS[0], stream=True, n=8))
        seen = 0
        while not connection.task.done():
            await asyncio.sleep(0)
            if len(connection.body) > seen:
                writes.append(connection.body[seen:])
                seen = len(connection.body)
        assert max(write.count(b"data: ") for write in writes) >= 8


async def test_metrics_of_latency_count_choices_and_tokens() -> None:
    async with serving(FakeEngine(lambda request: HELLO, accepts=lambda step: 1)) as harness:
        await harness.complete(n=2)
        await harness.complete(stream=True)
        assert harness.sample("time_to_first_token_seconds_count") == 3
        assert harness.sample("queue_time_seconds_count") == 3
        assert harness.sample("request_latency_seconds_count") == 3
        assert harness.sample("inter_token_latency_seconds_count") == 3 * (len(HELLO) - 1)
        assert harness.sample("requests_total", outcome="stop") == 3
        assert harness.sample("metrics_errors_total") == 0
