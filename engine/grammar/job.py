"""Compiles one grammar, in a process of its own: a compilation cannot be interrupted, a process can be ended.

Some short schemas take hours or all memory. The process has limits that hold even if nobody is left to end it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import xgrammar

from engine.grammar.ebnf import EbnfError, check_written, rewrite
from engine.grammar.limits import limit_memory, limit_time
from engine.grammar.regex import RegexError, translate
from engine.types import GrammarSpec

MEMORY_BYTES = 1 << 30
"""What a compilation may allocate."""
COMPILED_BYTES = 32 << 20
"""Largest compiled grammar."""
SERIALISED_BYTES = 32 << 20
"""Largest compiled grammar as text, which the walking process must read within a step."""
MAX_SPACES = 16
"""White space between the parts of a JSON document: without a bound, a model could write nothing else for ever."""

_ORIGIN = re.compile(r"^(\[[\d:]+\] )?\S+\.(cc|h):\d+: ")
_FAILED_CHECK = re.compile(r"^Check failed: .* is false:? ", re.DOTALL)
_MAX_MESSAGE = 300
_TOO_MUCH_MEMORY = "it needs too much memory to compile"
_CHARACTERS = r" !#-\[\]-" + "\ud7ff\ue000-\U0010ffff"
"""Those that stand for themselves in a JSON string, as the inside of a regular expression's set."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords of JSON Schema whose value is data."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Those whose value is schemas by name."""


class GrammarError(Exception):
    """A grammar that cannot be compiled; the message is for who wrote it."""


def vocabulary(table: Sequence[bytes]) -> xgrammar.TokenizerInfo:
    """A vocabulary of ``table``'s texts and of one more id, ``len(table)``, that stands for the end of the output.

    So a compiled grammar does not depend on a request's stop ids. Ids with an empty text are never allowed.
    """
    end = len(table)
    return xgrammar.TokenizerInfo(
        [*table, b""], xgrammar.VocabType.RAW, vocab_size=end + 1, stop_token_ids=[end]
    )


def compile_grammar(spec: GrammarSpec, info: xgrammar.TokenizerInfo) -> xgrammar.CompiledGrammar:
    """Compile ``spec``.

    Raises:
        GrammarError: It is not valid, matches nothing, or is too large.
    """
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    try:
        compiled = compiler.compile_grammar(rewrite(_as_ebnf(spec)))
    except (EbnfError, RegexError) as exc:
        raise GrammarError(str(exc)) from None
    except MemoryError:
        raise GrammarError(_TOO_MUCH_MEMORY) from None
    except RecursionError:  # a RuntimeError too
        raise GrammarError("it is nested too deeply") from None
    except json.JSONDecodeError as exc:
        raise GrammarError(f"it is not JSON: {exc}") from None
    except RuntimeError as exc:
        raise GrammarError(_readable(str(exc))) from None
    if compiled.memory_size_bytes > COMPILED_BYTES:
        raise GrammarError(f"it is larger than {COMPILED_BYTES >> 20} MiB when compiled")
    bitmask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    if xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bitmask) and not bitmask.any():
        raise GrammarError("nothing matches it")
    return compiled


def _as_ebnf(spec: GrammarSpec) -> str:
    if spec.kind == "json_schema":
        schema = json.dumps(_with_patterns(json.loads(spec.text)))
        return str(xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=MAX_SPACES))
    if spec.kind == "regex":
        return str(xgrammar.Grammar.from_regex(translate(spec.text)))
    check_written(spec.text)
    return spec.text


def _with_patterns(schema: Any) -> Any:
    """``schema`` with its patterns as the library reads them, and with lengths of strings as patterns.

    The library lets strings of bounded length hold control characters, which are not JSON. It writes a pattern's
    match as it is, so the pattern must leave them out, as well as quotes and backslashes.
    """
    if isinstance(schema, list):
        return [_with_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = dict(schema)
    for key, item in schema.items():
        if key in _NAMED and isinstance(item, dict):
            kept[key] = {name: _with_patterns(part) for name, part in item.items()}
        elif key not in _VALUES:
            kept[key] = _with_patterns(item)
    if isinstance(kept.get("pattern"), str):
        kept["pattern"] = translate(kept["pattern"])
    bounds = kept.get("minLength", 0), kept.get("maxLength", "")
    if "string" not in _types(kept) or "pattern" in kept or bounds == (0, ""):
        return kept
    kept = {key: item for key, item in kept.items() if key not in ("minLength", "maxLength")}
    return kept | {"pattern": f"^[{_CHARACTERS}]{{{bounds[0]},{bounds[1]}}}$"}


def _types(schema: dict[str, Any]) -> list[Any]:
    types = schema.get("type")
    return types if isinstance(types, list) else [types]


def run(connection: Connection, spec: GrammarSpec, table: Sequence[bytes], time_limit: float) -> None:
    """Send ``None`` when the work begins, then ``(True, serialised grammar)`` or ``(False, what is wrong)``."""
    info = vocabulary(table)
    limit_memory(MEMORY_BYTES)
    limit_time(time_limit)
    connection.send(None)
    try:
        connection.send((True, _serialise(compile_grammar(spec, info))))
    except GrammarError as exc:
        connection.send((False, str(exc)))
    except MemoryError:
        connection.send((False, _TOO_MUCH_MEMORY))


def _serialise(compiled: xgrammar.CompiledGrammar) -> str:
    try:
        text = compiled.serialize_json()
    except (MemoryError, RuntimeError):
        raise GrammarError(_TOO_MUCH_MEMORY) from None
    if len(text) > SERIALISED_BYTES:
        raise GrammarError(f"it is larger than {SERIALISED_BYTES >> 20} MiB when serialised")
    return text


def _readable(message: str) -> str:
    """The library's message on one line, without its source position and the check that failed."""
    if "bad_alloc" in message:
        return _TOO_MUCH_MEMORY
    text = _ORIGIN.sub("", message).partition(" The JSON string is:")[0]
    text = " ".join(_FAILED_CHECK.sub("", text).split()).rstrip(".")
    if not text:
        return "the library that compiles it gives no reason"
    text += " its end" if text.endswith("but got") else ""
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
