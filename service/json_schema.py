"""Which JSON schemas a grammar can keep: every output must be valid, so what a grammar would ignore is refused.

The keywords and their combinations are those for which random outputs of the grammar were found to be valid.
Narrower is allowed: a grammar writes properties in the order of the schema, and no others unless told to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_DEPTH = 32
MAX_SCHEMAS = 2000

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    "$schema", "$id", "$comment", "$defs", "definitions",
}  # fmt: skip

_OF_TYPE = {
    "object": "properties required additionalProperties unevaluatedProperties minProperties maxProperties",
    "array": "items prefixItems minItems maxItems unevaluatedItems",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum",
}
_TYPE_OF = {keyword: kind for kind, keywords in _OF_TYPE.items() for keyword in keywords.split()}
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords that say all that a schema says."""
_FORMATS = {
    "date-time", "date", "time", "duration", "email", "hostname", "ipv6", "uri", "uri-reference", "uuid",
    "json-pointer",
}  # fmt: skip
_BY_NAME = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")

# Pieces of a regular expression that cannot match a quote, a backslash or a control character: their match is
# written into the JSON string as it is.
_PLAIN_PATTERN = re.compile(
    r"""(?x) (?:
        [^\\"\[\].\x00-\x1f]                                # a character, or an operator
      | \\ [dw.\-+*?()\[\]{}^$|/]                           # digits, word characters, an escaped operator
      | \[ (?: [^\\"\[\]^\-\x00-\x1f] (?: - [^\\"\[\]\x00-\x1f] )?   # a set: characters and ranges,
             | \\ [dw.\-+*?()\[\]{}^$|/] | - )+ \]                   # escapes
    )* """
)
_RANGE = re.compile(r"([^\\\[])-([^\]])")


class SchemaError(Exception):
    """A schema that cannot be kept; the message names the place in it."""


def check_schema(schema: object) -> None:
    """Refuse a schema whose grammar could write what the schema forbids.

    Raises:
        SchemaError: Naming the keyword.
    """
    left = MAX_SCHEMAS
    pending = [(schema, "#", 0)]
    while pending:
        part, place, depth = pending.pop()
        left -= 1
        if depth > MAX_DEPTH or left < 0:
            raise SchemaError(f"at most {MAX_DEPTH} levels and {MAX_SCHEMAS} schemas are possible")
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise SchemaError(f"{place} must be an object or a boolean")
        pending += [(inner, f"{place}/{path}", depth + 1) for inner, path in _inner(part, place)]
        _check_keywords(part, place)


def _check_keywords(schema: Mapping[str, Any], place: str) -> None:
    types = _types(schema, place)
    said = schema.keys() - _ANNOTATIONS
    for keyword in sorted(said - _TYPE_OF.keys() - {"type", *_WHOLE}):
        raise SchemaError(f"{place}/{keyword[:100]} is not supported")
    for keyword in _WHOLE:
        others = said - {keyword, "type"} if keyword in ("enum", "const") else said - {keyword}
        if keyword in schema and others:
            raise SchemaError(f"{place}/{keyword} together with {min(others)} is not supported")
    for keyword in said & _TYPE_OF.keys():
        kind = _TYPE_OF[keyword]
        if kind not in types and not (kind == "number" and "integer" in types):
            raise SchemaError(f'{place}/{keyword} needs "type": "{kind}"')
    _check_values(schema, types, place)
    if "$ref" in schema and not (isinstance(schema["$ref"], str) and re.match(r"#(/|$)", schema["$ref"])):
        raise SchemaError(f"{place}/$ref must be # or begin with #/")
    _check_object(schema, place)
    _check_string(schema, place)
    if len(schema.get("allOf", ())) > 1:
        raise SchemaError(f"{place}/allOf of more than one schema is not supported")
    if "oneOf" in schema and not _exclusive(schema["oneOf"]):
        raise SchemaError(
            f"{place}/oneOf needs schemas that exclude each other by a type or a const property"
        )


def _types(schema: Mapping[str, Any], place: str) -> list[str]:
    value = schema.get("type", [])
    types = value if isinstance(value, list) else [value]
    if any(not isinstance(one, str) or one not in _TYPES for one in types):
        raise SchemaError(f"{place}/type must be among {', '.join(_TYPES)}")
    return types


def _check_values(schema: Mapping[str, Any], types: Sequence[str], place: str) -> None:
    """``enum`` and ``const``: a grammar does not compare them with ``type``."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        return
    if not isinstance(values, list) or not values:
        raise SchemaError(f"{place}/enum must be a list with an entry")
    for value in values:
        if types and not any(_is_of(value, kind) for kind in types):
            raise SchemaError(f"{place}: {str(value)[:100]!r} is not of the type that it should have")


def _is_of(value: object, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _check_object(schema: Mapping[str, Any], place: str) -> None:
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise SchemaError(f"{place}: properties must be an object, and required a list")
    for name in required:
        if not isinstance(name, str) or name not in properties:
            raise SchemaError(
                f"{place}/required names {str(name)[:100]!r}, which is not among the properties"
            )
    # A key can be written in several ways ("a" and "\u0061"), so a free one could repeat a property
    if properties and schema.get("additionalProperties", False) is not False:
        raise SchemaError(f"{place}/additionalProperties together with properties is not supported")
    for keyword in ("minProperties", "maxProperties"):
        if keyword in schema and not properties:
            raise SchemaError(f"{place}/{keyword} without properties is not supported")
    for keyword in ("unevaluatedProperties", "unevaluatedItems"):
        if schema.get(keyword, False) is not False:
            raise SchemaError(f"{place}/{keyword} is not supported")


def _check_string(schema: Mapping[str, Any], place: str) -> None:
    bounds = [schema[keyword] for keyword in ("minLength", "maxLength") if keyword in schema]
    if any(type(bound) is not int or bound < 0 for bound in bounds):
        raise SchemaError(f"{place}: lengths must be integers of at least 0")
    if len({"pattern", "format"} & schema.keys()) + bool(bounds) > 1:
        raise SchemaError(f"{place}: only one of pattern, format and lengths is possible")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise SchemaError(f"{place}/format {str(schema['format'])[:100]!r} is not supported")
    if "pattern" in schema and not _is_plain(schema["pattern"]):
        raise SchemaError(
            f"{place}/pattern must be made of characters, sets without ^, \\d and \\w, and not be able to match a "
            "quote, a backslash or a control character"
        )


def _is_plain(pattern: object) -> bool:
    if not isinstance(pattern, str) or not _PLAIN_PATTERN.fullmatch(pattern):
        return False
    return not any(low <= char <= high for low, high in _RANGE.findall(pattern) for char in '"\\\x1f')


def _inner(schema: Mapping[str, Any], place: str) -> Iterator[tuple[object, str]]:
    """The schemas inside ``schema``, each with its path."""
    for keyword in _BY_NAME:
        named = schema.get(keyword, {})
        if not isinstance(named, Mapping):
            raise SchemaError(f"{place}/{keyword} must be an object")
        yield from ((inner, f"{keyword}/{name[:100]}") for name, inner in named.items())
    for keyword in _LISTS:
        listed = schema.get(keyword, [])
        if not isinstance(listed, list):
            raise SchemaError(f"{place}/{keyword} must be a list")
        yield from ((inner, f"{keyword}/{index}") for index, inner in enumerate(listed))
    yield from ((schema[keyword], keyword) for keyword in _SINGLE if keyword in schema)


def _exclusive(branches: Sequence[object]) -> bool:
    """Whether no value can match two of ``branches``, as far as it shows."""
    if not branches or not all(isinstance(branch, Mapping) for branch in branches):
        return False
    kinds = [_entry(branch, "type") for branch in branches]
    known = [kind for kind in kinds if isinstance(kind, str)]
    if len(set(known)) == len(branches) and not {"integer", "number"} <= set(known):
        return True
    required = [_entry(branch, "required") for branch in branches]
    names = [set(map(str, one)) if isinstance(one, list) else set() for one in required]
    return any(_tags_differ(branches, name) for name in set.intersection(*names))


def _tags_differ(branches: Sequence[object], name: str) -> bool:
    """Whether the required property ``name`` is another text in each branch."""
    tags = [_entry(_entry(branch, "properties"), name) for branch in branches]
    texts = [_entry(tag, "const") for tag in tags]
    return all(isinstance(text, str) for text in texts) and len(set(map(str, texts))) == len(texts)


def _entry(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, Mapping) else None
