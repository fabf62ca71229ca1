"""The command line: help, refusals, and ``generate`` with a scripted engine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.errors import ConfigError, EngineError
from service.cli import app, main
from service.commands.generate import Sampling, generate, read_prompt
from service.settings import Settings, load_settings, option_name
from tests.engine.fake_engine import FACTORY, RAISE, REFUSING_FACTORY
from tests.fixtures.tokenizers import word_tokenizer, write_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "fake"
    write_tokenizer(directory, word_tokenizer(1000))
    return directory


def run_cli(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_help_names_every_option_with_its_default():
    code, text = run_cli("serve", "--help")
    assert code == 0
    for name in Settings.model_fields:
        assert f"{option_name(name)} " in text
    assert "[default: 8000]" in text
    assert "[default: 3]" in text
    for command in ("serve", "generate", "check", "bench"):
        assert command in run_cli("--help")[1]


def test_options_reach_the_settings(model: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Settings] = []

    def serve(settings: Settings) -> int:
        seen.append(settings)
        return 7

    monkeypatch.setattr("service.commands.serve.serve", serve)
    monkeypatch.setenv("EYAS_SEED", "5")
    monkeypatch.setenv("EYAS_PORT", "9000")
    arguments = [
        "--model",
        str(model),
        "--port",
        "0",
        "--no-prefix-cache",
        "--api-key",
        "a",
        "--api-key",
        "b,c",
    ]
    code, _ = run_cli("serve", *arguments, "--schedule", "sync")
    assert code == 7
    [settings] = seen
    assert settings.model_fields_set == {"model", "port", "no_prefix_cache", "api_key", "schedule", "seed"}
    assert (settings.port, settings.no_prefix_cache, settings.schedule, settings.seed) == (0, True, "sync", 5)
    assert settings.api_key == ("a", "b,c")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "x"], "--port"),
        (["serve", "--schedule", "fast"], "--schedule"),
        (["serve", "--no-such-option"], "--no-such-option"),
        (["serve", "--model", ""], "--model': must not be empty"),
        (["serve", "--nan-bundle-dir", ""], "--nan-bundle-dir': must not be empty"),
        (["check", ""], "'directory': must not be empty"),
        (["replay", ""], "'bundle': must not be empty"),
        (["replay", "b", "--model", ""], "--model': must not be empty"),
        (["bench", "gpu", "--model", ""], "--model': must not be empty"),
        (["bench", "gpu", "--save-weights", ""], "--save-weights': must not be empty"),
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], words: str):
    code, text = run_cli(*arguments)
    assert code == 2
    assert words in text


def test_main_turns_refusals_into_a_message_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["eyas", "serve", "--model", "some-one/some-model"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("eyas: --model some-one/some-model does not exist")
    assert "hf download some-one/some-model" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("arguments", "target", "named"),
    [
        (["bench", "gpu"], "bench_gpu.bench_gpu", "num_speculative_tokens=9: --device='x', max_model_len=1"),
        (["replay", "b"], "replay.replay", "num_speculative_tokens=9: --device='x', max_model_len=1"),
        (["bench"], "bench.bench", "--num-speculative-tokens=9: --device='x', --max-model-len=1"),
        (["serve"], "serve.serve", "--num-speculative-tokens=9: --device='x', --max-model-len=1"),
    ],
)
def test_messages_of_the_engine_name_options_that_the_command_has(
    arguments: list[str],
    target: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def refuse(*_: object) -> None:
        raise ConfigError("num_speculative_tokens=9: device='x', max_model_len=1")

    monkeypatch.setattr(f"service.commands.{target}", refuse)
    monkeypatch.setattr(sys, "argv", ["eyas", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (2, f"eyas: {named}\n")


def prompt_of(*ids: int) -> str:
    return " ".join(f"w{token}" for token in ids)


def test_generate_prints_text_and_statistics(model: Path, capsys: pytest.CaptureFixture[str]):
    settings = load_settings({"model": model})
    sampling = Sampling(max_tokens=6, temperature=0.0, top_p=1.0, stop=())
    generate(settings, prompt_of(2, 3), sampling, chat=False, factory=FACTORY)
    captured = capsys.readouterr()
    # Ids 0 and 1 are special: not part of the text.
    assert captured.out == "w2 w3 w4 w5\n"
    assert "2 prompt tokens, 6 tokens in" in captured.err
    assert "accept length" in captured.err


def test_generate_stops_at_a_stop_string(model: Path, capsys: pytest.CaptureFixture[str]):
    sampling = Sampling(max_tokens=50, temperature=0.0, top_p=1.0, stop=(" w4",))
    generate(load_settings({"model": model}), prompt_of(2), sampling, chat=False, factory=FACTORY)
    assert capsys.readouterr().out == "w2 w3\n"


@pytest.mark.parametrize(
    ("arguments", "sent", "words"),
    [
        (["a\udcff"], b"", "prompt: is not UTF-8"),
        ([], b"a\xff", "standard input is not UTF-8: .* in position 1"),
        (["--stop", "\udcff", "w2"], b"", "--stop: is not UTF-8"),
        (["--stop", "a", "--stop", "", "w2"], b"", "--stop: A stop string must have 1 to 1024 characters"),
        (["w2", *["--stop", "a"] * 17], b"", "--stop: At most 16 stop strings"),
    ],
)
def test_generate_refuses_text_that_the_api_would_refuse(
    arguments: list[str], sent: bytes, words: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr("service.commands.generate.generate", work)
    result = CliRunner().invoke(app, ["generate", "--model", str(model), *arguments], input=sent)
    assert isinstance(result.exception, ConfigError)
    assert re.match(words, str(result.exception))


def test_generate_reads_standard_input_where_there_is_no_prompt(model: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, Sampling]] = []

    def work(settings: Settings, prompt: str, sampling: Sampling, *, chat: bool) -> None:
        seen.append((prompt, sampling))

    monkeypatch.setattr("service.commands.generate.generate", work)
    command = ["generate", "--model", str(model), "--stop", "x", "--stop", "yz"]
    assert CliRunner().invoke(app, command, input="w2 \u00e9".encode()).exit_code == 0
    assert seen == [("w2 \u00e9", Sampling(128, 0.0, 1.0, ("x", "yz")))]
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="prompt"):
        read_prompt(None)


@pytest.mark.parametrize(
    ("prompt", "chat", "words"),
    [
        ("", False, "empty"),
        (prompt_of(*range(2, 102)), False, "at most 99"),
        (prompt_of(RAISE), False, "engine"),
        ("hello", True, "--chat"),
    ],
)
def test_generate_tells_what_it_cannot_do(model: Path, prompt: str, chat: bool, words: str):
    sampling = Sampling(max_tokens=5, temperature=0.0, top_p=1.0, stop=())
    with pytest.raises(EngineError, match=words):
        generate(load_settings({"model": model}), prompt, sampling, chat=chat, factory=FACTORY)


def test_a_model_that_cannot_be_loaded_is_told(model: Path):
    settings = load_settings({"model": model})
    sampling = Sampling(max_tokens=5, temperature=0.0, top_p=1.0, stop=())
    with pytest.raises(EngineError, match="model_type='x'"):
        generate(settings, "w2", sampling, chat=False, factory=REFUSING_FACTORY)
