"""What each token id adds to the text, by ``tokenizer.json``. The engine itself needs it for grammars only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as RustTokenizer

from engine.errors import ConfigError

_SENTENCEPIECE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(NamedTuple):
    """What each token id adds to the text."""

    table: list[bytes]
    """UTF-8 bytes of each id, parts of a character included; ids past the end add nothing."""
    special: frozenset[int]
    """Ids that are left out of the text unless they are asked for."""
    separated: bool
    """The entries begin with a space that separates them from the token before, so the first one drops it."""

    def of(self, token_id: int) -> bytes:
        """Bytes of one id on its own."""
        return self.table[token_id] if token_id < len(self.table) else b""


def read_tokenizer(directory: Path) -> RustTokenizer:
    """Read ``tokenizer.json`` of ``directory``.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{directory} has no tokenizer.json; name a directory that has one with --tokenizer"
        )
    try:
        return RustTokenizer.from_file(str(file))
    except Exception as exc:  # the library raises plain Exception
        raise ConfigError(f"{file} cannot be read: {exc}") from exc


def token_bytes(backend: RustTokenizer) -> TokenBytes:
    """What each id adds to the text, by the rules of the tokenizer's own decoder.

    Raises:
        ConfigError: The decoder is of an unknown kind.
    """
    spec: dict[str, Any] = json.loads(backend.to_str())
    kinds = _decoder_kinds(spec.get("decoder"))
    if not kinds:
        to_bytes = _word_bytes
    elif kinds == {"ByteLevel"}:
        to_bytes = _byte_level_bytes
    elif kinds <= _SENTENCEPIECE_DECODERS:
        to_bytes = _sentencepiece_bytes
    else:
        raise ConfigError(f"tokenizer.json: a decoder of kind {', '.join(sorted(kinds))} is not supported")
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        table[token_id] = to_bytes(token)
    special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    return TokenBytes(table, special, separated=not kinds)


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_decoder_kinds(part) for part in decoder["decoders"]))
    return {decoder["type"]}


def _word_bytes(token: str) -> bytes:
    return b" " + token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    return token.replace("\u2581", " ").encode()


def _byte_level_characters() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES_OF_CHARACTERS = _byte_level_characters()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTES_OF_CHARACTERS.__getitem__, token))
    except KeyError:  # an added token, which is plain text
        return token.encode()
