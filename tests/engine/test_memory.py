"""Sizes that cannot fit, and a tokenizer that does not, are refused by name before anything is made."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from engine import build, memory
from engine.errors import ConfigError
from engine.memory import free_bytes
from engine.model import loader
from engine.model.rope import RotaryTable
from tests.engine.drive import generate, greedy, make_engine
from tests.fixtures.checkpoints import build_f2
from tests.fixtures.hf_layout import v3_config
from tests.fixtures.tokenizers import word_tokenizer, write_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load_model", "Scheduler", "LatentPool"):
        monkeypatch.setattr(
            build, name, lambda *_, name=name, **__: pytest.fail(f"{name} before the refusal")
        )


@pytest.mark.usefixtures("nothing_is_made")
@pytest.mark.parametrize("pages", [10**9, 2**31 - 1])
def test_more_pages_than_memory_are_refused(tmp_path: Path, pages: int) -> None:
    told = rf"^num_kv_pages={pages}: the KV pool takes \d+\.\d GB, cpu has \d+\.\d GB free$"
    with pytest.raises(ConfigError, match=told):
        make_engine(build_f2(tmp_path), num_kv_pages=pages)


def test_pages_that_do_not_fit_beside_the_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([10**9, 10**9, 10**6])  # before anything, for the rotary table, once the weights are there
    monkeypatch.setattr(memory, "free_bytes", lambda device: next(left))
    with pytest.raises(ConfigError, match=r"^num_kv_pages=200: the KV pool takes 0\.0 GB"):
        make_engine(build_f2(tmp_path))


def test_an_address_space_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = free_bytes(CPU)
    assert unlimited > 1 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 10, resource.RLIM_INFINITY))
    assert free_bytes(CPU) == 0
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 50, resource.RLIM_INFINITY))
    assert free_bytes(CPU) > 1 << 20


def test_the_rotary_table_reaches_no_further_than_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(config: object, max_positions: int, device: torch.device) -> RotaryTable:
        assert max_positions < 1000, "a table of all positions that the checkpoint has"
        return RotaryTable(config, max_positions, device)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "RotaryTable", table)
    engine = make_engine(build_f2(tmp_path, v3_config(max_position_embeddings=10**9)), num_kv_pages=100)
    assert engine.info.max_model_len == 99 * 8
    [answer] = generate(engine, [[1, 2, 3]], greedy(4))
    assert len(answer.token_ids) == 4
    engine.close()


@pytest.mark.usefixtures("nothing_is_made")
def test_a_context_that_cannot_fit_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_f2(tmp_path, v3_config(max_position_embeddings=10**9))
    with pytest.raises(
        ConfigError, match=r"^max_model_len=1000000000: the KV pool .* holds only 792 positions"
    ):
        make_engine(path, num_kv_pages=100, max_model_len=10**9)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**6)
    told = r"^max_position_embeddings=1000000000: the rotary table of \d+ positions takes 0\.1 GB, cpu has 0\.0 GB"
    with pytest.raises(ConfigError, match=told):
        make_engine(path, num_kv_pages=None)
    with pytest.raises(ConfigError, match=r"^max_model_len=100000: the rotary table of 100000 positions"):
        make_engine(path, num_kv_pages=None, max_model_len=100000)


@pytest.mark.usefixtures("nothing_is_made")
def test_a_tokenizer_whose_end_the_model_cannot_emit_is_refused(tmp_path: Path) -> None:
    path, other = build_f2(tmp_path / "model"), tmp_path / "other"
    other.mkdir()
    write_tokenizer(other, word_tokenizer(300), eos_token="w96")
    with pytest.raises(
        ConfigError, match=r"^tokenizer='.*other': its eos_token has id 96, outside vocab_size=96 "
    ):
        make_engine(path, tokenizer=str(other))


def test_a_tokenizer_whose_end_is_the_last_id_serves(tmp_path: Path) -> None:
    path, other = build_f2(tmp_path / "model"), tmp_path / "other"
    other.mkdir()
    write_tokenizer(other, word_tokenizer(300), eos_token="w95")
    make_engine(path, tokenizer=str(other)).close()
