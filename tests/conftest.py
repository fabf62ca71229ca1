"""Checkpoints shared by the whole test session (built once in a temporary directory)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.checkpoints import F1, build_f1, build_f1n, build_f2
from tests.fixtures.tokenizers import CHAT_TEMPLATE

EMOJI_PIECES = (b"\xf0\x9f", b"\x98\x80", b"\xe4\xbd", b"\xa0\xe5\xa5", b"\xbd!")
"""Token byte strings that spell an emoji and two CJK characters, each character split over tokens."""


@pytest.fixture(scope="session")
def checkpoints_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def f1(checkpoints_root: Path) -> F1:
    """Vocabulary 64, every draft right, word tokenizer, chat template, EOS id 1."""
    return build_f1(checkpoints_root / "f1", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def f1_wrong(checkpoints_root: Path) -> F1:
    """F1 whose draft errs after every token divisible by 3."""
    return build_f1(checkpoints_root / "f1_wrong", wrong_draft_tokens=range(0, 64, 3))


@pytest.fixture(scope="session")
def f1_bytes(checkpoints_root: Path) -> F1:
    """F1 over a byte tokenizer; greedy output after ``a`` (id 2 + 97) spells the emoji and CJK pieces."""
    spelled = [2 + ord("a"), *range(258, 258 + len(EMOJI_PIECES))]
    return build_f1(
        checkpoints_root / "f1_bytes",
        vocab=300,
        tokenizer="bytes",
        pieces=EMOJI_PIECES,
        cycle_start=spelled,
    )


@pytest.fixture(scope="session")
def f1n(checkpoints_root: Path) -> F1:
    """F1n, vocabulary 64."""
    return build_f1n(checkpoints_root / "f1n")


@pytest.fixture(scope="session")
def f2(checkpoints_root: Path) -> Path:
    """A random DeepSeek-V3 shape with one MTP layer and a word tokenizer (vocabulary 96)."""
    return build_f2(checkpoints_root / "f2", tokenizer=True)
