"""What a request's fields become in the engine, and what the engine's answer becomes in the response."""

from __future__ import annotations

from typing import Any

import pytest

from engine.types import Request, SamplingParams
from service.prompts import choice_seed
from tests.service.fake_engine import FakeEngine, engine_info
from tests.service.harness import (
    Harness,
    error_of,
    events_of,
    make_tokenizer,
    serving,
    text_by_choice,
    tokens_of,
)

EOS = 1
HELLO = [*tokens_of("hello"), EOS]


async def params_of(body: dict[str, Any], *, chat: bool = False) -> SamplingParams:
    """What the engine was asked for."""
    async with serving(output=HELLO) as harness:
        response = await (harness.chat if chat else harness.complete)(**body)
        assert response.status_code == 200, response.text
        return harness.engine.requests[0].params


async def test_defaults_are_openais() -> None:
    expected = SamplingParams(max_tokens=16, stop_token_ids=(EOS,))
    assert await params_of({}) == expected
    assert (await params_of({}, chat=True)).temperature == 1.0


FIELDS: dict[str, tuple[Any, str, Any]] = {
    "max_tokens": (3, "max_tokens", 3),
    "max_completion_tokens": (4, "max_tokens", 4),
    "min_tokens": (2, "min_tokens", 2),
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (5, "top_k", 5),
    "min_p": (0.25, "min_p", 0.25),
    "seed": (-(2**63), "seed", -(2**63)),
    "presence_penalty": (-2, "presence_penalty", -2.0),
    "frequency_penalty": (2, "frequency_penalty", 2.0),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "logit_bias": ({"5": -100, "7": 1.5}, "logit_bias", {5: -100.0, 7: 1.5}),
    "stop_token_ids": ([9, 7], "stop_token_ids", (EOS, 7, 9)),
    "ignore_eos": (True, "stop_token_ids", ()),
}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("field", FIELDS)
async def test_each_field_reaches_the_engine(field: str, chat: bool) -> None:
    value, name, expected = FIELDS[field]
    assert getattr(await params_of({field: value}, chat=chat), name) == expected


ALL_FIELDS = [
    *FIELDS, "model", "n", "stream", "stream_options", "stop", "include_stop_str_in_output",
    "skip_special_tokens", "user", "priority", "return_token_ids", "logprobs", "add_special_tokens",
]  # fmt: skip


@pytest.mark.parametrize("chat", [False, True])
async def test_c8_explicit_null_is_the_same_as_absent(chat: bool) -> None:
    own = ["top_logprobs", "add_generation_prompt", "chat_template_kwargs"] if chat else ["echo"]
    nulls = dict.fromkeys([*ALL_FIELDS, *own])
    assert await params_of(nulls, chat=chat) == await params_of({}, chat=chat)


@pytest.mark.parametrize(
    ("body", "field", "expected"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-6}, "temperature", 0.0),
        ({"temperature": 1e-5}, "temperature", 1e-5),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 300}, "top_k", 0),
        ({"top_k": 299}, "top_k", 299),
        ({"logprobs": 0}, "logprobs", 0),
        ({"logprobs": None}, "logprobs", None),
        ({"ignore_eos": True, "stop_token_ids": [1, 5]}, "stop_token_ids", (1, 5)),
    ],
)
async def test_values_with_a_meaning_of_their_own(body: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(await params_of(body), field) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3), ({"logprobs": False}, None)],
)
async def test_chat_logprobs(body: dict[str, Any], expected: int | None) -> None:
    assert (await params_of(body, chat=True)).logprobs == expected


async def test_e15_end_of_sequence_is_the_union_of_engine_and_tokenizer() -> None:
    engine = FakeEngine(lambda request: HELLO, info=engine_info(eos_token_ids=(7, 9)))
    async with serving(engine) as harness:
        await harness.complete()
        assert engine.requests[0].params.stop_token_ids == (1, 7, 9)
        await harness.complete(ignore_eos=True, stop_token_ids=[20])
        assert engine.requests[1].params.stop_token_ids == (20,)


async def test_priority_and_arrival_reach_the_engine() -> None:
    async with serving(output=HELLO) as harness:
        await harness.complete(priority=-3)
        request = harness.engine.requests[0]
        assert request.priority == -3 and request.arrival_time > 0


# --- prompts and choices -----------------------------------------------------------------------------------


def number_in_prompt(request: Request) -> list[int]:
    """Repeats the prompt's last token, so that a choice tells which prompt it belongs to."""
    return [request.prompt_token_ids[-1], EOS]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[99], [100], [101]]])
async def test_c13_choices_are_prompt_major(prompts: list[Any], stream: bool) -> None:
    async with serving(FakeEngine(number_in_prompt)) as harness:
        response = await harness.complete(prompt=prompts, n=2, stream=stream)
        if stream:
            texts = text_by_choice(events_of(response))
        else:
            texts = {choice["index"]: choice["text"] for choice in response.json()["choices"]}
            assert list(texts) == list(range(6))
        assert texts == {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}


async def test_c13_one_bad_prompt_refuses_them_all() -> None:
    async with serving(output=HELLO) as harness:
        for prompts in (["a", ""], [[5], [300]], ["a", "a" * 300]):
            assert error_of(await harness.complete(prompt=prompts))["param"] == "prompt"
        assert not harness.engine.requests


async def test_c13_usage_counts_each_prompt_once() -> None:
    async with serving(output=HELLO) as harness:
        usage = (await harness.complete(prompt=["a", "bc"], n=3)).json()["usage"]
        assert usage["prompt_tokens"] == 3 and usage["completion_tokens"] == 6 * len(HELLO)
        assert usage["total_tokens"] == 3 + 6 * len(HELLO)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * 2


async def test_b21_greedy_choices_are_equal_and_equal_to_n_1() -> None:
    async with serving(FakeEngine(lambda request: HELLO, accepts=lambda step: step % 4)) as harness:
        one = (await harness.complete(temperature=0)).json()["choices"][0]["text"]
        three = [choice["text"] for choice in (await harness.complete(temperature=0, n=3)).json()["choices"]]
        assert three == [one] * 3


async def test_b8_seeds_of_choices() -> None:
    async with serving(output=HELLO) as harness:
        await harness.complete(prompt=["a", "b"], n=3, seed=7)
        seeds = [request.params.seed for request in harness.engine.requests]
        assert seeds[0] == seeds[3] == 7, "the first choice of each prompt has the request's own seed"
        assert seeds[:3] == seeds[3:] and len(set(seeds)) == 3
        harness.engine.requests.clear()
        await harness.complete(n=2)
        assert [request.params.seed for request in harness.engine.requests] == [None, None]


def test_b8_derived_seeds_are_int64_and_distinct() -> None:
    for seed in (0, 7, -1, 2**63 - 1, -(2**63)):
        derived = [choice_seed(seed, i) for i in range(128)]
        assert derived[0] == seed and len(set(derived)) == 128
        assert all(value is not None and -(2**63) <= value < 2**63 for value in derived)
    # Output of the published SplitMix64 for state 0.
    assert choice_seed(0, 1) == 0xE220A8397B1DCDAF - 2**64


async def test_c14_a_prompt_is_tokenised_as_it_is() -> None:
    async with serving(output=HELLO, tokenizer=make_tokenizer(add_bos_token=True)) as harness:
        await harness.complete(prompt="<s>a")
        assert harness.engine.requests[-1].prompt_token_ids == [0, 0, *tokens_of("a")]
        await harness.complete(prompt="<s>a", add_special_tokens=False)
        assert harness.engine.requests[-1].prompt_token_ids == [0, *tokens_of("a")]


async def test_c14_a_conversation_has_one_bos_and_is_counted_as_rendered() -> None:
    tokenizer = make_tokenizer(add_bos_token=True)
    async with serving(output=HELLO, tokenizer=tokenizer) as harness:
        response = await harness.chat(messages=[{"role": "user", "content": "hi"}])
        expected = [0, *tokens_of("[user]hi[assistant]")]
        assert harness.engine.requests[0].prompt_token_ids == expected
        assert response.json()["usage"]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize(
    ("body", "rendered"),
    [
        ({"messages": [{"role": "developer", "content": "d"}]}, "[system]d[assistant]"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": None}]},
            "[assistant]a[assistant]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "xy"]}]},
            "[user]x\ny[assistant]",
        ),
        ({"add_generation_prompt": False}, "[user]hi"),
        ({"chat_template_kwargs": {"suffix": "!"}}, "[user]hi[assistant]!"),
    ],
)
async def test_conversations_are_rendered_by_the_template(body: dict[str, Any], rendered: str) -> None:
    async with serving(output=HELLO) as harness:
        assert (await harness.chat(**body)).status_code == 200
        assert harness.engine.requests[0].prompt_token_ids == [0, *tokens_of(rendered)]


async def test_e15_without_a_chat_template_chat_tells_the_remedy_and_completions_work() -> None:
    async with serving(output=HELLO, tokenizer=make_tokenizer(chat_template=None)) as harness:
        error = error_of(await harness.chat())
        assert error["param"] == "messages" and "/v1/completions" in error["message"]
        assert (await harness.complete()).status_code == 200


async def test_e15_a_template_that_raises_is_400() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    async with serving(output=HELLO, tokenizer=make_tokenizer(chat_template=template)) as harness:
        assert "roles must alternate" in error_of(await harness.chat())["message"]


# --- answers -----------------------------------------------------------------------------------------------


async def test_echo_puts_the_prompt_before_each_choice() -> None:
    async with serving(output=HELLO) as harness:
        for prompt, text in (("say ", "say hello"), (tokens_of("say "), "say hello")):
            response = await harness.complete(prompt=prompt, echo=True, n=2)
            assert [choice["text"] for choice in response.json()["choices"]] == [text] * 2
            streamed = await harness.complete(prompt=prompt, echo=True, n=2, stream=True)
            assert text_by_choice(events_of(streamed)) == {0: text, 1: text}


async def test_echoed_prompt_never_stops_the_choice() -> None:
    async with serving(output=HELLO) as harness:
        choice = (await harness.complete(prompt="stop st", echo=True, stop=["stop", "the"])).json()[
            "choices"
        ][0]
        assert (choice["text"], choice["finish_reason"]) == ("stop sthello", "stop")


async def test_token_ids_are_returned_on_request() -> None:
    async with serving(output=HELLO) as harness:
        choice = (await harness.complete(return_token_ids=True)).json()["choices"][0]
        assert choice["token_ids"] == HELLO and choice["prompt_token_ids"] == tokens_of("hi")
        body = (await harness.chat(return_token_ids=True)).json()
        assert body["choices"][0]["token_ids"] == HELLO and body["prompt_token_ids"][0] == 0
        for call in (harness.complete, harness.chat):
            chunks = events_of(await call(return_token_ids=True, stream=True))
            ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])]
            assert ids == HELLO
        assert "token_ids" not in (await harness.complete()).json()["choices"][0]


async def test_special_tokens_are_left_out_unless_asked_for() -> None:
    output = [*tokens_of("a"), 0, *tokens_of("b"), EOS]
    async with serving(output=output) as harness:
        for body, text in (
            ({}, "ab"),
            ({"skip_special_tokens": False}, "a<s>b"),
            ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<s>b</s>"),
        ):
            assert (await harness.complete(**body)).json()["choices"][0]["text"] == text


async def completion_logprobs(harness: Harness, **body: Any) -> dict[str, Any]:
    logprobs = (await harness.complete(**body)).json()["choices"][0]["logprobs"]
    return dict(logprobs)


async def test_completion_logprobs_have_one_finite_entry_per_token() -> None:
    output = [*tokens_of("a", b"\xf0\x9f", b"\x98\x80"), EOS]
    async with serving(output=output) as harness:
        logprobs = await completion_logprobs(harness, logprobs=2)
        assert logprobs["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "</s>"]
        assert logprobs["token_logprobs"] == [-0.5] * 4
        assert logprobs["text_offset"] == [0, 1, 1, 2]
        assert logprobs["top_logprobs"][0] == {"\0": 0.0, "\x01": -9999.0, "a": -0.5}
        assert (await completion_logprobs(harness, logprobs=0))["top_logprobs"][0] == {"a": -0.5}
        assert (await harness.complete()).json()["choices"][0]["logprobs"] is None


async def test_chat_logprobs_have_bytes() -> None:
    async with serving(output=[*tokens_of(b"\xf0\x9f", b"\x98\x80"), EOS]) as harness:
        body = (await harness.chat(logprobs=True, top_logprobs=2)).json()
        entries = body["choices"][0]["logprobs"]["content"]
        assert bytes(entries[0]["bytes"] + entries[1]["bytes"]).decode() == "😀"
        assert entries[0]["logprob"] == -0.5
        assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [0.0, -9999.0]
        assert (await harness.chat()).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("chat", [False, True])
async def test_streamed_logprobs_are_those_of_the_whole_answer(chat: bool) -> None:
    engine = FakeEngine(lambda request: HELLO, accepts=lambda step: step % 4)
    async with serving(engine) as harness:
        call = harness.chat if chat else harness.complete
        asked = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        for stop in (None, "lo"):
            whole = (await call(**asked, stop=stop)).json()["choices"][0]["logprobs"]
            joined: dict[str, list[Any]] = {}
            for chunk in events_of(await call(**asked, stop=stop, stream=True)):
                for choice in chunk["choices"]:
                    for key, value in (choice["logprobs"] or {}).items():
                        joined.setdefault(key, []).extend(value or [])
            assert joined == {key: value or [] for key, value in whole.items()}
