"""What is refused, with which status and field; and that the server is none the worse for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from service import json_body
from service.errors import ApiError
from service.schemas import ChatBody, CompletionBody
from service.unsupported import NEUTRAL_VALUES
from tests.service.fake_engine import FakeEngine, engine_info
from tests.service.harness import Connection, Harness, error_of, make_tokenizer, serving, tokens_of, until

OUTPUT = tokens_of("ok")
PATHS = ("/v1/completions", "/v1/chat/completions")
JSON = {"content-type": "application/json"}


async def refused(harness: Harness, path: str, raw: bytes | str, **headers: str) -> dict[str, Any]:
    """The error of a raw body, which must not reach the engine."""
    content = raw if isinstance(raw, bytes) else raw.encode()
    response = await harness.http.post(path, content=content, headers={**JSON, **headers})
    assert 400 <= response.status_code < 500, response.text
    error = error_of(response, response.status_code)
    assert not harness.engine.requests
    return error


async def still_serves(harness: Harness) -> None:
    response = await harness.complete(max_tokens=2)
    assert response.json()["choices"][0]["text"] == "ok"


DEGENERATE = [
    ("stop", ""), ("stop", [""]), ("stop", [None]), ("stop", 3), ("stop", ["a"] * 17),
    ("stop", ["a", "b" * 1025]), ("n", 0), ("n", -1), ("n", True), ("n", 10**6), ("n", 1.0), ("n", "1"),
    ("top_p", 0), ("top_p", -1), ("top_p", 1.5), ("top_p", "1"), ("temperature", -1), ("temperature", 1e30),
    ("temperature", 2.1), ("temperature", True), ("min_p", -0.1), ("min_p", 1.1), ("top_k", -5),
    ("top_k", 1.5), ("top_k", 2**31), ("repetition_penalty", 0), ("repetition_penalty", -1),
    ("repetition_penalty", 1e6), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("max_tokens", -1),
    ("max_tokens", 0), ("max_tokens", 1.5), ("max_completion_tokens", 0), ("min_tokens", -1),
    ("min_tokens", 17), ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.5), ("logit_bias", []),
    ("logit_bias", {"a": 1}), ("logit_bias", {"300": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 101}), ("logit_bias", {"5": "1"}), ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("stop_token_ids", [300]), ("stop_token_ids", [-1]), ("stop_token_ids", 5), ("stop_token_ids", [1] * 129),
    ("stream", 1), ("stream", "true"), ("stream_options", {"include_usage": True}), ("ignore_eos", "yes"),
    ("model", 3), ("model", ["fake"]), ("user", 3), ("priority", 2**31), ("priority", "high"),
]  # fmt: skip


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("field", "value"), DEGENERATE)
async def test_c4_degenerate_values_are_refused_naming_the_field(
    field: str, value: object, chat: bool
) -> None:
    async with serving(output=OUTPUT) as harness:
        call = harness.chat if chat else harness.complete
        body = {"max_tokens": 16, field: value}
        error = error_of(await call(**body))
        assert error["param"] == field
        assert not harness.engine.requests
        await still_serves(harness)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": 10**5}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("chat", {"logprobs": 1}, "logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ("completions", {"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
        ("completions", {"stream": True, "stream_options": 1}, "stream_options"),
    ],
)
async def test_c4_fields_of_one_endpoint(path: str, body: dict[str, Any], param: str) -> None:
    async with serving(output=OUTPUT) as harness:
        call = harness.chat if path == "chat" else harness.complete
        assert error_of(await call(**body))["param"] == param
        await still_serves(harness)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
async def test_c4_numbers_that_json_lacks_are_refused(literal: str) -> None:
    async with serving(output=OUTPUT) as harness:
        error = await refused(harness, PATHS[0], f'{{"prompt": "a", "temperature": {literal}}}')
        assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1e999"),
        ("seed", "-1e999"),
        ("n", "9" * 5000),
        ("logit_bias", '{"1": 1e999}'),
        ("stop_token_ids", "[1, 1e999]"),
    ],
)
async def test_c4_numbers_that_no_type_holds_are_refused_by_field(field: str, value: str) -> None:
    async with serving(output=OUTPUT) as harness:
        error = await refused(harness, PATHS[0], f'{{"prompt": "a", "{field}": {value}, "user": null}}')
        assert (error["code"], error["param"]) == ("invalid_value", field)
        assert "out of range" in error["message"] and "$" not in error["message"]
        error = await refused(harness, PATHS[0], f"[{value}]")
        assert error["code"] == "invalid_json"


DUPLICATES = [
    ('{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
    ('{"prompt": "a", "prompt": [5, 6]}', "prompt"),
    ('{"prompt": "a:b", "\\u0070rompt": [5]}', "prompt"),
    ('{"prompt": "a", "user": null, "user": null}', "user"),
    ('{"prompt": "a", "stop": "%s", "stop": "b"}' % ("x" * 300_000), "stop"),
    ('{"prompt": "a", "logit_bias": {"5": 1, "6": 1, "5": 2}}', "5"),
    ('{"prompt": "a", "stream": true, "stream_options": {"include_usage": true, "include_usage": false}}',
     "include_usage"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "role": "system"}]}',
     "role"),
    ('{"messages": [], "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": '
     '{"type": "object", "type": "array"}}}}', "type"),
]  # fmt: skip


@pytest.mark.parametrize("path", [*PATHS, "/tokenize"])
async def test_a_key_that_is_there_twice_is_refused_by_name(path: str) -> None:
    async with serving(output=OUTPUT) as harness:
        for raw, key in DUPLICATES:
            error = await refused(harness, path, raw)
            assert (error["code"], error["param"]) == ("invalid_value", key)
            assert error["message"] == f"{key}: the key is there twice in one object."
        same = {"prompt": '{"a": 1, "a": 2}', "user": "prompt", "stop": ["user:", "user:"]}
        assert (await harness.complete(**same)).status_code == 200, "the same key in a text, or elsewhere"


@pytest.mark.parametrize("key", ["05", "0005", "00", "+5", "5.0", "\u0665", ""])
async def test_a_token_id_has_one_spelling_as_a_key(key: str) -> None:
    async with serving(output=OUTPUT) as harness:
        assert error_of(await harness.complete(logit_bias={key: 1, "5": 2}))["param"] == "logit_bias"
        assert (await harness.complete(logit_bias={"0": 1, "5": 2})).status_code == 200


async def test_an_explicit_null_is_the_same_as_an_absent_field_everywhere() -> None:
    async with serving(output=OUTPUT) as harness:
        answer = await harness.http.post("/tokenize", json={"prompt": "a", "messages": None})
        assert answer.json()["count"] == 1
        parts = [{"type": "text", "text": "a", "cache_control": None}, {"type": "text", "text": "b"}]
        assert (await harness.chat(messages=[{"role": "user", "content": parts}])).status_code == 200
        [request] = harness.engine.requests
        assert request.prompt_token_ids == [0, *tokens_of("[user]a\nb[assistant]")]
        for part in ({"type": "text", "text": None}, {"type": None, "text": "a"}, {"type": "text", "x": "a"}):
            messages = [{"role": "user", "content": [part]}]
            assert error_of(await harness.chat(messages=messages))["param"] == "messages[0].content"


EMPTY = [
    ("", "prompt"), ([""], "prompt"), ([[]], "prompt"), ([], "prompt"), (["a", ""], "prompt"),
    ([[5], []], "prompt"), (None, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "param"), EMPTY)
async def test_c6_empty_prompts_are_refused_before_any_work(prompt: object, param: str) -> None:
    async with serving(output=OUTPUT) as harness:
        assert error_of(await harness.complete(prompt=prompt))["param"] == param
        assert not harness.engine.requests
        await still_serves(harness)


async def test_c6_empty_text_is_a_prompt_where_the_tokenizer_adds_a_token() -> None:
    async with serving(output=OUTPUT, tokenizer=make_tokenizer(add_bos_token=True)) as harness:
        assert (await harness.complete(prompt="", max_tokens=1)).status_code == 200
        assert harness.engine.requests[0].prompt_token_ids == [0]


async def test_c6_empty_conversations() -> None:
    async with serving(
        output=OUTPUT, tokenizer=make_tokenizer(chat_template="{{ messages[0].content }}")
    ) as h:
        for messages in ([], [{"role": "user", "content": ""}], [{"role": "user", "content": []}]):
            error = error_of(await h.http.post(PATHS[1], json={"messages": messages}))
            assert error["param"] == "messages"
    async with serving(output=OUTPUT) as harness:  # a template that writes something makes a prompt of it
        response = await harness.chat(messages=[{"role": "user", "content": ""}], max_tokens=2)
        assert response.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("path", PATHS)
async def test_c8_unknown_field_is_refused_on_both_endpoints(path: str) -> None:
    async with serving(output=OUTPUT) as harness:
        error = await refused(harness, path, '{"prompt": "a", "messages": [], "tempreture": 1}')
        assert error["code"] == "unknown_parameter" or error["param"] in ("messages", "prompt")
        call = harness.chat if "chat" in path else harness.complete
        error = error_of(await call(tempreture=1))
        assert (error["param"], error["code"]) == ("tempreture", "unknown_parameter")
        assert (await call(tempreture=None)).status_code == 200, "null is the same as absent"


@pytest.mark.parametrize("field", sorted(NEUTRAL_VALUES))
@pytest.mark.parametrize("chat", [False, True])
async def test_c8_fields_not_offered_are_accepted_only_when_off(field: str, chat: bool) -> None:
    async with serving(output=OUTPUT) as harness:
        call = harness.chat if chat else harness.complete
        for off in (None, *NEUTRAL_VALUES[field]):
            assert (await call(**{field: off})).status_code == 200, off
        if (field, chat) not in {("echo", False), ("tools", True), ("tool_choice", True)}:
            error = error_of(await call(**{field: {"on": 1}}))
            assert (error["param"], error["code"]) == (field, "unsupported_parameter")


MALFORMED = [
    "", " ", "null", "true", "3", '"text"', "[]", "[{}]", "{", '{"prompt"', '{"prompt": }', "{'prompt': 'a'}",
    '{"prompt": "a",}', '{"prompt": "a"} x', '{"prompt": "a"}{}', '{"prompt": "a\n"}', '{"prompt": 01}',
    "\ufeff{}", '{"prompt": "\\x"}', "{" * 10_000, "[" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000,
    "[" * 5000 + "]" * 5000, '{"prompt": ' + "[" * 10_000 + "]" * 10_000 + "}", '{"n": ' + "9" * 10_000 + "}",
    "prompt=a", "<xml/>", "\0", '{"prompt": {"a": 1}}', '{"prompt": 3}', '{"prompt": true}',
    '{"prompt": [true]}', '{"prompt": [1.5]}', '{"prompt": [[1], 2]}', '{"prompt": ["a", 1]}',
    '{"prompt": [1, "a"]}', '{"prompt": [[[1]]]}', '{"prompt": [null]}', '{"prompt": [[1.0]]}',
    '{"prompt": [[true]]}', '{"prompt": [-1]}', '{"prompt": [300]}', '{"prompt": [[5], [300]]}',
    '{"prompt": [99999999999999999999999]}', '{"prompt": "a", "model": []}', '{"prompt": "a", "model": {}}',
    "{}", '{"messages": 3}', '{"messages": "hi"}', '{"messages": {}}', '{"messages": [3]}',
    '{"messages": ["hi"]}', '{"messages": [[]]}', '{"messages": [{}]}', '{"messages": [{"role": "user"}]}',
    '{"messages": [{"content": "x"}]}', '{"messages": [{"role": "user", "content": null}]}',
    '{"messages": [{"role": "user", "content": 3}]}', '{"messages": [{"role": "user", "content": [3]}]}',
    '{"messages": [{"role": "king", "content": "x"}]}',
    '{"messages": [{"role": "tool", "content": "x"}]}',
    '{"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}',
    '{"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}',
    '{"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]}',
    '{"messages": [{"role": "assistant", "tool_calls": []}]}',
    '{"messages": [{"role": 1, "content": ""}]}',
    '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
    '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
    '{"messages": [{"role": "user", "content": {}}]}',
    '{"messages": [{"role": "user", "content": "x", "foo": 1}]}', '{"messages": [null]}',
]  # fmt: skip


async def test_c9_malformed_bodies_are_4xx_with_the_error_object() -> None:
    async with serving(output=OUTPUT) as harness:
        for raw in MALFORMED:
            for path in PATHS:
                await refused(harness, path, raw)
        await still_serves(harness)


async def test_c9_message_errors_name_the_message() -> None:
    async with serving(output=OUTPUT) as harness:
        messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}]
        assert error_of(await harness.chat(messages=messages))["param"] == "messages[1].content"


async def test_c9_wrong_content_type_path_and_method() -> None:
    async with serving(output=OUTPUT) as harness:
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "x",
            "",
            "text/plain; application/json",
            "application/json; charset=latin1",
            'application/json; a=b; Charset = "utf-16"',
        ):
            response = await harness.http.post(
                PATHS[0], content=b'{"prompt": "a"}', headers={"content-type": kind}
            )
            assert error_of(response, 415)["code"] == "unsupported_media_type"
        assert error_of(await harness.http.post("/v1/completion"), 404)["code"] == "not_found"
        assert error_of(await harness.http.get("/v1/completions/"), 404)["code"] == "not_found"
        response = await harness.http.get(PATHS[0])
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "POST"
        body = b'{"prompt": "a", "max_tokens": 2}'
        for coding in ("gzip", "br", "x, gzip"):
            response = await harness.http.post(
                PATHS[0], content=b"\x1f\x8b\x08", headers={**JSON, "content-encoding": coding}
            )
            error = error_of(response, 415)
            assert error["code"] == "unsupported_media_type"
            assert f"Content-Encoding '{coding}'" in error["message"]
        response = await harness.http.post(
            PATHS[0], content=body, headers={**JSON, "content-encoding": "Identity"}
        )
        assert response.status_code == 200
        for kinds in ([], ["text/plain", "application/json"], ["application/json"] * 2):
            headers = [("content-type", kind) for kind in kinds]
            response = await harness.http.post(PATHS[0], content=body, headers=headers)
            assert error_of(response, 415)["code"] == "unsupported_media_type", kinds
        for kind in (
            "application/json; charset=utf-8",
            'Application/JSON;charset="UTF-8"',
            "application/json;",
        ):
            response = await harness.http.post(PATHS[0], content=body, headers={"content-type": kind})
            assert response.status_code == 200


SURROGATES = [
    '{"prompt": "a\\ud83d"}', '{"prompt": "\\ude00"}', '{"prompt": "\\ud83d\\u0041"}',
    '{"prompt": "\\ud83dxxxxxxxx"}', '{"prompt": "a", "stop": "\\ud83d"}',
    '{"prompt": "a", "model": "\\ud83d"}', '{"prompt": "a", "user": "\\ud83d"}',
    '{"messages": [{"role": "user", "content": "\\ud83d"}]}', '{"\\ud83d": 1}', '{"prompt": "\\\\\\ud83d"}',
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_c10_lone_surrogates_and_invalid_utf8_are_refused_with_an_offset(path: str) -> None:
    async with serving(output=OUTPUT) as harness:
        for raw in SURROGATES:
            for stream in ("", ', "stream": true'):
                raw_body = raw[:-1] + stream + "}"
                error = await refused(harness, path, raw_body)
                offset = min(i for i in (raw_body.find("\\ud83d"), raw_body.find("\\ude00")) if i >= 0)
                assert error["message"].endswith(f"half of a surrogate pair at byte {offset}.")
        error = await refused(harness, path, b'{"prompt": "\xff"}')
        assert error["message"].endswith("not valid UTF-8 at byte 12.")
        error = await refused(harness, path, b'{"prompt": "\xed\xa0\xbd"}')
        assert error["message"].endswith("not valid UTF-8 at byte 12.")


async def test_c10_a_long_body_is_searched_for_half_a_pair_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads get their turn between the pieces, and no piece begins or ends within an escape."""
    pieces: list[int] = []

    class Watched:
        def match(self, raw: bytes, begin: int, end: int) -> re.Match[bytes] | None:
            pieces.append(end - begin)
            return well_formed.match(raw, begin, end)

    well_formed, size = json_body._WELL_FORMED, json_body._MATCHED_BYTES
    monkeypatch.setattr(json_body, "_WELL_FORMED", Watched())
    for shift in range(12):
        for before in (rb"\ud83d\ude42" * (size // 4), rb"\\" * (2 * size), b"x" * (3 * size)):
            head = b'{"prompt": "' + b"x" * shift + before
            with pytest.raises(ApiError, match=f"half of a surrogate pair at byte {len(head)}\\."):
                json_body.parse_json_object(head + rb'\ud83d"}')
            with pytest.raises(ApiError, match="invalid character in unicode escape"):
                json_body.parse_json_object(head + rb'\u00zz\ud83d"}')
    assert len(pieces) > 100 and set(pieces) == {size}


async def test_c10_a_proper_pair_and_an_escaped_backslash_are_text() -> None:
    async with serving(output=OUTPUT) as harness:
        for raw, text in (('"\\ud83d\\ude00"', "😀"), ('"\\\\ud83d"', "\\ud83d"), ('"\\u0000"', "\0")):
            await harness.http.post(PATHS[0], content=f'{{"prompt": {raw}}}'.encode(), headers=JSON)
            assert harness.engine.requests[-1].prompt_token_ids == tokens_of(text)


async def test_c14_prompts_of_l_minus_1_l_and_l_plus_1_tokens() -> None:
    limit = 32
    engine = FakeEngine(
        lambda request: OUTPUT, info=engine_info(max_model_len=limit, max_request_tokens=limit)
    )
    async with serving(engine) as harness:
        for prompt in ("a" * (limit - 1), [5] * (limit - 1)):
            assert (await harness.complete(prompt=prompt, max_tokens=1)).status_code == 200
        for length in (limit, limit + 1):
            for prompt in ("a" * length, [5] * length):
                error = error_of(await harness.complete(prompt=prompt, max_tokens=1))
                assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
                assert str(limit) in error["message"] and str(length) in error["message"]
        messages = [{"role": "user", "content": "a" * limit}]
        assert error_of(await harness.chat(messages=messages))["param"] == "messages"


async def test_c14_a_limit_beyond_the_context_is_refused_and_a_default_one_is_clamped() -> None:
    engine = FakeEngine(
        lambda request: OUTPUT * 20, info=engine_info(max_model_len=32, max_request_tokens=32)
    )
    async with serving(engine) as harness:
        error = error_of(await harness.complete(prompt="a" * 30, max_tokens=3))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        assert "33" in error["message"] and "30" in error["message"] and "32" in error["message"]
        error = error_of(await harness.complete(prompt="a" * 30, max_completion_tokens=10**30))
        assert error["param"] == "max_completion_tokens"
        response = await harness.complete(prompt="a" * 30)
        assert response.json()["usage"]["completion_tokens"] == 2
        assert (await harness.complete(prompt="a" * 30, max_tokens=2)).status_code == 200
        response = await harness.chat()
        assert response.json()["usage"]["total_tokens"] == 32, "chat: by default all the room that is left"


async def test_c14_what_the_pool_can_never_hold_is_refused_at_once() -> None:
    engine = FakeEngine(lambda request: OUTPUT, info=engine_info(max_model_len=256, max_request_tokens=64))
    async with serving(engine) as harness:
        error = error_of(await harness.complete(prompt="a" * 60, max_tokens=5))
        assert error["code"] == "context_length_exceeded" and "64" in error["message"]


async def test_c14_body_too_large_is_413_and_huge_prompt_400() -> None:
    async with serving(output=OUTPUT, max_body_bytes=21 * 2**20) as harness:
        for prompt in ("a" * 20_000_000, [5] * 5_000_000, ["a"] * 1_000_000):
            assert error_of(await harness.complete(prompt=prompt))["param"] == "prompt"
        response = await harness.complete(prompt="a" * (21 * 2**20))
        assert error_of(response, 413)["code"] == "request_too_large"
        await still_serves(harness)


async def test_c14_unknown_model_is_404() -> None:
    async with serving(output=OUTPUT, served_model_name="served") as harness:
        for call in (harness.complete, harness.chat):
            error = error_of(await call(model="other"), 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert (await call(model="served")).json()["model"] == "served"
            assert (await call(model=None)).json()["model"] == "served", "absent: the served model"


async def test_d8_huge_requests_are_refused_while_health_answers() -> None:
    async with serving(output=OUTPUT, max_body_bytes=2**26) as harness:
        huge: list[dict[str, Any]] = [
            {"n": 10**6},
            {"best_of": 10**6},
            {"logprobs": 10**5},
            {"logit_bias": {str(i): 1 for i in range(10**6)}},
            {"stop": ["a"] * 10**5},
            {"prompt": ["a"] * 10**5},
            {"prompt": [[5]] * 10**5},
            {"stop": "a" * 10**6},
            {"n": 65, "prompt": ["a", "b"]},
        ]
        for body in huge:
            error = error_of(await harness.complete(**body))
            assert error["param"] in body
            assert (await harness.http.get("/health")).status_code == 200
        assert not harness.engine.requests


async def test_a_body_that_never_ends_because_its_client_left_is_no_error() -> None:
    async with serving(output=OUTPUT) as harness:
        connection = Connection(harness.app, PATHS[0], b"", more_body=True)
        connection.leave()
        await until(connection.task.done)
        assert connection.task.exception() is None and connection.status is None
        assert harness.sample("http_requests_total", route=PATHS[0], method="POST", status="499") == 1


def test_the_api_page_names_every_field_and_every_field_not_offered() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for field in CompletionBody.model_fields.keys() | ChatBody.model_fields.keys() | NEUTRAL_VALUES.keys():
        assert f"`{field}`" in page, field


def test_no_field_is_both_offered_and_not() -> None:
    for body in (CompletionBody, ChatBody):
        assert NEUTRAL_VALUES.keys() & body.model_fields.keys() <= {"echo", "tools", "tool_choice"}
