"""Directories that something is to be written to: made, and tried, before any work begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine.errors import ConfigError


def make_writable_directory(setting: str, directory: Path) -> None:
    """Make ``directory``, and what is above it, where they are not there.

    Only ``directory`` itself is made for its owner alone; what is above it gets the modes that the umask leaves.

    Args:
        setting: What named it, and its value, to begin the message with.

    Raises:
        ConfigError: It cannot be made, or not be written to.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileExistsError:
        raise ConfigError(f"{setting}: is not a directory") from None
    except OSError as error:
        raise ConfigError(f"{setting}: cannot be written to: {error.strerror}") from None
