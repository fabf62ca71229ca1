"""What one client can ask at most: it neither stops the event loop nor keeps others from their answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.chat_format import ChatFormat
from service.formats import CompletionFormat
from service.json_body import MAX_FIELD_BYTES
from service.schemas import MAX_SCORES
from service.tokenizing import MAX_CALLS, MAX_TEXT_BYTES, MAX_TOKENS
from tests.service.fake_engine import FakeEngine, engine_info
from tests.service.harness import error_of, events_of, make_tokenizer, serving, tokens_of, until

OUTPUT = tokens_of("xyz")
LONG = 20_000
"""Characters of a text that is dealt with in a thread."""


def roomy_engine() -> FakeEngine:
    info = engine_info(max_model_len=10**7, max_request_tokens=10**7)
    return FakeEngine(lambda request: OUTPUT, info=info)


# --- tokenizer's endpoints ---------------------------------------------------------------------------------


class SlowTokenizer:
    """Holds each ``encode`` of a text that begins with "slow" until it is let go, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokenizer = make_tokenizer()
        self.go_on = threading.Event()
        self.running = self.most_running = 0
        self._encode = self.tokenizer.encode
        monkeypatch.setattr(self.tokenizer, "encode", self.encode)

    def encode(self, text: str, **options: Any) -> list[int]:
        if text.startswith("slow"):
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            assert self.go_on.wait(30)
            self.running -= 1
        return self._encode(text, **options)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTokenizer]:
    slow = SlowTokenizer(monkeypatch)
    yield slow
    slow.go_on.set()


async def test_long_texts_are_tokenised_one_by_one_beside_prompts(slow: SlowTokenizer) -> None:
    async with serving(roomy_engine(), tokenizer=slow.tokenizer) as harness:
        body = {"prompt": "slow" + "x" * LONG}
        calls = [asyncio.create_task(harness.http.post("/tokenize", json=body)) for _ in range(MAX_CALLS + 3)]
        await until(lambda: sum(call.done() for call in calls) == 3)
        for refused in (call.result() for call in calls if call.done()):
            error = error_of(refused, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
        error_of(await harness.http.post("/detokenize", json={"tokens": [5] * LONG}), 429)

        assert (await harness.complete(prompt="x" * LONG, max_tokens=1)).status_code == 200
        short = await harness.http.post("/tokenize", json={"prompt": "hi"})
        assert short.json()["count"] == 2, "a short text waits for nobody"
        assert slow.running == 1

        slow.go_on.set()
        answers = await asyncio.gather(*calls)
        assert sum(answer.status_code == 200 for answer in answers) == MAX_CALLS
        assert slow.most_running == 1
        assert (await harness.http.post("/tokenize", json=body)).json()["count"] == LONG + 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x" * MAX_TEXT_BYTES}, "prompt"),
        ("/tokenize", {"prompt": "é" * (MAX_TEXT_BYTES // 2)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * MAX_TEXT_BYTES}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}] * 3, "tools": ["x" * MAX_TEXT_BYTES]},
         "tools"),
        ("/tokenize", {"prompt": "x" * (MAX_TOKENS + 1), "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"tokens": [5] * (MAX_TOKENS + 1)}, "tokens"),
    ],
    ids=["bytes", "utf8", "messages", "tools", "strs", "tokens"],
)  # fmt: skip
async def test_longer_texts_than_are_tokenised_are_refused_by_name(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with serving(roomy_engine()) as harness:
        error = error_of(await harness.http.post(path, json=body))
        assert (error["param"], error["code"]) == (param, "invalid_value")


async def test_a_template_that_multiplies_a_text_does_not_pass_its_bound() -> None:
    tokenizer = make_tokenizer(chat_template="{% for i in range(9) %}{{ messages[0].content }}{% endfor %}")
    async with serving(roomy_engine(), tokenizer=tokenizer) as harness:
        body = {"messages": [{"role": "user", "content": "x" * (MAX_TEXT_BYTES // 8)}]}
        assert error_of(await harness.http.post("/tokenize", json=body))["param"] == "messages"


async def test_the_longest_texts_are_tokenised() -> None:
    async with serving(roomy_engine()) as harness:
        longest = {"prompt": "x" * (MAX_TEXT_BYTES - 2)}  # less its quotes
        assert (await harness.http.post("/tokenize", json=longest)).json()["count"] == MAX_TEXT_BYTES - 2
        strs = {"prompt": "x" * MAX_TOKENS, "return_token_strs": True}
        assert len((await harness.http.post("/tokenize", json=strs)).json()["token_strs"]) == MAX_TOKENS
        text = (await harness.http.post("/detokenize", json={"tokens": tokens_of("x") * MAX_TOKENS})).json()
        assert text["prompt"] == "x" * MAX_TOKENS


# --- conversations -----------------------------------------------------------------------------------------


def call(arguments: str = "") -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "assistant", "tool_calls": [call()] * 100}] * 21, "2048 tool calls"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}] * 9, "8192 content parts"),
    ],
)
async def test_calls_and_parts_of_all_messages_are_bounded(messages: list[Any], words: str) -> None:
    async with serving(roomy_engine()) as harness:
        error = error_of(await harness.chat(messages=messages))
        assert error["param"] == "messages" and words in error["message"]
        assert (await harness.chat(messages=messages[:5], max_tokens=1)).status_code == 200


SMALL = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "inline"),
    [
        ({"messages": [SMALL, {"role": "assistant", "tool_calls": [call()]}]}, True),
        ({"messages": [{"role": "user", "content": "x" * LONG}]}, False),
        ({"messages": [{"role": "assistant", "tool_calls": [call("x" * LONG)]}]}, False),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "x" * LONG}]}, False),
        ({"messages": [{"role": "user", "content": "a", "name": "x" * LONG}]}, False),
        ({"messages": [{"role": "assistant", "tool_calls": [call()] * 100}] * 2}, False),
        ({"messages": [SMALL] * 500}, False),
        ({"messages": [SMALL], "tools": [TOOL]}, False),
        ({"messages": [SMALL], "tools": [TOOL], "tool_choice": "none"}, True),
    ],
    ids=["small", "content", "arguments", "reasoning", "name", "calls", "messages", "tools", "no-tools"],
)
async def test_a_large_conversation_is_written_beside_the_loop(
    body: dict[str, Any], inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m.content }}{% endfor %}a{% if tools %}b{% endif %}"
    )
    threads: list[threading.Thread] = []
    render = tokenizer.render_chat

    def watched(*arguments: Any, **options: Any) -> str:
        threads.append(threading.current_thread())
        return render(*arguments, **options)

    monkeypatch.setattr(tokenizer, "render_chat", watched)
    async with serving(roomy_engine(), tokenizer=tokenizer) as harness:
        assert (await harness.chat(max_tokens=1, **body)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [inline]


async def test_large_conversations_are_written_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are Python: of many threads that run it the event loop would have to wait for each."""
    tokenizer = make_tokenizer()
    go_on = threading.Event()
    running: list[str] = []
    most_running = 0

    def render(messages: Any, **options: Any) -> str:
        nonlocal most_running
        running.append("one")
        most_running = max(most_running, len(running))
        assert go_on.wait(30)
        running.pop()
        return "hi"

    monkeypatch.setattr(tokenizer, "render_chat", render)
    async with serving(roomy_engine(), tokenizer=tokenizer) as harness:
        large = [{"role": "user", "content": "x" * LONG}]
        calls = [asyncio.create_task(harness.chat(messages=large, max_tokens=1)) for _ in range(5)]
        try:
            await until(lambda: len(running) > 0)
            await asyncio.sleep(0.2)  # the others have time to come
        finally:
            go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 5
        assert most_running == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_tools_are_not_as_long_as_a_body_can_be(path: str) -> None:
    tokenizer = make_tokenizer("{{ messages[0].content }}{% if tools %}b{% endif %}")
    async with serving(roomy_engine(), tokenizer=tokenizer) as harness:

        def tools(size: int) -> list[dict[str, Any]]:
            return [{"type": "function", "function": {"name": "f", "description": "x" * size}}]

        body = {"messages": [SMALL], "tools": tools(MAX_FIELD_BYTES)}
        error = error_of(await harness.http.post(path, json=body))
        assert (error["param"], error["code"]) == ("tools", "invalid_value")
        assert str(MAX_FIELD_BYTES) in error["message"]
        body["tools"] = tools(MAX_FIELD_BYTES - 200)
        assert (await harness.http.post(path, json=body)).status_code == 200


# --- answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "factor", "param"),
    [
        ({"prompt_logprobs": 3}, 4, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, 2, "logprobs"),
        ({"echo": True, "logprobs": 0, "stream": True}, 1, "logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 5}, 8, "prompt_logprobs"),
        ({"n": 8, "prompt_logprobs": 1}, 16, "prompt_logprobs"),
        ({"prompts": 4, "n": 2, "prompt_logprobs": 1}, 16, "prompt_logprobs"),
    ],
)
async def test_log_probabilities_of_prompts_are_bounded(
    body: dict[str, Any], factor: int, param: str
) -> None:
    longest = MAX_SCORES // factor
    num_prompts = body.pop("prompts", 1)
    async with serving(roomy_engine()) as harness:
        for excess in (1, 0):
            prompts = [[5] * (longest + excess)] * num_prompts
            response = await harness.complete(prompt=prompts, max_tokens=1, **body)
            if excess:
                error = error_of(response)
                assert (error["param"], error["code"]) == (param, "invalid_value")
                assert str(MAX_SCORES) in error["message"] and not harness.engine.requests
            else:
                assert response.status_code == 200
        plain = await harness.complete(prompt=[5] * 2 * MAX_SCORES, max_tokens=1, logprobs=20)
        assert plain.status_code == 200, "only what is told of the prompt counts"


@pytest.mark.parametrize(
    ("path", "body", "factor"),
    [
        ("completions", {"logprobs": 0}, 1),
        ("completions", {"logprobs": 3}, 4),
        ("completions", {"logprobs": 3, "stream": True}, 4),
        ("completions", {"prompt": [[5]] * 4, "n": 2, "logprobs": 1}, 16),
        ("completions", {"n": 8, "logprobs": 1, "echo": True, "prompt_logprobs": 20}, 16),
        ("chat/completions", {"logprobs": True}, 1),
        ("chat/completions", {"n": 2, "logprobs": True, "top_logprobs": 7}, 16),
        ("chat/completions", {"n": 2, "logprobs": True, "top_logprobs": 7, "stream": True}, 16),
    ],
)
@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_log_probabilities_of_generated_tokens_are_bounded(
    path: str, body: dict[str, Any], factor: int, limit: str
) -> None:
    longest = MAX_SCORES // factor
    given = {"prompt": [5]} if path == "completions" else {"messages": [SMALL]}
    async with serving(roomy_engine()) as harness:

        async def answer(**more: Any) -> httpx.Response:
            return await harness.http.post(f"/v1/{path}", json={**given, **more})

        error = error_of(await answer(**{**body, limit: longest + 1}))
        assert (error["param"], error["code"]) == ("logprobs", "invalid_value")
        assert f"{(longest + 1) * factor} log-probabilities" in error["message"]
        assert not harness.engine.requests
        assert (await answer(**{**body, limit: longest})).status_code == 200
        assert (await answer(**{limit: 10 * MAX_SCORES})).status_code == 200, "only log-probabilities count"
        error = error_of(await answer(**{**body, limit: 10**9}))
        assert error["code"] == "context_length_exceeded", "what cannot be generated is told first"


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"logprobs": True}, 262144),
        ({"logprobs": True, "stream": True}, 262144),
        ({"logprobs": True, "top_logprobs": 20}, 12483),
        ({"logprobs": True, "top_logprobs": 20, "n": 128}, 97),
    ],
)
async def test_a_chat_without_a_limit_generates_as_many_tokens_as_its_log_probabilities_allow(
    body: dict[str, Any], most: int
) -> None:
    async with serving(roomy_engine()) as harness:
        assert (await harness.chat(**body)).status_code == 200
        assert {request.params.max_tokens for request in harness.engine.requests} == {most}
        error = error_of(await harness.chat(**body, min_tokens=most + 1))
        assert error["param"] == "min_tokens" and f"the {most} tokens" in error["message"]
        harness.engine.requests.clear()
        prompt = (await harness.chat(n=2)).json()["usage"]["prompt_tokens"]
        assert [request.params.max_tokens for request in harness.engine.requests] == [10**7 - prompt] * 2
    async with serving(output=OUTPUT) as harness:
        assert (await harness.chat(**{**body, "n": 1})).status_code == 200
        [request] = harness.engine.requests
        assert request.params.max_tokens == 256 - prompt, "there is no more room"


async def test_an_answer_has_as_many_log_probabilities_as_it_may() -> None:
    info = engine_info(max_model_len=10**7, max_request_tokens=10**7)
    engine = FakeEngine(lambda request: tokens_of("x") * request.params.max_tokens, info=info)
    async with serving(engine) as harness:
        choices = (await harness.chat(logprobs=True, top_logprobs=20, n=128)).json()["choices"]
    assert len(choices) == 128 and {choice["finish_reason"] for choice in choices} == {"length"}
    told = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert len(told) == 128 * 97 and sum(1 + len(entry["top_logprobs"]) for entry in told) == 260736


async def test_a_chat_tells_its_prompt_once_whatever_n() -> None:
    async with serving(roomy_engine()) as harness:
        messages = [{"role": "user", "content": "x" * (MAX_SCORES // 2)}]
        assert error_of(await harness.chat(messages=messages, prompt_logprobs=1, max_tokens=1))
        answer = await harness.chat(messages=messages, prompt_logprobs=0, n=4, max_tokens=1)
        body = answer.json()
        assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"] > MAX_SCORES // 2


async def test_a_prompt_is_scored_once_and_told_in_each_of_its_choices() -> None:
    body: dict[str, Any] = {
        "prompt": ["ab", "c"], "echo": True, "logprobs": 1, "prompt_logprobs": 2, "max_tokens": 3, "seed": 7,
    }  # fmt: skip
    async with serving(output=OUTPUT) as harness:
        choices = (await harness.complete(n=3, **body)).json()["choices"]
        asked = [request.params.prompt_logprobs for request in harness.engine.requests]
        ones = (await harness.complete(n=1, **body)).json()["choices"]
    assert asked == [2, None, None, 2, None, None]
    for index, choice in enumerate(choices):
        assert {**choice, "index": 0} == {**ones[index // 3], "index": 0}


async def test_a_chat_tells_the_scores_of_its_first_choice_whoever_is_first() -> None:
    last = asyncio.Event()
    engine = FakeEngine(
        lambda request: OUTPUT, gate=lambda request, step: last if request.request_id.endswith("-0") else None
    )
    async with serving(engine) as harness:
        answer = asyncio.create_task(harness.chat(n=2, prompt_logprobs=0, max_tokens=1))
        await until(lambda: engine.running == 1)
        last.set()
        body = (await answer).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "inline"),
    [
        ("completions", {"n": 3, "max_tokens": 3, "logprobs": 20, "echo": True}, True),
        ("completions", {"prompt": [5] * 1000, "prompt_logprobs": 20}, False),
        ("completions", {"prompt": [5] * 1000, "echo": True, "logprobs": 20}, False),
        ("completions", {"prompt": [5] * 5000, "echo": True, "n": 4}, False),
        ("completions", {"prompt": [5] * 5000, "return_token_ids": True, "n": 4}, False),
        ("completions", {"max_tokens": 1000, "logprobs": 20}, False),
        ("completions", {"max_tokens": 9000}, False),
        ("chat/completions", {"n": 3, "max_tokens": 3}, True),
        ("chat/completions", {"max_tokens": 1000, "logprobs": True, "top_logprobs": 20}, False),
    ],
)
async def test_a_large_answer_is_written_beside_the_loop(
    path: str, body: dict[str, Any], inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    for kind in (CompletionFormat, ChatFormat):

        def watched(*arguments: Any, response: Any = kind.response) -> bytes:
            threads.append(threading.current_thread())
            return bytes(response(*arguments))

        monkeypatch.setattr(kind, "response", watched)
    info = engine_info(max_model_len=10**7, max_request_tokens=10**7)
    engine = FakeEngine(lambda request: tokens_of("x") * request.params.max_tokens, info=info)
    given = {"prompt": "hi"} if path == "completions" else {"messages": [SMALL]}
    async with serving(engine) as harness:
        response = await harness.http.post(f"/v1/{path}", json={**given, "max_tokens": 1, **body})
        assert response.status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [inline]


async def test_large_pieces_of_a_stream_are_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    chunk = CompletionFormat.chunk

    def watched(*arguments: Any) -> bytes | None:
        threads.append(threading.current_thread())
        return chunk(*arguments)

    monkeypatch.setattr(CompletionFormat, "chunk", watched)
    async with serving(roomy_engine()) as harness:
        body = {"prompt": [5] * 1000, "echo": True, "logprobs": 20, "max_tokens": 3, "stream": True}
        chunks = events_of(await harness.complete(**body))
    assert [thread is threading.main_thread() for thread in threads] == [False, True, True]
    told = [
        token
        for one in chunks
        for choice in one["choices"]
        if choice["logprobs"]
        for token in choice["logprobs"]["tokens"]
    ]
    assert len(told) == 1003
