"""The official client, and a fuzzer of the OpenAPI document, against a real server with a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import hypothesis
import openai
import pytest
import schemathesis
from openai.types.chat import ChatCompletion
from schemathesis.checks import not_a_server_error

from engine.worker import DEFAULT_FACTORY
from tests.fixtures.checkpoints import F1
from tests.service.fake_engine import FakeEngine
from tests.service.harness import MODEL, serving, tokens_of, until
from tests.service.test_serve import Server

WEATHER = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(f1: F1) -> Iterator[Server]:
    server = Server(
        f1.path,
        DEFAULT_FACTORY,
        api_key=["secret"],
        threads=1,
        max_num_seqs=4,
        num_kv_pages=200,
        kv_page_size=16,
    )
    server.client.headers["authorization"] = "Bearer secret"
    server.until(server.ready)
    yield server
    server.process.terminate()
    assert server.wait() == 0
    server.client.close()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_openai_completion_is_the_known_answer(client: openai.OpenAI, f1: F1) -> None:
    answer = client.completions.create(
        model=f1.path.name, prompt="w5", max_tokens=9, temperature=0, extra_body=ENDLESS
    )
    walk = f1.walk(5, 9)
    assert answer.choices[0].text == words([token for token in walk if token > 1])
    assert answer.usage is not None and answer.usage.completion_tokens == len(walk)
    spec = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] > 0


def test_openai_stream_says_the_same_with_usage(client: openai.OpenAI, f1: F1) -> None:
    ask = {"model": f1.path.name, "messages": [{"role": "user", "content": "w7"}], "max_tokens": 9, "n": 2}
    whole = client.chat.completions.create(**ask, temperature=0)
    texts, usage = {0: "", 1: ""}, None
    for chunk in client.chat.completions.create(
        **ask, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert isinstance(whole, ChatCompletion)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert usage == whole.usage


def test_openai_logprobs_are_typed(client: openai.OpenAI, f1: F1) -> None:
    answer = client.chat.completions.create(
        model=f1.path.name,
        messages=[{"role": "user", "content": "w7"}],
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == (answer.usage.completion_tokens if answer.usage else -1)
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in logprobs.content)


def test_the_log_tells_of_a_request_but_not_what_it_said(server: Server, f1: F1) -> None:
    body = {"prompt": "w33 w34", "max_tokens": 3, "temperature": 0, "user": "someone", "stop": ["w0x"]}
    server.client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    server.until(lambda: any('"mine"' in line and '"request"' in line for line in server.lines))
    [told] = [json.loads(line) for line in server.lines if '"mine"' in line and '"generation"' in line]
    assert (told["prompt_tokens"], told["completion_tokens"], told["outcomes"]) == (2, 3, ["length"])
    assert told["accept_length"] > 1 and told["error"] is None
    said = ["w33", "w34", "someone", "w0x", "secret", *(f"w{token} " for token in f1.walk(34, 3))]
    assert not [text for text in said if text in server.log]


def test_openai_errors_have_their_classes(client: openai.OpenAI, server: Server, f1: F1) -> None:
    name = f1.path.name
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=name, prompt="w5", temperature=9)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="w5")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "w7"}], tools=[WEATHER], tool_choice="required"
        )
    assert tools.value.param == "tool_choice"
    assert [model.id for model in client.models.list()] == [name]


def test_a_closed_stream_frees_the_engine_within_two_seconds(
    client: openai.OpenAI, server: Server, f1: F1
) -> None:
    """Cancel: pages come back, and the next request drafts as before."""
    ask = {"model": f1.path.name, "prompt": "w5", "max_tokens": 500, "extra_body": ENDLESS}
    for _ in range(3):
        stream = client.completions.create(**ask, stream=True, n=2)
        next(iter(stream))
        stream.close()
    server.until(lambda: "eyas_requests_running 0.0" in server.client.get("/metrics").text)
    page = server.client.get("/metrics").text
    assert 'eyas_kv_pages{state="used"} 0.0' in page and "eyas_requests_waiting 0.0" in page
    answer = client.completions.create(model=f1.path.name, prompt="w5", max_tokens=4, temperature=0)
    assert (answer.model_extra or {})["metrics"]["speculative_decoding"]["draft_acceptance_rate"] == 1.0


async def test_openai_retries_when_the_queue_is_full() -> None:
    event = asyncio.Event()
    engine = FakeEngine(lambda request: [*tokens_of("hello"), 1], gate=lambda request, step: event)
    async with serving(engine, max_num_seqs=1, max_queued_requests=0) as harness:
        running = asyncio.create_task(harness.complete())
        await until(lambda: engine.running == 1)
        asyncio.get_running_loop().call_later(0.2, event.set)
        async with openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="x", http_client=harness.http, max_retries=2
        ) as client:
            answer = await client.completions.create(model=MODEL, prompt="hi")
        assert answer.choices[0].text == "hello"
        assert (await running).status_code == 200
        assert (
            harness.sample("http_requests_total", route="/v1/completions", method="POST", status="429") == 1
        )


def test_openapi_document_is_served_and_fuzzing_finds_no_5xx(server: Server) -> None:
    """Requests made from the document, valid and not, are all answered below 500."""
    fuzz(server, max_examples=12)


@pytest.mark.slow
def test_fuzzing_for_longer_finds_no_5xx(server: Server) -> None:
    fuzz(server, max_examples=400)


def fuzz(server: Server, max_examples: int) -> None:
    schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())
    schema.config.update(base_url=str(server.client.base_url), headers={"Authorization": "Bearer secret"})
    operations = [result.ok() for result in schema.get_all_operations()]
    paths = {operation.path for operation in operations}
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/ready"} <= paths

    for operation in operations:

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=max_examples,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            database=None,
        )
        def check(case: schemathesis.Case) -> None:
            response = case.call(timeout=30)
            case.validate_response(response, checks=[not_a_server_error])

        check()
    assert server.client.get("/ready").status_code == 200
    assert isinstance(server.complete(5, max_tokens=3), httpx.Response)
