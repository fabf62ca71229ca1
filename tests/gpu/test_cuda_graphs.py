"""Captured steps on a real GPU: replay = eager = alone. Run where there is one: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.contract import GraphKey
from engine.types import SamplingParams
from tests.engine.drive import Answer, generate, greedy, make_engine
from tests.fixtures.checkpoints import F1, build_f1, build_f2
from tests.gpu.inject import graphs_of
from tests.gpu.serving import DEVICE, FLASH_DIMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[(7 * i + j * j) % 89 for j in range(length)] for i, length in enumerate([1, 2, 9, 17, 40, 64, 5])]
PARAMS = [
    greedy(24),
    SamplingParams(max_tokens=24, seed=1),
    SamplingParams(max_tokens=24, seed=2, temperature=0.7, top_k=12, top_p=0.9, frequency_penalty=0.4),
    greedy(24, repetition_penalty=1.4, logit_bias={3: 2.0}, min_tokens=3, stop_token_ids=(3,)),
]
CUDA = {"device": "cuda", "dtype": "float32", "prefix_cache": False, "max_graph_prefill_tokens": 48}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_f2(tmp_path_factory.mktemp("f2") / "m")


def _tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("k", [0, 3])
def test_replay_equals_eager_equals_the_cpu(path: Path, k: int, schedule: str) -> None:
    captured = make_engine(
        path, graphs="cuda", schedule=schedule, num_speculative_tokens=k, max_num_seqs=7, **CUDA
    )
    eager = make_engine(path, graphs="off", num_speculative_tokens=k, max_num_seqs=7, **CUDA)
    cpu = make_engine(path, num_speculative_tokens=k, prefix_cache=False)
    for params in PARAMS:
        for size in (1, 3, 7):
            expected = _tokens(generate(cpu, PROMPTS[:size], params))
            assert _tokens(generate(captured, PROMPTS[:size], params)) == expected
            assert _tokens(generate(eager, PROMPTS[:size], params)) == expected


def test_steady_decode_never_runs_eager(path: Path) -> None:
    engine = make_engine(path, graphs="cuda", max_num_seqs=7, **CUDA)
    from tests.engine.drive import request

    for size in range(1, 8):
        for index, prompt in enumerate(PROMPTS[:size]):
            engine.add(request(str(index), prompt, greedy(20)))
        while engine.has_work():
            for forward in engine.iterate().stats.forwards:
                if forward.phase == "step":
                    assert (forward.path, forward.reason) == ("replay", "none")


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("which", ["f1", "f1_wrong", "f1n"])
def test_accept_counts_are_exact(which: str, k: int, request: pytest.FixtureRequest) -> None:
    f1: F1 = request.getfixturevalue(which)
    engine = make_engine(f1.path, graphs="cuda", num_speculative_tokens=k, **CUDA)
    prompts = [[5, 9], [3], [40, 2], [22, 23], [60, 1, 2]]
    for prompt, answer in zip(prompts, generate(engine, prompts, greedy(30)), strict=True):
        expected = f1.predict_steps(prompt, k, 30)
        assert answer.steps == [(len(s.token_ids), s.num_drafts, s.num_accepted) for s in expected]
        assert answer.token_ids == f1.walk(prompt[-1], 30)


def test_rows_that_outgrow_the_short_graphs_go_on_in_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper few query tokens and keys have a kernel of their own; here it ends after 96 positions."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0 (Hopper)")
    monkeypatch.setattr("engine.attention.flash_mla.split_length", lambda tokens: 96)
    f1 = build_f1(tmp_path / "m", eos=None, dtype=torch.bfloat16, **FLASH_DIMS)
    options = DEVICE | {"kv_page_size": 64, "num_kv_pages": 40, "max_model_len": 256, "max_num_seqs": 2}
    engine = make_engine(f1.path, **options)
    graphs = graphs_of(engine)
    replays: Counter[bool] = Counter()
    replay = graphs._replay

    def counted(key: GraphKey | None, *args: Any) -> Any:
        assert key is not None
        replays[key.short] += key.phase == "step"
        return replay(key, *args)

    monkeypatch.setattr(graphs, "_replay", counted)
    for prompts in ([[5, 9]], [[5, 9], [22, 23]]):
        replays.clear()
        answers = generate(engine, prompts, greedy(160))
        assert _tokens(answers) == [f1.walk(prompt[-1], 160) for prompt in prompts]
        assert replays[True] > 10 and replays[False] > 10
