"""The speculative step at a temperature: the output has exactly the target's distribution (field note B6)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from engine.types import SamplingParams
from tests.engine.drive import Answer, generate, make_engine
from tests.fixtures.checkpoints import F1, build_f1

VOCAB = 12
TOKENS = 20_000
FLOOR = 1e-4
"""A right implementation fails one test in ten thousand; the seeds are fixed, so it fails never or always."""


def next_probs(sharpness: float) -> dict[int, list[float]]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(VOCAB, VOCAB, generator=generator) * sharpness
    return {token: row.tolist() for token, row in enumerate(logits.softmax(dim=-1))}


@pytest.fixture(scope="module", params=["right", "partly", "wrong"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> F1:
    """A Markov chain with drafts from the target's own rows, from others for some tokens, or for all."""
    wrong = {"right": [], "partly": [1, 4, 5, 9], "wrong": list(range(VOCAB))}[request.param]
    return build_f1(
        tmp_path_factory.mktemp("chain") / "m",
        vocab=VOCAB, next_probs=next_probs(1.5), wrong_draft_tokens=wrong, eos=None, tokenizer="none",
    )  # fmt: skip


def _sample(f1: F1, params: SamplingParams, k: int) -> list[Answer]:
    engine = make_engine(f1.path, num_speculative_tokens=k, max_num_seqs=64, num_kv_pages=2400, seed=5)
    count = -(-TOKENS // params.max_tokens)
    return generate(engine, [[i % VOCAB, (i * 5) % VOCAB] for i in range(count)], params)


def transitions(answers: list[Answer], starts: list[int]) -> np.ndarray:
    counts = np.zeros((VOCAB, VOCAB))
    for answer, start in zip(answers, starts, strict=True):
        for current, following in zip([start, *answer.token_ids], answer.token_ids, strict=False):
            counts[current, following] += 1
    return counts


def filtered(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Rows of ``probs`` after the documented filters, from their definitions."""
    rows = []
    for row in probs.numpy():
        kept = row * (row >= min_p * row.max())
        if top_k:
            kept = kept * (kept >= np.sort(kept)[-top_k])
        order = np.argsort(-kept)
        mass = np.cumsum(kept[order]) / kept.sum()
        dropped = order[1:][mass[:-1] >= top_p] if top_p < 1 else []
        kept[dropped] = 0
        rows.append(kept / kept.sum())
    return np.stack(rows)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value over all rows of a transition table; impossible transitions must not have happened."""
    assert not counts[probs == 0].any()
    statistic, freedom = 0.0, 0
    for seen, p in zip(counts, probs, strict=True):
        expected = p * seen.sum()
        large = expected >= 5
        if large.sum() < 2:
            continue
        observed = np.append(seen[large], seen[~large].sum())
        expected = np.append(expected[large], expected[~large].sum())
        usable = expected > 0
        statistic += float(((observed[usable] - expected[usable]) ** 2 / expected[usable]).sum())
        freedom += int(usable.sum()) - 1
    return float(stats.chi2.sf(statistic, freedom))


CASES = [
    (1, {"temperature": 1.0}),
    (2, {"temperature": 0.5}),
    (3, {"temperature": 1.5}),
    (4, {"temperature": 1.0}),
    (3, {"temperature": 1.0, "top_k": 3}),
    (3, {"temperature": 1.0, "top_p": 0.9}),
    (2, {"temperature": 0.8, "min_p": 0.2, "top_p": 0.95}),
]


@pytest.mark.parametrize(
    ("k", "changes"), CASES, ids=[f"k{k}-{'-'.join(c)}{list(c.values())}" for k, c in CASES]
)
def test_b6_transitions_have_the_targets_distribution(chain: F1, k: int, changes: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=200, **changes)  # type: ignore[arg-type]
    answers = _sample(chain, params, k)
    starts = [(i * 5) % VOCAB for i in range(len(answers))]
    probs = filtered(chain.probs(params.temperature), params.top_k, params.top_p, params.min_p)
    assert chi_square(transitions(answers, starts), probs) > FLOOR


def test_b6_pairs_inside_a_step_are_independent_draws(chain: F1) -> None:
    """Joint counts of (first, second) token of a run after each token: the chain's product."""
    answers = _sample(chain, SamplingParams(max_tokens=200), 4)
    probs = chain.probs().numpy()
    joint = np.zeros((VOCAB, VOCAB * VOCAB))
    for i, answer in enumerate(answers):
        current, place = (i * 5) % VOCAB, 0
        for length, num_drafts, accepted in answer.steps:
            run = answer.token_ids[place : place + length]
            if num_drafts and accepted >= 1 and length >= 2:
                joint[current, run[0] * VOCAB + run[1]] += 1
            place, current = place + length, run[-1]
    # Given that the first draft was accepted, the second token is still the target's own draw
    for first in range(VOCAB):
        seen = joint.reshape(VOCAB, VOCAB, VOCAB)[:, first].sum(axis=0)
        if seen.sum() >= 100:
            assert chi_square(seen[None], probs[first][None]) > FLOOR / VOCAB


def test_b8_a_seed_gives_the_same_result_alone_among_others_and_in_another_slot(chain: F1) -> None:
    for k in (0, 3):
        engine = make_engine(chain.path, num_speculative_tokens=k)
        seeded = SamplingParams(max_tokens=40, seed=7)
        alone = generate(engine, [[1, 2]], seeded)[0].token_ids
        again = generate(engine, [[3, 4]] + [[1, 2]] * 3, seeded)
        assert [answer.token_ids for answer in again[1:]] == [alone] * 3
        other = generate(engine, [[1, 2]], SamplingParams(max_tokens=40, seed=8))[0].token_ids
        assert other != alone


def test_without_a_seed_every_request_and_every_start_differs(chain: F1) -> None:
    params = SamplingParams(max_tokens=40)
    seen = set()
    for _ in range(2):
        answers = generate(make_engine(chain.path), [[1, 2]] * 3, params)
        seen |= {tuple(answer.token_ids) for answer in answers}
    assert len(seen) == 6


def test_an_engine_seed_makes_unseeded_requests_repeatable(chain: F1) -> None:
    runs = [
        generate(make_engine(chain.path, seed=3), [[1, 2]] * 3, SamplingParams(max_tokens=40))
        for _ in range(2)
    ]
    assert [a.token_ids for a in runs[0]] == [a.token_ids for a in runs[1]]


def test_right_drafts_are_always_accepted_at_a_temperature(tmp_path: Path) -> None:
    """q = p: rejection would be a bug, and every verify emits K + 1 tokens."""
    f1 = build_f1(tmp_path / "m", vocab=VOCAB, next_probs=next_probs(1.0), eos=None, tokenizer="none")
    answer = generate(
        make_engine(f1.path, num_speculative_tokens=3), [[1, 2]], SamplingParams(max_tokens=400)
    )[0]
    assert answer.steps == [(4, 3, 3)] * 100
