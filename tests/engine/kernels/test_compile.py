"""The kernels compile for Hopper and for Blackwell on a machine that has neither."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow  # more than a minute each where Triton's cache is cold
@pytest.mark.timeout(700)
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile(capability: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.offline", str(capability)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "_skinny_linear" in done.stdout
