"""Serving compiles no kernel, whatever the prompts' lengths. Run where there is a GPU: ``pytest -m gpu tests/gpu``.

Each configuration is served in a process of its own, which has compiled nothing but what its engine did when it was
loaded (and loads from Triton's cache on disk what an earlier one left there: that counts as compiling too).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.types import SamplingParams
from tests.engine.drive import generate, greedy, make_engine

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "eyas-14m"
LENGTHS = sorted({*range(2, 131, 7), 15, 16, 17, 31, 32, 33, 63, 64, 65})
AT_ONCE = (1, 3, 7)
PARAMS = [
    greedy(6),
    greedy(6, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=6, seed=1),
    SamplingParams(max_tokens=6, seed=2, temperature=0.7, top_k=12, top_p=0.9, frequency_penalty=0.4),
]


def _batches(size: int) -> Iterator[list[list[int]]]:
    """Every length once, ``size`` prompts at a time, the long ones beside the short ones."""
    mixed = [LENGTHS[place * 7 % len(LENGTHS)] for place in range(len(LENGTHS))]
    prompts = [[3 + (7 * length + at * at + size) % 4000 for at in range(length)] for length in mixed]
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def compiled_while_serving(options: dict[str, Any]) -> list[str]:
    """The kernels that were compiled after the engine was loaded; the last one is compiled on purpose."""
    from triton import knobs

    from engine.kernels.act import silu_mul

    compiled: list[str] = []

    def note(*, fn: Any, key: str, **_: Any) -> None:
        compiled.append(f"{fn.name}: {key}")

    engine = make_engine(MODEL, device="cuda", kv_page_size=64, max_num_seqs=8, **options)
    knobs.runtime.jit_cache_hook = note
    for params in PARAMS:
        for size in AT_ONCE:
            for prompts in _batches(size):
                generate(engine, prompts, params)
    silu_mul(torch.zeros(2, 2 * 123, device="cuda"))
    return compiled


@pytest.mark.parametrize(
    "options",
    [
        {"graphs": "cuda"},
        {"graphs": "cuda", "num_speculative_tokens": 0},
        {"graphs": "cuda", "max_graph_rows": 3, "prefill_chunk_size": 50, "prefix_cache": False},
        {"graphs": "off", "schedule": "sync"},
    ],
    ids=["captured", "without_drafts", "partly_captured", "eager"],
)
def test_serving_compiles_nothing(options: dict[str, Any]) -> None:
    assert len({*(length % 16 for length in LENGTHS)}) == 16
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_compile_once", json.dumps(options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *compiled, on_purpose = json.loads(done.stdout.splitlines()[-1])
    assert "silu_mul" in on_purpose, "the hook that counts was not called"
    assert compiled == []


if __name__ == "__main__":
    print(json.dumps(compiled_while_serving(json.loads(sys.argv[1]))))
