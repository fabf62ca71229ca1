"""Limits of the service: queue, time, body fields; keys from a file; the tokenizer's endpoints."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from service.admission import Admission
from service.errors import ApiError
from service.settings import load_settings
from tests.fixtures.tokenizers import word_tokenizer, write_tokenizer
from tests.service.fake_engine import FakeEngine, engine_info
from tests.service.harness import (
    MODEL,
    Connection,
    Harness,
    error_of,
    make_tokenizer,
    parse_events,
    serving,
    tokens_of,
    until,
)

HELLO = [*tokens_of("hello"), 1]


def held_engine() -> tuple[FakeEngine, asyncio.Event]:
    """An engine whose requests all wait for one event."""
    event = asyncio.Event()
    return FakeEngine(lambda request: HELLO, gate=lambda request, step: event), event


# --- queue -------------------------------------------------------------------------------------------------


def test_admission_counts_choices_and_gives_them_back() -> None:
    admission = Admission(2, 3)
    with admission.place() as first:
        first.claim(4)
        with admission.place():
            with pytest.raises(ApiError) as full, admission.place():
                raise AssertionError("there was no place")
            assert full.value.status == 429
            with pytest.raises(ApiError) as full:
                first.claim(5)
            assert full.value.status == 429
        with pytest.raises(ApiError) as never:
            first.claim(6)
        assert (never.value.status, never.value.param) == (400, "n")
        assert admission.num_choices == 4
    assert admission.num_choices == 0


async def test_d7_every_request_of_a_burst_is_answered_and_the_service_goes_on() -> None:
    engine, event = held_engine()
    async with serving(engine, max_num_seqs=8, max_queued_requests=56) as harness:
        burst = [asyncio.create_task(harness.complete(max_tokens=2)) for _ in range(400)]
        await until(lambda: sum(task.done() for task in burst) == 336)
        assert len(engine.requests) == 64
        event.set()
        statuses = [response.status_code for response in await asyncio.gather(*burst)]
        assert (statuses.count(200), statuses.count(429)) == (64, 336)
        refused = next(task.result() for task in burst if task.result().status_code == 429)
        error = error_of(refused, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await harness.complete()).status_code == 200
        assert (
            harness.sample("http_requests_total", route="/v1/completions", method="POST", status="429") == 336
        )
        assert harness.app.state.service.admission.num_choices == 0


async def test_d7_n_counts_as_n_and_what_never_fits_is_400() -> None:
    engine, event = held_engine()
    async with serving(engine, max_num_seqs=2, max_queued_requests=4) as harness:
        running = asyncio.create_task(harness.complete(prompt=["a", "b"], n=2))
        await until(lambda: len(engine.requests) == 4)
        assert error_of(await harness.complete(n=3), 429)["code"] == "queue_full"
        assert error_of(await harness.complete(n=7))["param"] == "n"
        fits = asyncio.create_task(harness.complete(n=2))
        await until(lambda: len(engine.requests) == 6)
        event.set()
        assert (await running).status_code == (await fits).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_gives_its_place_back(stream: bool) -> None:
    engine, _ = held_engine()
    async with serving(engine, max_num_seqs=1, max_queued_requests=0) as harness:
        body = json.dumps({"prompt": "hi", "stream": stream}).encode()
        connection = Connection(harness.app, "/v1/completions", body)
        await until(lambda: len(engine.requests) == 1)
        assert (await harness.complete()).status_code == 429
        connection.leave()
        await connection.task
        assert engine.running == 0
        assert harness.app.state.service.admission.num_choices == 0


async def test_what_never_fits_is_refused_by_the_field_that_asks_for_it() -> None:
    async with serving(output=HELLO, max_num_seqs=2, max_queued_requests=1) as harness:
        for fields, param in (
            ({"prompt": ["hi"] * 4}, "prompt"),
            ({"prompt": ["hi"] * 2, "n": 2}, "n"),
            ({"n": 4}, "n"),
        ):
            assert error_of(await harness.complete(**fields))["param"] == param


async def test_a_refused_body_gives_its_place_back() -> None:
    async with serving(output=HELLO, max_num_seqs=1, max_queued_requests=0) as harness:
        for _ in range(3):
            error_of(await harness.complete(temperature=-1))
        assert (await harness.complete()).status_code == 200


# --- time --------------------------------------------------------------------------------------------------


async def test_a_request_past_its_time_is_504_and_frees_what_it_held() -> None:
    engine, _ = held_engine()
    async with serving(engine, request_timeout=0.05) as harness:
        response = await harness.complete(n=2)
        assert error_of(response, 504)["code"] == "request_timeout"
        assert response.headers["x-should-retry"] == "false"  # it would take as long again
        assert engine.running == 0
        assert harness.sample("requests_total", outcome="error") == 2


async def test_a_stream_past_its_time_ends_with_an_error_event() -> None:
    engine = FakeEngine(lambda request: HELLO, gate=lambda request, step: asyncio.Event() if step else None)
    async with serving(engine, request_timeout=0.1) as harness:
        events = parse_events((await harness.complete(stream=True)).content)
        assert json.loads(events[-1])["error"]["code"] == "request_timeout"
        assert "[DONE]" not in events
        assert engine.running == 0


async def test_timing_is_told_and_ordered() -> None:
    async with serving(output=HELLO) as harness:
        started = time.monotonic()
        timing = (await harness.complete(n=2)).json()["metrics"]["timing"]
        elapsed = time.monotonic() - started
        assert 0 <= timing["queue_time"] <= timing["time_to_first_token"] <= timing["e2e_latency"] <= elapsed
        assert timing["inter_token_latency"] * (len(HELLO) - 1) <= timing["e2e_latency"]
        one = (await harness.complete(max_tokens=1)).json()["metrics"]["timing"]
        assert one["inter_token_latency"] is None


# --- huge fields -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        ("logit_bias", {str(i): 1 for i in range(10**5)}),
        ("stop", "x" * 10**6),
        ("stop", ["x"] * 10**5),
        ("whatever", "x" * 10**6),
    ],
    ids=["bias", "stop", "stops", "unknown"],
)
async def test_d8_a_huge_field_is_refused_unread(field: tuple[str, Any]) -> None:
    name, value = field
    async with serving(output=HELLO) as harness:
        error = error_of(await harness.complete(**{name: value}))
        assert error["param"] == name and "longer than" in error["message"]
        assert (await harness.complete(prompt="\\" * 200, user="x" * 2000)).status_code == 200


# --- keys --------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "fake", word_tokenizer(1000))
    return tmp_path / "fake"


def test_keys_come_from_the_file_too(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-2\n\n  clé \n", encoding="utf-8")
    settings = load_settings({"model": model, "api_key": ["key-1"], "api_key_file": file})
    assert settings.all_api_keys() == ("key-1", "key-2", "clé")
    for damage in (b"\n \n", b"\xff\xfe", None):
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage)
        with pytest.raises(ConfigError, match="--api-key-file"):
            load_settings({"model": model, "api_key_file": file})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ssl_keyfile": "x"}, "no such file"),
        ({"ssl_certfile": "/no/such"}, "--ssl-certfile /no/such"),
        ({"max_queued_requests": -1}, "--max-queued-requests=-1"),
        ({"request_timeout": 0}, "--request-timeout=0"),
        ({"request_timeout": float("nan")}, "--request-timeout=nan"),
        ({"max_engine_restarts": -1}, "--max-engine-restarts=-1"),
    ],
)
def test_impossible_options_are_refused_by_name(model: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings({"model": model, **given})


@pytest.mark.parametrize("opened", [False, True])
async def test_metrics_need_a_key_unless_opened(opened: bool, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret")
    async with serving(output=HELLO, api_key_file=file, open_metrics=opened) as harness:
        assert (await harness.http.get("/metrics")).status_code == (200 if opened else 401)
        for path in ("/tokenize", "/detokenize", "/v1/completions"):
            assert error_of(await harness.http.post(path, json={"prompt": "a"}), 401)
        harness.http.headers["authorization"] = "Bearer secret"
        assert (await harness.http.get("/metrics")).status_code == 200
        assert (await harness.http.post("/tokenize", json={"prompt": "a"})).status_code == 200


# --- tokenize ----------------------------------------------------------------------------------------------


async def post(harness: Harness, path: str, **body: Any) -> dict[str, Any]:
    response = await harness.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_tokenize_and_detokenize_are_inverse() -> None:
    tokenizer = make_tokenizer(add_bos_token=True)
    async with serving(output=HELLO, tokenizer=tokenizer) as harness:
        text = "héllo 😀"
        answer = await post(harness, "/tokenize", model=MODEL, prompt=text, return_token_strs=True)
        assert answer["tokens"] == [0, *tokenizer.encode(text, add_special_tokens=False)]
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 256
        plain = await post(harness, "/tokenize", prompt=text, add_special_tokens=False)
        assert plain["tokens"] == answer["tokens"][1:] and plain["token_strs"] is None
        assert (await post(harness, "/detokenize", tokens=plain["tokens"]))["prompt"] == text
        assert (await post(harness, "/tokenize", prompt=""))["count"] == 1


async def test_tokenize_counts_what_chat_would() -> None:
    async with serving(output=HELLO) as harness:
        messages = [{"role": "user", "content": "hi"}]
        usage = (await harness.chat(messages=messages)).json()["usage"]
        assert (await post(harness, "/tokenize", messages=messages))["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "foo": 1}, "foo"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_tokenizer_endpoints_refuse_by_name(path: str, body: dict[str, Any], param: str) -> None:
    async with serving(output=HELLO) as harness:
        assert error_of(await harness.http.post(path, json=body))["param"] == param
        response = await harness.http.post(path, json={"prompt": "a", "tokens": [5], "model": "nope"})
        assert response.status_code in (400, 404)


async def test_d2_a_large_text_is_tokenised_beside_the_loop() -> None:
    """The event loop goes round while millions of characters become tokens."""
    info = engine_info(max_model_len=10**7, max_request_tokens=10**7)
    async with serving(FakeEngine(lambda request: HELLO, info=info)) as harness:
        text = "word " * 200_000
        task = asyncio.create_task(harness.http.post("/tokenize", json={"prompt": text}))
        rounds = 0
        while not task.done():
            await asyncio.sleep(0)
            rounds += 1
        assert task.result().json()["count"] == len(text)
        assert rounds > 100, "the loop stood still"
