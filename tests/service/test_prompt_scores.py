"""``echo`` with log-probabilities, ``prompt_logprobs`` and ``max_tokens: 0``: what evaluation harnesses ask for."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from engine.client import InProcessEngineClient
from engine.options import EngineOptions
from service.app import create_app
from service.metrics import ServiceMetrics
from service.settings import Settings
from service.text import Tokenizer
from tests.fixtures.checkpoints import F1
from tests.service.harness import Harness, events_of, serving, tokens_of

OUTPUT = tokens_of("xyz")


async def test_an_echoed_prompt_has_an_entry_for_each_of_its_tokens() -> None:
    async with serving(output=OUTPUT) as harness:
        response = await harness.complete(prompt="aé", echo=True, logprobs=2, max_tokens=3)
        choice = response.json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "aéxyz"
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "x", "y", "z"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"]) == 6
    assert min(logprobs["top_logprobs"][1].values()) == -9999.0, "no infinity reaches JSON"


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_stream_tells_the_same_as_a_whole_answer(max_tokens: int) -> None:
    body: dict[str, Any] = {
        "prompt": ["ab", "c"],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "max_tokens": max_tokens,
    }
    async with serving(output=OUTPUT) as harness:
        whole = (await harness.complete(**body)).json()["choices"]
        chunks = events_of(await harness.complete(stream=True, **body))
    for index, choice in enumerate(whole):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        for field, values in choice["logprobs"].items():
            assert [entry for c in mine if c["logprobs"] for entry in c["logprobs"][field]] == values


async def test_no_tokens_can_be_asked_for_with_a_prompt_to_tell_of() -> None:
    async with serving(output=OUTPUT) as harness:
        response = await harness.complete(prompt="abc", echo=True, max_tokens=0)
        body = response.json()
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abc", "length")
        assert body["choices"][0]["logprobs"] is None and body["usage"]["completion_tokens"] == 0
        assert harness.engine.requests[-1].params.prompt_logprobs is None


async def test_prompt_logprobs_are_those_of_vllm() -> None:
    async with serving(output=OUTPUT) as harness:
        choice = (await harness.complete(prompt="ab", prompt_logprobs=2, max_tokens=1)).json()["choices"][0]
        chat = (await harness.chat(prompt_logprobs=0, max_tokens=0)).json()
    a, b = tokens_of("ab")
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(b): {"logprob": -0.5, "rank": 7, "decoded_token": "b"},
            "2": {"logprob": 0.0, "rank": 1, "decoded_token": "\0"},
            "3": {"logprob": -9999.0, "rank": 2, "decoded_token": "\1"},
        },
    ]
    assert a != b and choice["logprobs"] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["choices"][0]["message"]["content"] == ""


async def test_both_scores_of_a_prompt_have_their_own_number_of_alternatives() -> None:
    body: dict[str, Any] = {
        "prompt": "ab",
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 3,
        "max_tokens": 1,
    }
    async with serving(output=OUTPUT) as harness:
        choice = (await harness.complete(**body)).json()["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 4
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2


@pytest.fixture
async def real(f1_bytes: F1) -> AsyncGenerator[Harness, None]:
    """The service over a real engine in this process."""
    options = EngineOptions(
        model=str(f1_bytes.path), num_kv_pages=100, kv_page_size=8, threads=1, device="cpu"
    )
    client, metrics = InProcessEngineClient(options), ServiceMetrics()
    settings = Settings(model=f1_bytes.path, drain_timeout=0.2)
    app = create_app(settings, client, metrics, Tokenizer.from_directory(f1_bytes.path))  # type: ignore[arg-type]
    async with app.router.lifespan_context(app):
        await app.state.service.lifecycle.started()
        harness = Harness(app, client, metrics)  # type: ignore[arg-type]
        async with harness.http:
            yield harness


async def _post(harness: Harness, **body: Any) -> dict[str, Any]:
    response = await harness.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(json.loads(response.content)["choices"][0])


async def test_loglikelihoods_of_a_known_chain(real: Harness, f1_bytes: F1) -> None:
    """A continuation on the cycle is certain and greedy; one beside it is neither."""
    log_probs = f1_bytes.probs().log()
    walk = [99, *f1_bytes.walk(99, 12)]
    for prompt, certain in ((walk, True), ([*walk[:8], 5, *walk[9:]], False)):
        for max_tokens in (0, 1):
            told = (await _post(real, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens))[
                "logprobs"
            ]
            own = told["token_logprobs"]
            assert len(own) == len(prompt) + max_tokens and own[0] is None
            for i in range(1, len(prompt)):
                assert own[i] == pytest.approx(float(log_probs[prompt[i - 1], prompt[i]]), abs=1e-4)
            greedy = all(own[i] == max(told["top_logprobs"][i].values()) for i in range(1, len(prompt)))
            assert greedy == certain


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_choices_share_the_scores_of_their_prompt(real: Harness, f1_bytes: F1, max_tokens: int) -> None:
    walk = [99, *f1_bytes.walk(99, 12)]
    body = {"prompt": walk, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "temperature": 0}
    response = await real.http.post("/v1/completions", json={**body, "n": 3, "max_tokens": max_tokens})
    assert response.status_code == 200, response.text
    first, *others = response.json()["choices"]
    assert len(first["logprobs"]["tokens"]) == len(walk) + max_tokens
    assert len(first["prompt_logprobs"]) == len(walk)
    for other in others:
        assert (other["text"], other["finish_reason"]) == (first["text"], "length")
        assert other["prompt_logprobs"] == first["prompt_logprobs"]
        assert other["logprobs"]["tokens"] == first["logprobs"]["tokens"]
        for field in ("token_logprobs", "top_logprobs", "text_offset"):
            assert other["logprobs"][field][: len(walk)] == first["logprobs"][field][: len(walk)]


async def test_structured_output_through_the_service(real: Harness) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body = {"prompt": "x", "max_tokens": 80, "temperature": 1.0, "seed": 3}
    choice = await _post(real, response_format=named, **body)
    assert json.loads(choice["text"])["a"] in (1, 2) and choice["finish_reason"] == "stop"
    for given, allowed in [
        ({"choice": ['"yes"', "né\n"]}, {'"yes"', "né\n"}),
        ({"regex": "a{3}"}, {"aaa"}),
        ({"grammar": 'root ::= "b" [cd]'}, {"bc", "bd"}),
        ({"json": json.dumps({"const": None})}, {"null"}),
    ]:
        choice = await _post(real, structured_outputs=given, **body)
        assert choice["text"] in allowed and choice["finish_reason"] == "stop", given
    choice = await _post(real, structured_outputs={"regex": "a{3}"}, ignore_eos=True, **body)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("aaa", "stop", None)
    response = await real.http.post(
        "/v1/completions", json={"prompt": "x", "structured_outputs": {"regex": "(a"}}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs"
