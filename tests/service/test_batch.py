"""``eyas generate --input``: OpenAI's batch format in, one answer a request out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, EngineDeadError
from service.commands.batch import run_batch
from service.settings import load_settings
from tests.engine.fake_engine import COUNT, FACTORY, RAISE, REFUSE, REFUSING_FACTORY
from tests.fixtures.tokenizers import CHAT_TEMPLATE, word_tokenizer, write_tokenizer
from tests.service.test_cli import run_cli


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "fake", word_tokenizer(1000), chat_template=CHAT_TEMPLATE)
    return tmp_path / "fake"


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def answers(model: Path, lines: list[str]) -> dict[str, dict[str, Any]]:
    """Responses by custom id."""
    source, target = model.parent / "in.jsonl", model.parent / "out.jsonl"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run_batch(load_settings({"model": model, "max_num_seqs": 2}), source, target, factory=FACTORY)
    results = [json.loads(text) for text in target.read_text(encoding="utf-8").splitlines()]
    assert len({result["id"] for result in results}) == len(results)
    assert all(result["error"] is None for result in results)
    return {result["custom_id"]: result["response"] for result in results}


def test_every_request_is_answered_as_over_http(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line(f"n{i}", prompt=[COUNT], max_tokens=1 + i, n=2) for i in range(20)]
    lines += [
        "",
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "w1 é"}], max_tokens=4),
        line("bad", prompt=[COUNT], temperature=9),
        line("refused", prompt=[REFUSE]),
        line("stream", prompt=[COUNT], stream=True),
        line("other", "/v1/embeddings", input="x"),
        line("model", prompt=[COUNT], model="nope"),
    ]
    got = answers(model, lines)
    assert len(got) == 26
    for i in range(20):
        body = got[f"n{i}"]["body"]
        assert got[f"n{i}"]["status_code"] == 200
        assert body["usage"]["completion_tokens"] == 2 * (1 + i)
        assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 2
    assert got["chat"]["body"]["object"] == "chat.completion"
    failed = {name: got[name]["body"]["error"]["param"] for name in ("bad", "stream", "other", "model")}
    assert failed == {"bad": "temperature", "stream": "stream", "other": "url", "model": "model"}
    assert got["refused"]["status_code"] == 400 and got["model"]["status_code"] == 404
    statistics = capsys.readouterr().err
    assert "26 requests, 5 failed" in statistics and "tokens/s" in statistics and "26/26" in statistics


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line("a", prompt="w2"), line("a", prompt="w2")], "line 2: custom_id 'a' is there twice"),
        ([line("a", prompt="w2"), "{"], "line 2"),
        (['{"custom_id": "a"}'], "line 1"),
        (['{"custom_id": 3, "url": "/v1/completions", "body": {}}'], "custom_id"),
        (["", "  "], "no request"),
    ],
)
def test_a_damaged_file_is_refused_before_any_work(model: Path, lines: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        answers(model, lines)
    assert not (model.parent / "out.jsonl").exists()


def test_files_that_cannot_be_used_are_refused_by_option(model: Path) -> None:
    settings = load_settings({"model": model})
    with pytest.raises(ConfigError, match="--input"):
        run_batch(settings, model / "none", model / "out", factory=FACTORY)
    source = model / "in"
    source.write_text(line("a", prompt="w2"))
    with pytest.raises(ConfigError, match="--output"):
        run_batch(settings, source, model / "no" / "out", factory=FACTORY)


def test_an_output_over_the_input_is_refused_and_the_input_kept(model: Path) -> None:
    source, link = model.parent / "in.jsonl", model.parent / "link.jsonl"
    source.write_text(line("a", prompt=[COUNT]))
    link.symlink_to(source)
    with pytest.raises(ConfigError, match="--output"):
        run_batch(load_settings({"model": model}), source, link, factory=FACTORY)
    assert source.read_text() == line("a", prompt=[COUNT])


@pytest.mark.parametrize("earlier", [None, "answers of an earlier run"])
def test_an_engine_that_cannot_start_leaves_the_output_as_it_was(model: Path, earlier: str | None) -> None:
    source, target = model.parent / "in.jsonl", model.parent / "out.jsonl"
    source.write_text(line("a", prompt=[COUNT]))
    if earlier is not None:
        target.write_text(earlier)
    with pytest.raises(EngineDeadError, match="model_type='x'"):
        run_batch(load_settings({"model": model}), source, target, factory=REFUSING_FACTORY)
    assert (target.read_text() if target.exists() else None) == earlier


def test_an_output_that_cannot_be_written_is_refused_before_the_engine_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr("service.commands.batch.InProcessEngineClient.start", start)
    (model / "in").write_text(line("a", prompt=[COUNT]))
    with pytest.raises(ConfigError, match="--output"):
        run_batch(load_settings({"model": model}), model / "in", model / "no" / "out", factory=FACTORY)


def test_what_was_done_before_the_engine_died_is_kept(model: Path) -> None:
    lines = [line(f"n{i}", prompt=[COUNT], max_tokens=2) for i in range(3)]
    lines += [
        line("raise", prompt=[RAISE]),
        *(line(f"m{i}", prompt=[COUNT], max_tokens=90) for i in range(9)),
    ]
    with pytest.raises(EngineDeadError, match="died"):
        answers(model, lines)
    done = [json.loads(text)["custom_id"] for text in (model.parent / "out.jsonl").read_text().splitlines()]
    assert {"n0", "n1", "n2"} >= set(done)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "x"], "--output"),
        (["--output", "x"], "--output"),
        (["w2", "--input", "x", "--output", "y"], "prompt"),
        (["--max-tokens", "3", "--input", "x", "--output", "y"], "max_tokens"),
    ],
)
def test_options_that_exclude_each_other(model: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_cli("generate", "--model", str(model), *arguments)
