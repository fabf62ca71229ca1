"""Tokenizer directories and chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from engine.errors import ConfigError
from service.chat_template import ChatTemplate, ChatTemplateError
from service.text import Tokenizer
from tests.fixtures.tokenizers import byte_tokenizer, write_tokenizer
from tests.service.harness import make_tokenizer, tokens_of


def test_directory_without_a_tokenizer_is_refused_naming_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"version": 1'])
def test_damaged_tokenizer_is_refused_naming_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "tokenizer_config.json is not a JSON object"),
        ("{", "tokenizer_config.json is not valid JSON"),
        ('{"eos_token": "<nope>"}', "'<nope>' is not in the vocabulary"),
        ('{"eos_token": 3}', "eos_token must be text"),
        ('{"chat_template": 3}', "chat_template must be text"),
    ],
)
def test_bad_tokenizer_config_is_refused(tmp_path: Path, config: str, message: str) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(300))
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"{{ \xff }}", r"chat_template\.jinja is not UTF-8: .* in position 3"),
        ("tokenizer_config.json", b'{"\xff": 1}', r"tokenizer_config\.json is not UTF-8"),
        ("tokenizer_config.json", b"[" * 100_000, r"tokenizer_config\.json is not valid JSON"),
    ],
)
def test_files_beside_the_tokenizer_that_cannot_be_read_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(300))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_unknown_decoder_is_refused() -> None:
    backend = RustTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(backend)


def test_sentencepiece_decoder_gives_bytes_and_spaces() -> None:
    backend = RustTokenizer(models.BPE({"<unk>": 0, "▁a": 1, "<0xF0>": 2, "b": 3}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert Tokenizer(backend).token_bytes.table == [b"<unk>", b" a", b"\xf0", b"b"]


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [({}, 0, 0), ({"add_bos_token": True}, 1, 0), ({"add_bos_token": True, "add_eos_token": True}, 1, 1)],
)
def test_add_bos_and_eos_token_are_honoured(config: dict[str, bool], before: int, after: int) -> None:
    tokenizer = make_tokenizer(**config)
    bare = tokens_of("ab")
    assert tokenizer.encode("ab") == [0] * before + bare + [1] * after
    assert tokenizer.encode("ab", add_special_tokens=False) == bare


def test_padding_and_truncation_saved_with_a_tokenizer_are_off() -> None:
    backend = byte_tokenizer(300)
    backend.enable_truncation(2)
    backend.enable_padding(length=10)
    assert Tokenizer(backend).encode("abc") == tokens_of("abc")


def test_lower_bound_of_tokens_never_exceeds_their_number() -> None:
    tokenizer = make_tokenizer()
    for text in ("", "a" * 100, "é" * 50, "<s></s>" * 20):
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.min_tokens("a" * 1000) >= 100


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(300), chat_template="config")
    assert render(Tokenizer.from_directory(tmp_path)) == "config"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert render(Tokenizer.from_directory(tmp_path)) == "file </s>"


def test_default_is_chosen_of_named_templates(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(300))
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert render(Tokenizer.from_directory(tmp_path)) == "yes"


def render(tokenizer: Tokenizer) -> str:
    return tokenizer.render_chat([{"role": "user", "content": "x"}], add_generation_prompt=True, variables={})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('only users speak') }}", "only users speak"),
        ("{% if %}", "not valid"),
        ("{{ messages[0].content.nope.nope }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
    ],
)
def test_e15_template_that_is_missing_invalid_or_raises_explains_itself(
    source: str | None, message: str
) -> None:
    template = ChatTemplate(source)
    with pytest.raises(ChatTemplateError, match=message):
        template.render([{"role": "user", "content": "x"}], {})


def test_templates_have_what_hugging_face_gives_them() -> None:
    source = (
        "{% for m in messages %}\n  {% if m.content == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m | tojson }}\n{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    messages = [{"content": "skip"}, {"content": "<é>"}]
    assert ChatTemplate(source).render(messages, {}) == '{"content": "<é>"}\n4'
