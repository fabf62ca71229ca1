"""Health, readiness, models, keys, request ids, start and drain."""

from __future__ import annotations

import asyncio
import inspect
import json

import httpx
import pytest

from engine.errors import EngineDeadError
from service import auth
from tests.service.fake_engine import FakeEngine
from tests.service.harness import (
    MODEL,
    Connection,
    Harness,
    error_of,
    parse_events,
    serving,
    tokens_of,
    until,
)

HELLO = [*tokens_of("hello"), 1]
KEYS = ("secret-1", "clé")
COMPLETION = json.dumps({"prompt": "hi"}).encode()


async def get(harness: Harness, path: str) -> httpx.Response:
    return await harness.http.get(path)


async def test_start_is_alive_but_not_ready_and_tells_its_progress() -> None:
    engine = FakeEngine(lambda request: HELLO, auto_start=False)
    async with serving(engine, wait=False) as harness:
        await asyncio.sleep(0)
        assert (await get(harness, "/health")).status_code == 200
        assert (await get(harness, "/ready")).json()["progress"] is None
        engine.report("loading", 2, 7)
        response = await get(harness, "/ready")
        assert response.status_code == 503
        assert response.json()["status"] == "starting"
        assert response.json()["progress"] == {"stage": "loading", "done": 2, "total": 7}
        response = await harness.complete()
        assert error_of(response, 503)["code"] == "engine_starting" and response.headers["retry-after"]
        assert (await get(harness, "/v1/models")).json()["data"][0]["id"] == MODEL
        engine.become_ready()
        assert (await get(harness, "/ready")).json() == {"status": "ready"}
        assert (await harness.complete()).status_code == 200


async def test_d1_dead_engine_is_neither_alive_nor_ready() -> None:
    async with serving(output=HELLO) as harness:
        harness.engine.die()
        for path in ("/health", "/ready"):
            response = await get(harness, path)
            assert response.status_code == 503
            assert response.json()["status"] == "dead"
            assert response.json()["error"]["code"] == "engine_dead"


async def test_d10_every_get_answers_head_and_says_so() -> None:
    async with serving(output=HELLO) as harness:
        for path in (
            "/health",
            "/ready",
            "/version",
            "/metrics",
            "/v1/models",
            "/dashboard",
            "/openapi.json",
        ):
            head = await harness.http.head(path)
            assert (head.status_code, (await harness.http.get(path)).status_code) == (200, 200)
            refused = await harness.http.post(path)
            assert error_of(refused, 405)["code"] == "method_not_allowed"
            assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}
        assert (await harness.http.head("/v1/models/unknown")).status_code == 404
        assert (await harness.http.head("/v1/completions")).status_code == 405


async def test_probes_may_use_head() -> None:
    async with serving(output=HELLO) as harness:
        for path, status in (("/health", 200), ("/ready", 200), ("/tokenize", 405)):
            assert (await harness.http.head(path)).status_code == status
        harness.engine.die()
        assert (await harness.http.head("/ready")).status_code == 503


async def test_engine_that_cannot_start_is_dead() -> None:
    class Broken(FakeEngine):
        async def start(self) -> None:
            raise EngineDeadError("no such checkpoint")

    async with serving(Broken(lambda request: HELLO)) as harness:
        assert (await get(harness, "/health")).status_code == 503
        assert "no such checkpoint" in str(harness.app.state.service.lifecycle.failure)
        assert error_of(await harness.complete(), 503)["code"] == "engine_dead"


async def test_models_version_and_metrics() -> None:
    async with serving(output=HELLO, served_model_name="org/name") as harness:
        listed = (await get(harness, "/v1/models")).json()
        assert listed["object"] == "list" and listed["data"][0]["max_model_len"] == 256
        assert (await get(harness, "/v1/models/org/name")).json() == listed["data"][0]
        assert error_of(await get(harness, "/v1/models/name"), 404)["code"] == "model_not_found"
        assert isinstance((await get(harness, "/version")).json()["version"], str)
        page = await get(harness, "/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        assert 'eyas_http_requests_total{method="GET",route="/version",status="200"} 1.0' in page.text


async def test_openapi_document_describes_both_bodies_and_has_no_dangling_reference() -> None:
    async with serving(output=HELLO) as harness:
        document = (await get(harness, "/openapi.json")).json()
        schemas = document["components"]["schemas"]
        assert "temperature" in schemas["CompletionBody"]["properties"]
        assert "messages" in schemas["ChatBody"]["properties"]
        text = json.dumps(document)
        for reference in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
            assert reference in schemas
        assert "#/$defs" not in text and "HTTPValidationError" not in text


# --- keys --------------------------------------------------------------------------------------------------


async def raw_status(harness: Harness, headers: list[tuple[bytes, bytes]]) -> tuple[int | None, bytes]:
    connection = Connection(harness.app, "/v1/completions", COMPLETION, headers)
    await connection.wait_for(lambda c: c.status is not None and bool(c.body))
    connection.leave()
    await connection.task
    return connection.status, connection.body


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"secret-1"],
        [b"Basic secret-1"],
        [b"Bearer secret-"],
        [b"Bearer secret-11"],
        [b"Bearer SECRET-1"],
        [b"Bearer secret-1,clef"],
        [b"Bearer cl\xe9"],
        [b"Bearer \xff\xfe"],
        [b"Bearer secret-1", b"Bearer secret-1"],
        [b"Bearer secret-1", b"Bearer wrong"],
    ],
)
async def test_d10_wrong_keys_are_401(headers: list[bytes]) -> None:
    async with serving(output=HELLO, api_key=KEYS) as harness:
        status, body = await raw_status(harness, [(b"authorization", value) for value in headers])
        assert status == 401
        error = json.loads(body)["error"]
        assert error["code"] == "invalid_api_key" and b"secret" not in body
        assert not harness.engine.requests


@pytest.mark.parametrize("value", [b"Bearer secret-1", b"bearer secret-1", "Bearer clé".encode()])
async def test_d10_every_known_key_is_accepted(value: bytes) -> None:
    async with serving(output=HELLO, api_key=KEYS) as harness:
        status, _ = await raw_status(harness, [(b"authorization", value)])
        assert status == 200


async def test_d10_probes_are_open_and_everything_else_is_guarded() -> None:
    async with serving(output=HELLO, api_key=KEYS) as harness:
        for path in ("/health", "/ready", "/version"):
            assert (await get(harness, path)).status_code == 200
        for path in ("/metrics", "/v1/models", "/openapi.json", "/nope", "/health/", "//health"):
            response = await get(harness, path)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


def test_d10_comparison_is_constant_time_over_every_key() -> None:
    source = inspect.getsource(auth.ApiKeys.match)
    assert "compare_digest" in source and "==" not in source
    loop = source[source.index("for ") :]
    assert "break" not in loop and loop.count("return") == 1 and "any(" not in source


# --- request ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc-1", "A.b_c-9", "x" * 128])
async def test_request_id_of_the_client_comes_back(given: str) -> None:
    async with serving(output=HELLO) as harness:
        for path in ("/health", "/nope"):
            response = await harness.http.get(path, headers={"x-request-id": given})
            assert response.headers["x-request-id"] == given
        await harness.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": given})
        assert given not in harness.engine.requests[0].request_id, "ids inside are unique all the same"


@pytest.mark.parametrize(
    "given", [b"", b"x" * 129, b"a b", b"a\tb", b"\xed\xa0\xbd", b"\xc3\xa9", b"<script>"]
)
async def test_c10_request_id_that_logs_cannot_carry_is_replaced(given: bytes) -> None:
    async with serving(output=HELLO) as harness:
        first = await harness.http.get("/health", headers={b"x-request-id": given})
        second = await harness.http.get("/health")
        ids = {first.headers["x-request-id"], second.headers["x-request-id"]}
        assert len(ids) == 2 and all(len(value) == 32 and value.isalnum() for value in ids)


async def test_exception_in_a_route_is_500_without_its_text() -> None:
    async with serving(output=HELLO) as harness:
        harness.app.state.service = None
        error = error_of(await harness.complete(), 500)
        assert error["code"] == "internal_error" and "create_app" not in error["message"]


# --- drain -------------------------------------------------------------------------------------------------


async def test_d3_drain_refuses_new_work_and_lets_running_requests_finish() -> None:
    event = asyncio.Event()
    engine = FakeEngine(lambda request: HELLO, gate=lambda request, step: event if step else None)
    async with serving(engine) as harness:
        lifecycle = harness.app.state.service.lifecycle
        running = asyncio.create_task(harness.complete(stream=True))
        await until(lambda: engine.running == 1)
        drain = asyncio.create_task(lifecycle.drain(10))
        await until(lambda: lifecycle.state == "draining")
        assert (await get(harness, "/ready")).json()["status"] == "draining"
        assert (await get(harness, "/health")).status_code == 200
        assert error_of(await harness.complete(), 503)["code"] == "shutting_down"
        event.set()
        assert await drain is True
        assert parse_events((await running).content)[-1] == "[DONE]"


async def test_d3_what_is_left_after_the_drain_ends_with_an_error() -> None:
    engine = FakeEngine(lambda request: HELLO, gate=lambda request, step: asyncio.Event() if step else None)
    async with serving(engine) as harness:
        connection = Connection(
            harness.app, "/v1/completions", json.dumps({"prompt": "hi", "stream": True}).encode()
        )
        await connection.wait_for(lambda c: b"data: " in c.body)
        whole = asyncio.create_task(harness.complete())
        await until(lambda: engine.running == 2)
        assert await harness.app.state.service.lifecycle.drain(0.05) is False
        await connection.task
        events = parse_events(connection.body)
        assert json.loads(events[-1])["error"]["code"] == "shutting_down"
        assert error_of(await whole, 503)["code"] == "shutting_down"
        assert engine.running == 0


async def test_end_of_the_application_stops_the_engine() -> None:
    engine = FakeEngine(lambda request: HELLO)
    async with serving(engine):
        assert not engine.stopped
    assert engine.stopped
    starting = FakeEngine(lambda request: HELLO, auto_start=False)
    async with serving(starting, wait=False):
        await asyncio.sleep(0)
    assert starting.stopped
