"""The tokenizer of a checkpoint directory: text to ids, the bytes of each id, special tokens, chat template.

Reads ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` as Hugging Face writes them;
nothing in the directory is executed except the chat template, and that in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import processors

from engine.errors import ConfigError
from engine.token_bytes import TokenBytes, read_tokenizer, token_bytes
from service.chat_template import ChatTemplate


class Tokenizer:
    """Text and token ids of one checkpoint. Threads may share it, and ``encode`` releases the GIL."""

    def __init__(self, backend: RustTokenizer, config: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            backend: A tokenizer whose decoder is byte-level, SentencePiece-like, or absent (words).
            config: Contents of ``tokenizer_config.json``.

        Raises:
            ConfigError: The decoder is of another kind, or a special token is not in the vocabulary.
        """
        config = config or {}
        # Padding or truncation saved with a tokenizer would change prompts in silence.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.bos_token = _token_text(config, "bos_token")
        self.eos_token = _token_text(config, "eos_token")
        self.eos_token_id = self._special_id("eos_token", self.eos_token)
        self._set_post_processor(config)
        spec: dict[str, Any] = json.loads(backend.to_str())
        self.token_bytes = token_bytes(backend)
        self._max_token_bytes = _max_token_bytes(spec, self.token_bytes)
        self.chat_template = ChatTemplate.from_config(config)
        special = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        self._special_tokens = {name: text for name, text in special.items() if text is not None}

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint directory.

        Raises:
            ConfigError: A file is missing or damaged, or holds what cannot be honoured.
        """
        backend = read_tokenizer(path)
        config = _read_json(path / "tokenizer_config.json")
        template = path / "chat_template.jinja"
        if template.is_file():
            config["chat_template"] = _read_text(template)
        return cls(backend, config)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, by default with those that the checkpoint adds around a prompt."""
        # `encode` would hold the GIL, and thereby the event loop, for seconds on a long text.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; ids that are not in the vocabulary add nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def has_token(self, text: str) -> bool:
        """Whether ``text`` is one token of the vocabulary."""
        return self._backend.token_to_id(text) is not None

    def token_bytes_with(self, marks: Iterable[str]) -> TokenBytes:
        """``token_bytes``, but with ``marks`` in the text even where they are special tokens."""
        shown = {self._backend.token_to_id(mark) for mark in marks}
        return self.token_bytes._replace(special=self.token_bytes.special - shown)

    def min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of ``text``, without tokenising it (0 if there is none)."""
        return len(text) // self._max_token_bytes if self._max_token_bytes else 0

    def token_text(self, token_id: int) -> str:
        r"""One token as text; bytes that are not whole characters as ``bytes:\xe4\xbd``."""
        data = self.token_bytes.of(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text of a conversation.

        Raises:
            ChatTemplateError: There is no template, or it refuses the messages.
        """
        return self.chat_template.render(
            messages,
            {**self._special_tokens, **variables, "add_generation_prompt": add_generation_prompt},
        )

    def _special_id(self, name: str, text: str | None) -> int | None:
        if text is None:
            return None
        token_id = self._backend.token_to_id(text)
        if token_id is None:
            raise ConfigError(f"tokenizer_config.json: {name} {text!r} is not in the vocabulary")
        return token_id

    def _set_post_processor(self, config: Mapping[str, Any]) -> None:
        """Honour ``add_bos_token`` and ``add_eos_token``: they replace the saved post-processor."""
        if "add_bos_token" not in config and "add_eos_token" not in config:
            return
        single, special = ["$A"], []
        bos_id = self._special_id("bos_token", self.bos_token)
        if config.get("add_bos_token") and self.bos_token is not None and bos_id is not None:
            single.insert(0, self.bos_token)
            special.append((self.bos_token, bos_id))
        if config.get("add_eos_token") and self.eos_token is not None and self.eos_token_id is not None:
            single.append(self.eos_token)
            special.append((self.eos_token, self.eos_token_id))
        self._backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _token_text(config: Mapping[str, Any], name: str) -> str | None:
    """A special token of ``tokenizer_config.json``: text, or an object with ``content``."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"tokenizer_config.json: {name} must be text, not {value!r}")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{file} is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return value


def _max_token_bytes(spec: dict[str, Any], token_bytes: TokenBytes) -> int:
    """Most bytes of text that one token stands for; 0 where a part of the text may give no token."""
    single_bytes = {entry for entry in token_bytes.table if len(entry) == 1}
    if len(single_bytes) < 256 or not _keeps_text(spec.get("normalizer"), "normalizers", set()):
        return 0
    if not _keeps_text(spec.get("pre_tokenizer"), "pretokenizers", {"ByteLevel", "Digits", "Split"}):
        return 0
    if any(token["lstrip"] or token["rstrip"] for token in spec.get("added_tokens", ())):
        return 0
    return max(map(len, token_bytes.table))


def _keeps_text(stage: dict[str, Any] | None, parts: str, known: set[str]) -> bool:
    """Whether a stage of the tokenizer is of a kind that never drops a character."""
    if stage is None:
        return True
    if stage["type"] == "Sequence":
        return all(_keeps_text(part, parts, known) for part in stage[parts])
    return stage["type"] in known and stage.get("behavior") != "Removed"
