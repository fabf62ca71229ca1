"""The version of the installed distribution."""

from __future__ import annotations

import importlib.metadata


def _installed_version() -> str:
    try:
        return importlib.metadata.version("eyas")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


VERSION = _installed_version()
