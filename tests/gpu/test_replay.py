"""``eyas replay`` on a GPU: what a CUDA graph's replay gives is recorded inside the graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.guard import HALTING
from engine.replay import replay
from tests.engine.drive import greedy
from tests.engine.live import Live, place
from tests.fixtures.checkpoints import build_f1, build_f2
from tests.fixtures.hf_layout import v3_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_poisoned_embedding_is_named_in_eager_and_replay(tmp_path: Path) -> None:
    f3 = build_f1(tmp_path / "m", nan_tokens=[30], eos=None)
    live = Live.start(f3.path, [4, 30], greedy(9), device="cuda")
    report = replay(live.bundle(tmp_path / "b", live.run_until(HALTING)))
    assert report.graphs == "cuda" and report.reproduced and report.first_parting is None
    assert report.eager is not None and report.replay is not None
    assert place(report.eager.first_non_finite) == ("verify", "embedding", 1)
    assert place(report.replay.first_non_finite) == ("verify", "embedding", 1)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_healthy_step_agrees_everywhere(tmp_path: Path, rows: int) -> None:
    path = build_f2(tmp_path / "m", v3_config(num_hidden_layers=2, first_k_dense_replace=1))
    live = Live.start(
        path, [5, 6, 7], greedy(40), device="cuda", graphs="off"
    )  # the hook is no part of a graph
    live.poison_logits(2)
    report = replay(live.bundle(tmp_path / "b", live.run_until(HALTING), rows=rows))
    assert not report.reproduced and report.first_parting is None
    assert report.eager is not None and report.replay is not None
    assert report.eager.emitted == report.replay.emitted
    assert all(row.eager_finite and row.replay_finite for row in report.places)
