"""What has to hold on SM100 and SM103, where trtllm-gen attention runs: ``pytest -m gpu tests/gpu/test_b200.py``.

Not run yet: unverified on B200.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import make_backend
from engine.attention.trtllm_mla import TrtllmMla
from engine.kv.pool import SCRATCH_PAGE
from engine.layout import packed_layout, uniform_layout
from tests.engine.drive import Answer, generate, greedy, make_engine
from tests.fixtures.checkpoints import build_f2
from tests.fixtures.hf_layout import v3_config
from tests.gpu.paged import DIM, MAX_ERROR, Paged, packed, paged_case, row_errors

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() not in ((10, 0), (10, 3)),
        reason="trtllm-gen kernels need compute capability 10.0 or 10.3",
    ),
]
LENGTHS = [[4], [5, 64, 700, 4, 1025], [129] * 9, [8000, 33, 4, 4, 2048, 63, 65, 1, 500]]
PROMPTS = [
    [(7 * i + j * j) % 89 for j in range(length)] for i, length in enumerate([2, 9, 17, 40, 64, 5, 130])
]
CLOSE = 0.1
"""Nats between the two best tokens below which kernels that round differently may choose differently."""


def _attend(case: Paged, query: Tensor, lengths: list[int]) -> Tensor:
    backend = TrtllmMla(case.spec)
    layout = uniform_layout(query.shape[0], query.shape[1], case.spec.device)
    plan = backend.prepare(layout, case.table, case.lengths(lengths), tuple(lengths))
    return backend.attend(query, case.pages, plan)


def test_auto_chooses_it() -> None:
    assert make_backend("auto", paged_case([1]).spec).name == "trtllm_mla"


@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("heads", [2, 16, 32, 48, 128])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", LENGTHS, ids=["one", "mixed", "even", "long"])
def test_it_agrees_with_the_oracle(lengths: list[int], stride: int, heads: int, page_size: int) -> None:
    lengths = [max(length, stride) for length in lengths]
    case = paged_case(lengths, heads=heads, page_size=page_size)
    query = case.query(len(lengths), stride)
    errors = row_errors(_attend(case, query, lengths), case.expected(query, lengths))
    assert errors.max() < MAX_ERROR, errors


@pytest.mark.parametrize("stride", [1, 4])
def test_two_calls_leave_the_same(stride: int) -> None:
    """A workspace that the first call left dirty would change the second, or hang it."""
    lengths = [4000, 77, 12]
    case = paged_case(lengths)
    query = case.query(len(lengths), stride)
    assert torch.equal(_attend(case, query, lengths), _attend(case, query, lengths))


@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("stride", [1, 4])
def test_a_graph_replays_with_other_lengths_and_pages(stride: int, page_size: int) -> None:
    """Captured at padding lengths on the scratch page, as the engine does; replayed with live rows in between."""
    longest = [3000, 700, 129, 64, 2000]
    case = paged_case(longest, page_size=page_size)
    table = torch.full_like(case.table, SCRATCH_PAGE)
    seq_lens = torch.full((len(longest),), stride, dtype=torch.int64, device=case.spec.device)
    query = case.query(len(longest), stride)
    backend = TrtllmMla(case.spec)
    layout = uniform_layout(len(longest), stride, case.spec.device)
    bounds = (case.table.shape[1] * page_size,) * len(longest)

    def run() -> Tensor:
        return backend.attend(query, case.pages, backend.prepare(layout, table, seq_lens, bounds))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lengths in (longest, [stride, 700, 5, 64, 1], [31, 33, 63, 65, 1999], longest):
        lengths = [max(length, stride) for length in lengths]
        table.copy_(case.table)
        seq_lens.copy_(case.lengths(lengths))
        graph.replay()
        assert row_errors(out, case.expected(query, lengths)).max() < MAX_ERROR
    table.fill_(SCRATCH_PAGE)
    seq_lens.fill_(stride)
    graph.replay()
    assert torch.equal(out, torch.zeros_like(out)), "padding rows attend to zeros"


@pytest.mark.parametrize("page_size", [32, 64])
def test_a_ragged_prefill_agrees_with_the_oracle(page_size: int) -> None:
    queries, contexts = [300, 1, 70, 9], [0, 5, 512, 3000]
    case = paged_case([a + b for a, b in zip(queries, contexts, strict=True)], page_size=page_size)
    tokens = case.query(sum(queries))
    layout = packed_layout(queries, contexts)
    out = packed(TrtllmMla(case.spec), tokens, case.pages, layout, case.table)
    assert out.shape == (*tokens.shape[:-1], 512) and tokens.shape[-1] == DIM
    start = 0
    for row, (length, context) in enumerate(zip(queries, contexts, strict=True)):
        one = Paged(case.spec, case.pages, case.table[row : row + 1])
        part = slice(start, start + length)
        expected = one.expected(tokens[None, part], [context + length])
        assert row_errors(out[None, part], expected).max() < MAX_ERROR
        start += length


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = v3_config(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=1024,
    )
    return build_f2(tmp_path_factory.mktemp("f2") / "m", config, dtype=torch.bfloat16)


def _answers(path: Path, prompts: list[list[int]], **options: Any) -> list[Answer]:
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "prefix_cache": False,
        "max_num_seqs": 7,
        "kv_page_size": 64,
    }
    return generate(make_engine(path, **defaults | options), prompts, greedy(48, logprobs=2))


def _assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    """Token for token, up to a choice that was nearly a tie."""
    for one, other in zip(answers, expected, strict=True):
        for mine, theirs, seen in zip(one.token_ids, other.token_ids, other.logprobs, strict=False):
            if mine != theirs:
                (_, best), (_, second) = seen.top[:2]
                assert best - second < CLOSE, f"{mine} for {theirs}, which leads by {best - second} nats"
                break


@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("k", [0, 3])
def test_the_engine_with_graphs_equals_it_without(path: Path, k: int, schedule: str, page_size: int) -> None:
    options = {"num_speculative_tokens": k, "schedule": schedule, "kv_page_size": page_size}
    for size in (1, 3, 7):
        prompts = PROMPTS[:size]
        eager = _answers(path, prompts, graphs="off", attention_backend="trtllm_mla", **options)
        graphs = _answers(path, prompts, graphs="cuda", attention_backend="trtllm_mla", **options)
        _assert_same(graphs, eager)
        _assert_same(eager, _answers(path, prompts, graphs="off", attention_backend="torch_mla", **options))


def test_auto_serves_pages_of_32(path: Path) -> None:
    engine = make_engine(path, device="cuda", dtype="bfloat16", kv_page_size=32)
    assert engine.info.attention_backend == "trtllm_mla"
