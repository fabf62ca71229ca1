"""``eyas check``: everything that loading a checkpoint would verify, and its values, without serving it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Console

MOST_SHOWN: Final = 20
"""Tensors that are named; a checkpoint that went wrong as a whole has thousands."""


def check(directory: Path) -> None:
    """Verify a checkpoint directory and print what it holds, each tensor with NaN or infinity included.

    Raises:
        EngineError: What is wrong, naming the key, file or tensor.
    """
    from engine.errors import CheckpointError
    from engine.model.check import inspect_checkpoint
    from engine.model.finite import find_non_finite

    report = inspect_checkpoint(directory)
    with Console(stderr=True).status("reading values") as status:
        bad = find_non_finite(
            directory, lambda done, total: status.update(f"reading tensor {done + 1} of {total}")
        )
    lines = [str(report)]
    lines += [f"{'NOT FINITE':<18}{one}" for one in bad[:MOST_SHOWN]] or [f"{'values':<18}all finite"]
    if len(bad) > MOST_SHOWN:
        lines.append(f"{'NOT FINITE':<18}and {len(bad) - MOST_SHOWN} more tensors")
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if bad:
        raise CheckpointError(f"{directory}: not finite: {len(bad)} tensors, first {bad[0]}")
