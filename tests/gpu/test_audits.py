"""Audits of what captured steps emitted, by eager prefills of another form. Run: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from engine.engine import Engine
from tests.engine.drive import greedy
from tests.gpu.serving import ON_GPU, SHIPPED, schedules, serve, source_prompts

pytestmark = ON_GPU
TOKENS = 96
ROUNDING = 1 / 1000
"""Share of the tokens that rounding to 16 bits may move past the audit's margin: where two experts are nearly equal
to a router, it chooses another one (``tests.gpu.lossless``)."""


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.0), ("bfloat16", ROUNDING)])
def test_audits_find_what_rounding_does_and_nothing_else(
    dtype: str, share: float, record_property: Callable[[str, object], None]
) -> None:
    exact = {"attention_backend": "torch_mla", "max_graph_prefill_tokens": 64} if dtype == "float32" else {}
    engine: Engine = schedules(
        SHIPPED, dtype=dtype, max_num_seqs=13, prefix_cache=False, audit_rate=1.0, seed=1, **exact
    )["overlap"]
    prompts, counts = source_prompts(104), Counter[str]()
    for start in range(0, len(prompts), 13):
        batch = [(str(start + at), one, greedy(TOKENS)) for at, one in enumerate(prompts[start : start + 13])]
        served = serve(engine, batch)
        assert not served.eager_steps
        for name in ("audit_tokens", "audit_mismatches"):
            counts[name] += sum(served.of(name).values())
    engine.close()
    assert counts["audit_tokens"] == len(prompts) * TOKENS
    assert counts["audit_mismatches"] <= share * counts["audit_tokens"]
    told = f"{counts['audit_mismatches']} of {counts['audit_tokens']} tokens"
    record_property(f"audit {dtype}", told)
