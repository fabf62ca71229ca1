"""The matrix of parameters, see ``tests/service/matrix.py``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.service.matrix import (
    BATCHES,
    CHECKPOINTS,
    DRAWN,
    KS,
    LEAST_P_VALUE,
    STREAM,
    Cell,
    build,
    disagreements,
    p_values,
    run,
)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_parameter_means_the_same_however_it_is_run(checkpoint: str, tmp_path: Path) -> None:
    results = asyncio.run(run({checkpoint: build(tmp_path, checkpoint)}))
    wrong = {name: disagreements(results, name) for name in results.answers}
    assert not any(wrong.values()), {name: cells for name, cells in wrong.items() if cells}
    num_cells = len(KS) * len(STREAM) * len(BATCHES)
    assert all(len(answers) == num_cells for answers in results.answers.values())

    least = {name: min(p_values(results, name, checkpoint)) for name in DRAWN}
    assert min(least.values()) > LEAST_P_VALUE, least
    assert set.union(*results.refused.values()) == {400}

    # All of that would hold as well if a parameter were ignored.
    cell = Cell(checkpoint, KS[-1], False, 1)
    acting = ["max_tokens", "logit_bias", "echo"]
    if checkpoint == "f2":
        acting += ["presence_penalty", "frequency_penalty", "repetition_penalty"]
    for name in acting:
        assert results.answers[name][cell] != results.answers["plain"][cell]
