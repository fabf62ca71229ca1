"""Structured output: OpenAI's ``response_format`` and vLLM's ``structured_outputs`` as the engine's grammars."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.types import GrammarSpec
from service.errors import ApiError, bad_request
from service.json_body import parse_json_value
from service.json_schema import SchemaError, check_schema
from service.schema_fields import Body, bounded

MAX_GRAMMAR_CHARS = 1 << 16
MAX_CHOICE_TEXTS = 1024
ANY_OBJECT = '{"type": "object"}'

_Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class NamedSchema(Body):
    """A schema as OpenAI wants it."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = Field(None, description="Accepted; the schema is always kept.")


class ResponseFormat(Body):
    """What the output must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def grammar(self, param: str) -> GrammarSpec | None:
        """What the engine is to follow; ``None`` for plain text. Raises ``ApiError``."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise bad_request("json_schema goes with type: json_schema.", f"{param}.json_schema")
        if self.json_schema is not None:
            return _schema(self.json_schema.schema_, param)
        return GrammarSpec("json_schema", ANY_OBJECT, param) if self.type == "json_object" else None


class StructuredOutputs(Body):
    """As vLLM's: exactly one of these."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: _Text | None = None
    choice: Annotated[list[_Text], Field(min_length=1), bounded(MAX_CHOICE_TEXTS)] | None = None
    grammar_: Annotated[_Text | None, Field(alias="grammar")] = None
    json_object: Literal[True] | None = None

    def grammar(self, param: str) -> GrammarSpec:
        """What the engine is to follow. Raises ``ApiError``."""
        if len(self.model_fields_set) != 1:
            message = "structured_outputs needs one of json, regex, choice, grammar and json_object."
            raise bad_request(message, param)
        if self.json_ is not None:
            return _schema(_parsed(self.json_, param), param)
        if self.regex is not None:
            return GrammarSpec("regex", self.regex, param)
        if self.choice is not None:
            return _bounded(GrammarSpec("ebnf", "root ::= " + " | ".join(map(_literal, self.choice)), param))
        if self.grammar_ is not None:
            return GrammarSpec("ebnf", self.grammar_, param)
        return GrammarSpec("json_schema", ANY_OBJECT, param)


def _schema(schema: object, param: str) -> GrammarSpec:
    try:
        check_schema(schema)
    except SchemaError as exc:
        raise bad_request(f"{param}: the schema cannot be kept: {exc}.", param) from None
    return _bounded(GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False), param))


def _parsed(schema: str | dict[str, Any], param: str) -> object:
    if isinstance(schema, dict):
        return schema
    try:
        return parse_json_value(schema.encode(), {})
    except ApiError:
        message = (
            f"{param}: the schema is not valid JSON, or has a key twice in one object, half of a surrogate pair or "
            "a number that is out of range."
        )
        raise bad_request(message, param) from None


def _bounded(spec: GrammarSpec) -> GrammarSpec:
    if len(spec.text) > MAX_GRAMMAR_CHARS:
        message = f"{spec.param}: at most {MAX_GRAMMAR_CHARS} characters are possible."
        raise bad_request(message, spec.param)
    return spec


def _literal(text: str) -> str:
    """``text`` as a string of an EBNF grammar."""
    kept = (char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in text)
    return '"' + "".join(kept) + '"'
