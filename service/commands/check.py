"""``eyas check``: everything that loading a checkpoint would verify, without serving it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console


def check(directory: Path) -> None:
    """Verify a checkpoint directory and print what it holds.

    Raises:
        EngineError: What is wrong, naming the key, file or tensor.
    """
    from engine.model.check import inspect_checkpoint

    Console().print(str(inspect_checkpoint(directory)), markup=False, highlight=False, soft_wrap=True)
