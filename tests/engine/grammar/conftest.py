"""Models whose output is what a grammar leaves of it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.grammar.support import VOCAB, ids
from tests.fixtures.checkpoints import F1, build_f1


@pytest.fixture(scope="session")
def flat(tmp_path_factory: pytest.TempPathFactory) -> F1:
    """Every byte nearly equally probable after every other, with a slight favour for text: grammars do the work."""
    logits = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return build_f1(
        tmp_path_factory.mktemp("flat") / "m",
        vocab=VOCAB, tokenizer="bytes", next_probs={i: row.tolist() for i, row in enumerate(probs)},
    )  # fmt: skip


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> F1:
    """Greedy output after ``>`` is ``abcabcab...``: a cycle through the letters first."""
    return build_f1(
        tmp_path_factory.mktemp("words") / "m",
        vocab=VOCAB, tokenizer="bytes", cycle_start=ids(">abcdefgh"),
    )  # fmt: skip
