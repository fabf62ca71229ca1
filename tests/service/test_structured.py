"""``response_format`` and ``structured_outputs``: what becomes which grammar, and what is refused (D9, I7)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.types import GrammarSpec
from service.json_schema import SchemaError, check_schema
from tests.service.harness import error_of, serving, tokens_of

OUTPUT = tokens_of("{}")
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANY_OBJECT = GrammarSpec("json_schema", '{"type": "object"}', "response_format")


@pytest.mark.parametrize("chat", [False, True])
async def test_each_form_reaches_the_engine_as_a_grammar(chat: bool) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}
    cases: list[tuple[dict[str, Any], GrammarSpec | None]] = [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": named}, GrammarSpec("json_schema", json.dumps(OBJECT), "response_format")),
        (
            {"structured_outputs": {"json": OBJECT}},
            GrammarSpec("json_schema", json.dumps(OBJECT), "structured_outputs"),
        ),
        (
            {"structured_outputs": {"json": '{"enum": ["\\ud83d\\ude42"]}'}},
            GrammarSpec("json_schema", '{"enum": ["🙂"]}', "structured_outputs"),
        ),
        ({"structured_outputs": {"json": "true"}}, GrammarSpec("json_schema", "true", "structured_outputs")),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+", "structured_outputs")),
        (
            {"structured_outputs": {"choice": ["a", 'b"\\\n']}},
            GrammarSpec("ebnf", 'root ::= "a" | "b\\U00000022\\U0000005c\\U0000000a"', "structured_outputs"),
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            GrammarSpec("ebnf", 'root ::= "a"', "structured_outputs"),
        ),
    ]
    async with serving(output=OUTPUT) as harness:
        for fields, grammar in cases:
            response = await (harness.chat if chat else harness.complete)(**fields)
            assert response.status_code == 200, response.text
            assert harness.engine.requests[-1].params.grammar == grammar


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 2000}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"json": '{"enum": ["\\ud800"]}'}}, "structured_outputs"),
    ({"structured_outputs": {"json": '{"title": "\\udc00", "type": "null"}'}}, "structured_outputs"),
    ({"structured_outputs": {"json": '{"type": "null", "type": "string"}'}}, "structured_outputs"),
    ({"structured_outputs": {"json": '{"const": NaN}'}}, "structured_outputs"),
    ({"structured_outputs": {"json": '{"const": 1e999}'}}, "structured_outputs"),
    ({"structured_outputs": {"json": '{"type": "null"} {}'}}, "structured_outputs"),
    ({"structured_outputs": {"json": "[" * 9999}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"response_format": {"type": "json_object"}, "min_tokens": 2, "max_tokens": 9}, "min_tokens"),
    ({"guided_json": OBJECT}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
@pytest.mark.parametrize("chat", [False, True])
async def test_what_cannot_be_kept_is_refused_by_name(fields: dict[str, Any], param: str, chat: bool) -> None:
    async with serving(output=OUTPUT) as harness:
        error = error_of(await (harness.chat if chat else harness.complete)(**fields))
        assert error["param"] == param
        assert not harness.engine.requests


GOOD: list[Any] = [
    True,
    {},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": ["string", "null"], "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": r"^[a-z0-9_-]{2,4}(x|yz)?\.\d+$"},
    {"type": "string", "format": "date-time"},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"enum": {"enum": ["a", 1]}}, "required": ["enum"], "title": "T"},
    {"enum": ["a", None, {"x": [1]}]},
    {"type": "string", "const": "x"},
    {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"
        ]
    },
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
    {"allOf": [{"type": "integer"}], "description": "as pydantic writes a documented reference"},
]
BAD: list[Any] = [
    1,
    {"type": "thing"},
    {"type": ["string", 3]},
    {"type": "integer", "multipleOf": 5},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {}},
    {"type": "array", "items": [{}]},
    {"not": {"type": "integer"}},
    {"if": {}, "then": {}},
    {"minimum": 5},
    {"type": "integer", "minLength": 5},
    {"type": "string", "maxLength": -1},
    {"type": "string", "pattern": "^a+$", "maxLength": 3},
    {"type": "string", "format": "foo"},
    {"type": "object", "required": ["q"]},
    {"type": "object", "required": [{}]},
    {"type": "object", "properties": []},
    {"type": "object", "properties": {"a": {"multipleOf": 1}}},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
    {"type": "object", "patternProperties": {"a": {}}},
    {"type": "object", "minProperties": 1},
    {"type": "integer", "enum": [1, "x"]},
    {"type": "integer", "enum": [True]},
    {"enum": []},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"$ref": "#/a"}, {"$ref": "#/b"}]},
    {"oneOf": 3},
    {"allOf": [{"type": "integer"}, {"minimum": 5}]},
    {"allOf": 3},
    {"type": "integer", "anyOf": [{"minimum": 5}]},
    {"$ref": "#/$defs/n", "minimum": 5},
    {"$ref": "https://example.org/schema"},
    {"$ref": "#n"},
    {"$ref": 5},
]


@pytest.mark.parametrize("schema", GOOD, ids=str)
def test_schemas_that_a_grammar_keeps(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize("schema", BAD, ids=str)
def test_schemas_that_a_grammar_would_weaken_are_refused(schema: Any) -> None:
    with pytest.raises(SchemaError):
        check_schema(schema)


@pytest.mark.parametrize(
    "pattern",
    [".", "[^a]", r"\s", r"\W", r"\S", r"\n", r"\\", '"', '["]', "[ -~]", "[!-z]", "[", "a]", "\n", 3],
)
def test_patterns_that_could_break_out_of_a_json_string_are_refused(pattern: object) -> None:
    with pytest.raises(SchemaError):
        check_schema({"type": "string", "pattern": pattern})


def test_deep_and_wide_schemas_are_refused_at_once() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    wide = {"type": "object", "properties": {str(i): {} for i in range(100_000)}}
    for schema in (deep, wide):
        with pytest.raises(SchemaError, match="levels"):
            check_schema(schema)
