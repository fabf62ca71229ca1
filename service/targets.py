"""What commands write: looked at before any work begins, so that a mistyped path costs nothing."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from engine import writable
from engine.errors import ConfigError, EngineError


def refuse_unwritable_file(option: str, file: Path | None) -> None:
    """See that ``file`` can be written; what it holds stays, and no new file is left.

    Args:
        option: That named it, for the message.
        file: ``None``: nothing is to be written.

    Raises:
        ConfigError: It cannot be written.
    """
    if file is None:
        return
    try:
        if file.is_dir():
            raise ConfigError(f"{option} {file}: is a directory")
        if file.exists() and not file.is_file():
            # Opening a pipe would wait for its reader, and closing it again would end what that reads
            if not os.access(file, os.W_OK):
                raise ConfigError(f"{option} {file}: cannot be written to")
            return
        if file.exists():
            with file.open("ab"):
                pass
            return
        # Where a link leads to no file, that file is what would be written, and the link stays
        target = Path(os.path.realpath(file))
        with target.open("xb"):
            pass
        target.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {file}: cannot be written to: {error.strerror}") from None


def make_writable_directory(option: str, directory: Path | None) -> None:
    """``engine.writable.make_writable_directory`` for an option.

    Args:
        option: That named it, for the message.
        directory: ``None``: nothing is to be written.

    Raises:
        ConfigError: It cannot be made, or not be written to.
    """
    if directory is not None:
        writable.make_writable_directory(f"{option} {directory}", directory)


def write_json(option: str, file: Path | None, report: msgspec.Struct) -> None:
    """Write ``report`` for people and programs to read.

    Raises:
        EngineError: The file, which could be written when the command began, cannot be any more.
    """
    if file is None:
        return
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as error:
        raise EngineError(f"{option} {file}: cannot be written to: {error.strerror}") from None
