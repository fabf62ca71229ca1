"""Rows of a large vocabulary that several programs read together: their decisions, and that they always end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kv.pool import LatentPool
from engine.sampler import FULL
from engine.spec import Rows
from engine.state import NUM_DRAFTS, SEQ_LEN, SlotState
from engine.step_ops import PlainOps
from engine.types import SamplingParams
from tests.gpu.serving import ON_GPU

pytestmark = ON_GPU
K = 3
VOCABS = [20000, 129280]
REPLAYS = 3000
EACH: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": 0.8}],
    "top_p": [{"temperature": 0.6, "top_p": 0.95}],
    "top_k": [{"temperature": 0.8, "top_k": 50}],
    "all": [
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02,
         "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    ],
    "mixed": [
        {"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.95},
        {"temperature": 0.8}, {"temperature": 1.0, "frequency_penalty": 0.5},
    ],
}  # fmt: skip


def state_of(count: int, vocab: int, name: str) -> SlotState:
    device = torch.device("cuda")
    state = SlotState(
        num_slots=count, num_speculative_tokens=K, vocab_size=vocab, table_width=8, device=device
    )
    for slot in range(count):
        params = SamplingParams(max_tokens=100, **EACH[name][slot % len(EACH[name])])
        state.bind(slot, [1, 2, 3, 4], 2, params, slot)
    generator = torch.Generator(device=device).manual_seed(0)
    state.core[:count, SEQ_LEN], state.core[:count, NUM_DRAFTS] = 30, K
    state.core[:count, 3:] = torch.randint(0, vocab, (count, K + 1), generator=generator, device=device)
    state.draft_probs[:count] = torch.randn((count, K, vocab), generator=generator, device=device).softmax(-1)
    state.block_table[:] = 1
    return state


def logits_of(kind: str, *shape: int) -> Tensor:
    """``flat``: half of the vocabulary is a nucleus; ``peaked``: a few of thirty tokens, as language models are."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    x = torch.randn(*shape, generator=generator, device="cuda")
    if kind == "peaked":
        best = torch.randint(0, shape[-1], (*shape[:-1], 30), generator=generator, device="cuda")
        heights = torch.rand(best.shape, generator=generator, device="cuda") * 8 + 6
        x = (x * 2).scatter_add(-1, best, heights)
    return x.to(torch.bfloat16)


def ops_of(state: SlotState) -> tuple[Any, PlainOps]:
    from engine.kernels.step import FusedOps

    pool = LatentPool(
        num_layers=1, num_pages=50, page_size=64, latent_dim=1, dtype=torch.float32, device=state.core.device
    )
    return FusedOps(state, pool, K), PlainOps(state, pool, K)


def rows_of(plain: PlainOps, count: int) -> Rows:
    return plain.load(torch.arange(count, device="cuda"), None, (64,) * count, FULL, K + 1)


def check_alike(found: Tensor, expected: Tensor) -> None:
    """Distributions ``[R, V]`` are equal up to rounding, which may move top_p's end by one token, the least."""
    for one, other in zip(found, expected, strict=True):
        apart = (one > 0) != (other > 0)
        kept = torch.maximum(one, other)
        assert int(apart.sum()) <= 1 and bool((kept[apart] <= 1.001 * kept[kept > 0].min()).all())
        torch.testing.assert_close(one[~apart], other[~apart], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", ["flat", "peaked"])
@pytest.mark.parametrize("name", EACH)
@torch.inference_mode()
def test_teams_of_every_size_decide_as_the_plain_operators(name: str, kind: str, vocab: int) -> None:
    for count in (1, 2, 4, 7, 16):
        state = state_of(count, vocab, name)
        fused, plain = ops_of(state)
        rows, logits = rows_of(plain, count), logits_of(kind, count, K + 1, vocab)
        if kind == "peaked":  # half of the requests like their drafts
            for place in range(K):
                logits[::2, place].scatter_(1, rows.tokens[::2, place + 1, None], 12.0)
        found, expected = fused.accept(rows, logits, None), plain.accept(rows, logits, None)
        assert found.count.equal(expected.count) and found.flags.equal(expected.flags)
        kept = torch.arange(K + 1, device="cuda") <= expected.count[:, None]
        assert found.emitted[kept].equal(expected.emitted[kept])
        one = logits[:, 0].contiguous()
        token, _, _ = fused.propose(rows, one, found.seq_len, expected.history, 0)
        known, probs, _ = plain.propose(rows, one, found.seq_len, expected.history, 0)
        assert token.equal(known) and probs is not None
        sampled = state.floats[:count, 0] > 0
        check_alike(state.draft_probs[:count, 0][sampled], probs[sampled])


@pytest.mark.parametrize("count", [1, 2, 4])
@torch.inference_mode()
def test_replays_of_teams_end_and_are_all_alike(count: int) -> None:
    """Each launch takes its turns up where the last one left them; early starts of the next one change nothing."""
    state = state_of(count, VOCABS[-1], "all")
    fused, plain = ops_of(state)
    rows, logits = rows_of(plain, count), logits_of("peaked", count, K + 1, VOCABS[-1])
    one = logits[:, 0].contiguous()

    def run() -> tuple[Tensor, Tensor]:
        accepted = fused.accept(rows, logits, None)
        for number in range(K):
            token, _, _ = fused.propose(rows, one, rows.seq_len, accepted.history, number)
        return accepted.emitted, token

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    first = [tensor.clone() for tensor in out]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        graph.replay()
        for tensor, known in zip(out, first, strict=True):
            differing += (tensor != known).sum()
    assert int(differing) == 0
