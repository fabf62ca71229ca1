"""Files and directories that commands write to: refused by the option's name before work begins."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from engine.errors import ConfigError, EngineError
from service.cli import main
from service.targets import make_writable_directory, refuse_unwritable_file, write_json


class Report(msgspec.Struct):
    value: int


def test_a_file_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    refuse_unwritable_file("--json", None)
    refuse_unwritable_file("--json", tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("kept")
    refuse_unwritable_file("--json", tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"


def test_a_link_stays_whether_its_file_is_there_or_not(tmp_path: Path) -> None:
    links = [tmp_path / "link.json", tmp_path / "second.json"]
    links[0].symlink_to("target.json")
    links[1].symlink_to("link.json")
    for link in links:
        refuse_unwritable_file("--json", link)
        assert sorted(tmp_path.iterdir()) == links
    (tmp_path / "target.json").write_text("kept")
    refuse_unwritable_file("--json", links[1])
    assert (tmp_path / "target.json").read_text() == "kept" and all(link.is_symlink() for link in links)
    links[0].unlink()
    links[0].symlink_to("absent/target.json")
    (tmp_path / "loop").symlink_to("loop")
    for link in (*links, tmp_path / "loop"):
        with pytest.raises(ConfigError, match=f"^--json {link}: "):
            refuse_unwritable_file("--json", link)
        assert link.is_symlink()


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refuse_unwritable_file("--json", tmp_path / "pipe")


@pytest.mark.parametrize("path", ["absent/report.json", "file/report.json", "directory", "x" * 300])
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigError, match=f"^--json {tmp_path / path}: "):
        refuse_unwritable_file("--json", tmp_path / path)


def test_a_directory_is_made_or_refused(tmp_path: Path) -> None:
    make_writable_directory("--save-weights", None)
    make_writable_directory("--save-weights", tmp_path / "a" / "b")
    make_writable_directory("--save-weights", tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    for path in ("file", "file/b"):
        with pytest.raises(ConfigError, match=f"^--save-weights {tmp_path / path}: "):
            make_writable_directory("--save-weights", tmp_path / path)


def test_a_disk_that_is_full_in_the_end_is_told(tmp_path: Path) -> None:
    write_json("--json", tmp_path / "r.json", Report(3))
    assert msgspec.json.decode((tmp_path / "r.json").read_bytes()) == {"value": 3}
    with pytest.raises(EngineError, match=r"^--json /dev/full: .*No space left"):
        write_json("--json", Path("/dev/full"), Report(3))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay", "/nowhere/bundle", "--json", "/proc/r.json"], "--json /proc/r.json: "),
        (["bench", "--json", "/proc/r.json"], "--json /proc/r.json: "),
        (["bench", "--prompts", "/nowhere/prompts"], "--prompts /nowhere/prompts: "),
        (["bench", "--batch-sizes", "4,4"], "--batch-sizes 4,4: 4 is there twice"),
        (["bench", "--batch-sizes", "4,²"], "--batch-sizes 4,²: must be integers"),
        (
            ["bench", "--max-model-len", "80", "--max-tokens", "50"],
            "--max-tokens 50: behind a prompt of 64 tokens that is 114, --max-model-len is 80",
        ),
        (["bench", "--max-model-len", "32"], "--max-tokens 128: "),
        (
            ["bench", "--max-num-seqs", "2", "--batch-sizes", "1,4"],
            "--batch-sizes 4: at most --max-num-seqs 2 requests",
        ),
        (["serve", "--audit-rate", "1.5"], "--audit-rate=1.5: "),
        (["serve", "--nan-bundle-dir", "/proc/b"], "--nan-bundle-dir /proc/b: "),
    ],
)
def test_commands_refuse_at_once_with_the_options_name(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eyas", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"eyas: {words}")
