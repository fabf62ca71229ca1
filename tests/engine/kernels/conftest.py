"""Where the kernels run: on the GPU if there is one, else in Triton's interpreter on the CPU.

A test module starts with ``norm = pytest.importorskip("engine.kernels.norm", reason=...)``, which skips it where
Triton is not installed.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when a kernel is defined, hence before engine.kernels is imported
    )


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where a test makes the tensors that it gives to a kernel."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
