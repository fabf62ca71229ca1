"""Sampling pieces against naive references, and their independence of the batch they run in."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.sampler import FULL, GREEDY, Variant, choose_variant, distribution, draw, process_logits, truncate
from engine.state import SlotState
from engine.types import SamplingParams

V = 23


def _state(
    *params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None
) -> SlotState:
    state = SlotState(
        num_slots=len(params),
        num_speculative_tokens=2,
        vocab_size=V,
        table_width=4,
        device=torch.device("cpu"),
    )
    prompt, output = prompt or [1], output or []
    for slot, p in enumerate(params):
        state.bind(slot, prompt + output, len(prompt), p, seed=slot)
    return state


def _naive_truncate(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Kept ids, by the definitions, one filter after the other."""
    weights = {i: math.exp(x) for i, x in enumerate(logits)}
    top = max(weights.values())
    weights = {i: w for i, w in weights.items() if w / top >= min_p}
    ranked = sorted(weights, key=lambda i: -weights[i])
    if 0 < top_k < len(ranked):
        ranked = ranked[:top_k]
    total, mass, kept = sum(weights[i] for i in ranked), 0.0, set()
    for i in ranked:
        if mass / total >= top_p and top_p < 1:
            break
        kept.add(i)
        mass += weights[i]
    return kept


@pytest.mark.parametrize("top_k", [0, 1, 3, V, 50])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_truncation_equals_the_definitions(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(4, 2, V, generator=torch.Generator().manual_seed(5))
    k = min(top_k, V) or V
    out = truncate(
        logits, torch.full((4, 1, 1), k), torch.full((4, 1, 1), top_p), torch.full((4, 1, 1), min_p)
    )
    for row, kept in zip(logits.flatten(0, 1), out.flatten(0, 1), strict=True):
        expected = _naive_truncate(row.tolist(), k, top_p, min_p)
        assert set(torch.isfinite(kept).nonzero().flatten().tolist()) == expected
        assert torch.equal(kept[list(expected)], row[list(expected)])


def test_a_row_gives_the_same_distribution_in_every_variant() -> None:
    plain = SamplingParams(max_tokens=9, temperature=0.7)
    state = _state(plain, SamplingParams(max_tokens=9, top_k=2, logit_bias={3: 4.0}))
    logits = torch.randn(1, 3, V, generator=torch.Generator().manual_seed(1)) * 4
    slot = torch.tensor([0])
    counts = torch.zeros(1, 3, V, dtype=torch.int32)
    positions = torch.tensor([[1, 2, 3]])
    processed = process_logits(logits, state, slot, counts, positions)
    assert torch.equal(processed, logits)
    lean = distribution(logits, state, slot, truncated=False)
    assert torch.equal(distribution(processed, state, slot, truncated=True), lean)
    assert torch.allclose(lean, (logits / 0.7).softmax(-1))


def test_greedy_row_is_one_hot_whatever_its_neighbours() -> None:
    state = _state(SamplingParams(max_tokens=9, temperature=0), SamplingParams(max_tokens=9))
    logits = torch.randn(2, 2, V, generator=torch.Generator().manual_seed(2))
    probs = distribution(logits, state, torch.tensor([0, 1]), truncated=True)
    assert torch.equal(probs[0].argmax(-1), logits[0].argmax(-1))
    assert torch.equal(probs[0].sum(-1), torch.ones(2)) and probs[0].max() == 1


def _penalised(logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """The documented order, one token at a time."""
    out = logits.clone()
    for token in range(V):
        out[token] += params.logit_bias.get(token, 0.0)
        if len(output) < params.min_tokens and token in params.stop_token_ids:
            out[token] = -math.inf
        count = output.count(token)
        if count or token in prompt:
            factor = params.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return out


def test_processing_equals_the_definitions_at_each_place_of_a_run() -> None:
    params = SamplingParams(
        max_tokens=9,
        min_tokens=4,
        stop_token_ids=(2, 5),
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.3,
        logit_bias={7: -3.0, 8: 2.0},
    )
    prompt, output, drafts = [4, 8, 9], [7, 7, 3], [7, 11]
    state = _state(params, prompt=prompt, output=output)
    logits = torch.randn(1, 3, V, generator=torch.Generator().manual_seed(3)) * 3
    runs = [output + drafts[:i] for i in range(3)]
    counts = torch.stack([torch.bincount(torch.tensor(run), minlength=V) for run in runs])[None].int()
    positions = torch.tensor([[len(prompt) + len(run) for run in runs]])
    got = process_logits(logits, state, torch.tensor([0]), counts, positions)
    for i, run in enumerate(runs):
        torch.testing.assert_close(got[0, i], _penalised(logits[0, i], params, prompt, run))


def test_draw_follows_the_distribution_and_never_takes_a_zero() -> None:
    probs = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0]).expand(1001, 6)
    uniform = torch.cat([torch.arange(1000) / 1000, torch.tensor([1 - 2.0**-53])]).double()
    got = draw(probs, uniform)
    assert torch.bincount(got[:1000], minlength=6).tolist() == pytest.approx([0, 200, 0, 500, 300, 0], abs=1)
    assert got[0] == 1 and got[-1] == 4


def test_variant_is_the_least_that_serves() -> None:
    greedy = SamplingParams(max_tokens=1, temperature=0, top_k=5)
    assert choose_variant([greedy]) == GREEDY
    assert choose_variant([greedy, SamplingParams(max_tokens=1)]) == Variant(True, False, False)
    everything = SamplingParams(max_tokens=1, top_p=0.5, presence_penalty=0.1)
    assert choose_variant([greedy, everything]) == FULL
