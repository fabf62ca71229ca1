"""Reasoning and tool calls in DeepSeek's marks: the parser alone, and both modes of the chat endpoint."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from service.chat_output import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    SEPARATOR,
    TOOL_MARKS,
    CallArguments,
    CallStart,
    ChatMarks,
    ChatOutput,
    Content,
    Reasoning,
)
from tests.service.fake_engine import FakeEngine, engine_info
from tests.service.harness import Harness, error_of, events_of, make_tokenizer, serving, tokens_of

ARGUMENTS = '{"city": "Köln", "note": "a ``` b"}'
V3_CALL = f"{CALL}function{SEPARATOR}get_weather\n```json\n{ARGUMENTS}\n```{CALL_END}"
V31_CALL = f"{CALL}get_time{SEPARATOR}{{}}{CALL_END}"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments }}>{% endfor %};{% endfor %}"
    "{% if thinking %}<think>\n{% endif %}"
)


def parse(pieces: Sequence[str], **options: bool) -> dict[str, Any]:
    output = ChatOutput(**{"reasoning": True, "tools": True, **options})
    parts = [part for piece in pieces for part in output.push(piece)] + output.finish()
    calls = [[part.name, ""] for part in parts if isinstance(part, CallStart)]
    for part in parts:
        if isinstance(part, CallArguments):
            calls[part.call][1] += part.text
    return {
        "reasoning": "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "content": "".join(part.text for part in parts if isinstance(part, Content)),
        "calls": [tuple(call) for call in calls],
    }


@pytest.mark.parametrize(
    ("text", "options", "reasoning", "content", "calls"),
    [
        ("plain <b> text", {}, "", "plain <b> text", []),
        ("<think>\nhm\n</think>\n\nyes", {}, "\nhm\n", "\n\nyes", []),
        (" \n<think>hm</think>yes", {}, "hm", "yes", []),
        ("hm</think>yes", {"thinking": True}, "hm", "yes", []),
        ("hm</think>yes", {}, "", "hm</think>yes", []),
        ("x<think>hm</think>", {}, "", "x<think>hm</think>", []),
        ("<think>unfinished </thin", {}, "unfinished </thin", "", []),
        ("<think>a</think>", {"reasoning": False}, "", "<think>a</think>", []),
        ("<thin", {}, "", "<thin", []),
        (
            f"Hi.{CALLS}{V3_CALL}\n{V31_CALL}{CALLS_END}",
            {},
            "",
            "Hi.",
            [("get_weather", ARGUMENTS), ("get_time", "{}")],
        ),
        (f"<think>{CALLS}</think>{CALLS}{V31_CALL}", {}, CALLS, "", [("get_time", "{}")]),
        (f"{CALLS}{V31_CALL}{CALLS_END}bye", {"tools": False}, "", f"{CALLS}{V31_CALL}{CALLS_END}bye", []),
        (f"{CALLS}{V31_CALL}{CALLS_END}bye", {}, "", "bye", [("get_time", "{}")]),
        (f'{CALLS}{CALL}function{SEPARATOR}{{"a": 1}}{CALL_END}', {}, "", "", [("function", '{"a": 1}')]),
        (f'{CALLS}{CALL}f{SEPARATOR}{{"cut": ', {}, "", "", [("f", '{"cut":')]),
        (f"{CALLS}{CALL}nameless", {}, "", f"{CALL}nameless", []),
        (f"{CALLS} stray", {}, "", "stray", []),
    ],
)
def test_marks(
    text: str, options: dict[str, bool], reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parse([text], **options) == {"reasoning": reasoning, "content": content, "calls": calls}
    assert parse(list(text), **options) == parse([text], **options)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_result_does_not_depend_on_the_pieces(data: st.DataObject) -> None:
    words = [
        "<think>",
        "</think>",
        *TOOL_MARKS,
        "function",
        "\n```json\n",
        "```",
        "{",
        "}",
        " ",
        "\n",
        "x",
        "<",
        CALL[:2],
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(pieces) == parse([text])


def test_auto_needs_every_mark_as_a_token() -> None:
    assert ChatMarks.choose("auto", "auto", {"<think>", "</think>", CALLS}.__contains__) == (True, False)
    assert ChatMarks.choose("none", "auto", lambda mark: True) == (False, True)
    assert ChatMarks.choose("deepseek", "deepseek", lambda mark: False) == (True, True)
    assert ChatMarks(True, False).for_prompt("x", with_tools=True) is not None
    assert ChatMarks(False, True).for_prompt("x", with_tools=False) is None


def speaking(text: str, num_accepted: int = 0) -> FakeEngine:
    info = engine_info(max_model_len=1024, max_request_tokens=1024)
    return FakeEngine(lambda request: [*tokens_of(text), 1], accepts=lambda step: num_accepted, info=info)


async def both_modes(harness: Harness, **body: Any) -> dict[str, Any]:
    """The choice of the whole answer, after checking that a stream adds up to the same."""
    whole = (await harness.chat(**body)).json()
    ChatCompletion.model_validate(whole)
    (choice,) = whole["choices"]
    message: dict[str, Any] = choice["message"]
    told = {"content": "", "reasoning_content": "", "calls": {}}
    reasons = []
    for chunk in events_of(await harness.chat(**body, stream=True)):
        ChatCompletionChunk.model_validate(chunk)
        for part in chunk["choices"]:
            delta = part["delta"]
            reasons.append(part["finish_reason"])
            for field in ("content", "reasoning_content"):
                told[field] += delta.get(field) or ""
            for call in delta.get("tool_calls", ()):
                state = told["calls"].setdefault(call["index"], ["", "", ""])
                function = call["function"]
                state[0] += call.get("id", "")
                state[1] += function.get("name", "")
                state[2] += function["arguments"]
    assert told["content"] == (message["content"] or "")
    assert told["reasoning_content"] == message.get("reasoning_content", "")
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    assert [(name, arguments) for _, name, arguments in told["calls"].values()] == calls
    assert all(call_id.startswith("call_") for call_id, _, _ in told["calls"].values())
    assert [reason for reason in reasons if reason] == [choice["finish_reason"]]
    return dict(choice)


@pytest.mark.parametrize("num_accepted", [0, 3])
async def test_a_tool_call_is_told_in_both_modes(num_accepted: int) -> None:
    text = f"<think>hm</think>Let me see.{CALLS}{V3_CALL}{CALLS_END}"
    options = {"tool_call_parser": "deepseek", "reasoning_parser": "deepseek"}
    async with serving(
        speaking(text, num_accepted), tokenizer=make_tokenizer(TEMPLATE), **options
    ) as harness:
        choice = await both_modes(harness, tools=[TOOL], max_tokens=500)
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] == "Let me see."
        assert message["reasoning_content"] == "hm"
        (call,) = message["tool_calls"]
        assert call["type"] == "function" and len(call["id"]) == 29
        assert json.loads(call["function"]["arguments"]) == json.loads(ARGUMENTS)
        none = await both_modes(harness, tools=[TOOL], tool_choice="none", max_tokens=500)
        assert none["finish_reason"] == "stop" and CALLS in none["message"]["content"]


async def test_content_is_null_beside_calls_and_a_cut_call_ends_with_length() -> None:
    async with serving(
        speaking(f"{CALLS}{V31_CALL}"), tokenizer=make_tokenizer(TEMPLATE), tool_call_parser="deepseek"
    ) as harness:
        choice = await both_modes(harness, tools=[TOOL], max_tokens=500)
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
        cut = len(tokens_of(f"{CALLS}{CALL}get_time{SEPARATOR}{{"))
        choice = await both_modes(harness, tools=[TOOL], max_tokens=cut)
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{"


async def test_reasoning_begins_in_the_prompt_where_the_template_opens_it() -> None:
    async with serving(
        speaking("hm</think>yes"), tokenizer=make_tokenizer(TEMPLATE), reasoning_parser="deepseek"
    ) as harness:
        choice = await both_modes(harness, chat_template_kwargs={"thinking": True}, max_tokens=500)
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "yes")
        choice = await both_modes(harness, max_tokens=500)
        assert "reasoning_content" not in choice["message"]
        assert choice["message"]["content"] == "hm</think>yes"


async def test_tools_and_their_answers_reach_the_template() -> None:
    messages = [
        {"role": "user", "content": "w?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    async with serving(speaking("ok"), tokenizer=make_tokenizer(TEMPLATE)) as harness:
        await harness.chat(messages=messages, tools=[TOOL])
        prompt = bytes(token - 2 for token in harness.engine.requests[0].prompt_token_ids).decode()
        assert prompt == "[get_weather]user:w?;assistant:None<get_weather {}>;tool:rain;"
        await harness.chat(messages=messages, tools=[TOOL], tool_choice="none")
        prompt = bytes(token - 2 for token in harness.engine.requests[1].prompt_token_ids).decode()
        assert prompt.startswith("user:w?")


def answered(**fields: Any) -> list[dict[str, Any]]:
    """A conversation with an answer of OpenAI's, pasted back as it came but for ``fields``."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    off = {"refusal": None, "audio": None, "function_call": None, "annotations": []}
    calls = [{**call, "index": 0}, {**call, "index": 1}]
    answer = {"role": "assistant", "content": "a", "tool_calls": calls, **off, **fields}
    return [answer, {"role": "tool", "tool_call_id": "c", "content": "r"}, {"role": "user", "content": "q"}]


async def test_an_answer_pasted_back_is_taken_and_its_empty_fields_change_nothing() -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    async with serving(speaking("ok"), tokenizer=make_tokenizer(template)) as harness:
        plain, *others = answered()
        plain = {
            "role": "assistant",
            "content": "a",
            "tool_calls": [dict(call) for call in plain["tool_calls"]],
        }
        for call in plain["tool_calls"]:
            del call["index"]
        for messages in (answered(), [plain, *others], answered(annotations=None)):
            assert (await harness.chat(messages=messages)).status_code == 200
        first, *rest = (request.prompt_token_ids for request in harness.engine.requests)
        assert rest == [first, first]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"refusal": "no"}, "refusal", "unsupported_parameter"),
        ({"audio": {"id": "x"}}, "audio", "unsupported_parameter"),
        ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
        ({"annotations": [{"type": "url_citation"}]}, "annotations", "unsupported_parameter"),
        (
            {
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}, "index": 1}
                ]
            },
            "tool_calls[0].index",
            "invalid_value",
        ),
    ],
)
async def test_fields_of_answers_that_are_not_off_are_refused(
    fields: dict[str, Any], param: str, code: str
) -> None:
    async with serving(speaking("ok"), tokenizer=make_tokenizer(TEMPLATE)) as harness:
        error = error_of(await harness.chat(messages=answered(**fields)))
        assert (error["param"], error["code"]) == (f"messages[0].{param}", code)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            "tool_choice",
            "unsupported_parameter",
        ),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
            "tools[0].function.strict",
            "invalid_value",
        ),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_parameter"),
        ({"tools": [TOOL] * 129}, "tools", "invalid_value"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "invalid_value"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(body: dict[str, Any], param: str, code: str) -> None:
    async with serving(speaking("ok"), tokenizer=make_tokenizer(TEMPLATE)) as harness:
        error = error_of(await harness.chat(**body))
        assert (error["param"], error["code"]) == (param, code)


async def test_tools_are_refused_where_the_template_has_no_place_for_them() -> None:
    async with serving(speaking("ok")) as harness:
        error = error_of(await harness.chat(tools=[TOOL]))
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert (await harness.chat(tools=[TOOL], tool_choice="none")).status_code == 200
