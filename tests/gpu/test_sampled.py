"""Sampling inside the graph: the target's distribution, each request's own uniforms, and the CPU's decisions.

Run where there is a GPU: ``pytest -m gpu tests/gpu``. Steps are replayed: nothing here runs eager but prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.types import SamplingParams
from tests.engine.drive import generate, make_engine
from tests.engine.test_step_sampled import (
    FLOOR,
    TOKENS,
    VOCAB,
    chi_square,
    filtered,
    next_probs,
    transitions,
)
from tests.fixtures.checkpoints import F1, build_f1
from tests.gpu.serving import ON_GPU, serve

pytestmark = ON_GPU
ON_DEVICE: dict[str, Any] = {"device": "cuda", "graphs": "cuda", "dtype": "float32"}
MANY = {"max_num_seqs": 64, "num_kv_pages": 2400}
EACH: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 4},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.6},
    {"temperature": 0.9, "min_p": 0.1, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "logit_bias": {2: 3.0, 5: -4.0}},
    {"temperature": 1.0, "min_tokens": 30, "stop_token_ids": [3, 7]},
]
"""Parameters that one batch holds side by side."""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> F1:
    """A Markov chain whose drafts are another chain's after four of the twelve tokens."""
    return build_f1(
        tmp_path_factory.mktemp("chain") / "m",
        vocab=VOCAB, next_probs=next_probs(1.5), wrong_draft_tokens=[1, 4, 5, 9], eos=None, tokenizer="none",
    )  # fmt: skip


def params_of(changes: dict[str, Any], seed: int, max_tokens: int = 48) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **changes)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    "changes", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02}]
)
def test_transitions_have_the_targets_distribution(chain: F1, k: int, changes: dict[str, float]) -> None:
    engine = make_engine(chain.path, num_speculative_tokens=k, seed=5, **ON_DEVICE, **MANY)
    params = SamplingParams(max_tokens=200, **changes)  # type: ignore[arg-type]
    count = -(-TOKENS // params.max_tokens)
    answers = generate(engine, [[i % VOCAB, (i * 5) % VOCAB] for i in range(count)], params)
    starts = [(i * 5) % VOCAB for i in range(count)]
    probs = filtered(chain.probs(params.temperature), params.top_k, params.top_p, params.min_p)
    assert chi_square(transitions(answers, starts), probs) > FLOOR


def _tokens(engine: Engine, wanted: Sequence[tuple[str, dict[str, Any], int]]) -> dict[str, list[int]]:
    """What requests (name, parameters, seed) are answered, all added at once; every step is a replay."""
    served = serve(engine, [(name, [1, 2 + seed % 5], params_of(each, seed)) for name, each, seed in wanted])
    assert served.eager_steps == {}
    return {name: answer.token_ids for name, answer in served.answers.items()}


@pytest.mark.parametrize("k", [0, 3])
def test_a_batch_of_all_parameters_is_answered_as_on_a_cpu(chain: F1, k: int) -> None:
    """Token for token: both draw from the same distributions by the same uniforms."""
    wanted = [(f"{place}-{seed}", each, seed) for seed in range(6) for place, each in enumerate(EACH)]
    options: dict[str, Any] = {"num_speculative_tokens": k, "prefix_cache": False, "max_num_seqs": 13}
    found = _tokens(make_engine(chain.path, **options, **ON_DEVICE), wanted)
    cpu = serve(
        make_engine(chain.path, **options),
        [(name, [1, 2 + seed % 5], params_of(each, seed)) for name, each, seed in wanted],
    )
    assert found == {name: answer.token_ids for name, answer in cpu.answers.items()}


def test_seeds_belong_to_requests_not_to_rows(chain: F1) -> None:
    """Two seeds in one batch, then their rows swapped, then each alone."""
    engine = make_engine(chain.path, num_speculative_tokens=3, prefix_cache=False, **ON_DEVICE)
    each = {"temperature": 1.0, "top_p": 0.95}
    first, second = ("first", each, 10), ("second", each, 20)
    together = _tokens(engine, [first, second])
    assert together["first"] != together["second"]
    assert _tokens(engine, [second, first]) == together
    assert _tokens(engine, [first]) | _tokens(engine, [second]) == together


def test_a_row_does_not_depend_on_what_its_neighbours_ask(chain: F1) -> None:
    """Also a greedy one: alone it is served by another graph."""
    engine = make_engine(chain.path, num_speculative_tokens=3, prefix_cache=False, **ON_DEVICE)
    wanted = [(str(place), each, 7 + place) for place, each in enumerate(EACH)]
    together = _tokens(engine, wanted)
    for one in wanted:
        assert _tokens(engine, [one]) == {one[0]: together[one[0]]}


def test_a_long_vocabulary_keeps_to_its_limits(tmp_path: Path) -> None:
    """1500 tokens of equal logits but for a few: top_k and top_p draw from those, and only from those."""
    best = [11, 400, 777, 1203]
    odds = [1e-6] * 1500
    for token in best:
        odds[token] = (1 - 1496e-6) / 4
    f1 = build_f1(
        tmp_path / "m",
        vocab=1500,
        next_probs={token: odds for token in range(1500)},
        eos=None,
        tokenizer="none",
    )
    engine = make_engine(f1.path, num_speculative_tokens=2, **ON_DEVICE)
    for changes in ({"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.5}):
        answer = generate(engine, [[5, 6]], params_of(changes, 3, 200))[0]
        assert set(answer.token_ids) == set(best), changes
