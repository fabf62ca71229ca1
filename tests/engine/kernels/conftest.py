"""Where the kernels run: on the GPU if there is one, else in Triton's interpreter on the CPU.

A test module starts with ``norm = pytest.importorskip("engine.kernels.norm", reason=...)``, which skips it where
Triton is not installed.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch


def _read_ranges_of_scalars() -> None:
    """The interpreter's scalars are arrays of one element, which NumPy 2.4 takes for an index no more."""
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when a kernel is defined, hence before engine.kernels is imported
    )
    _read_ranges_of_scalars()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where a test makes the tensors that it gives to a kernel."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
