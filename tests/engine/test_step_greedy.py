"""The speculative step, greedy: exact accept counts on F1 and F1n, and equality with K = 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.drive import Answer, generate, greedy, make_engine
from tests.fixtures.checkpoints import F1, build_f1, build_f2
from tests.fixtures.hf_layout import v2_config, v3_config

PROMPTS = [
    [5, 9],
    [3],
    [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17],
    [40, 2],
    [22, 23],
    [60, 1, 2],
    [33],
    [50, 51],
]


def _predicted(f1: F1, prompt: list[int], k: int, max_tokens: int) -> list[tuple[int, int, int]]:
    return [
        (len(step.token_ids), step.num_drafts, step.num_accepted)
        for step in f1.predict_steps(prompt, k, max_tokens)
    ]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("which", ["f1", "f1_wrong", "f1n"])
def test_accept_counts_are_exactly_as_predicted(
    which: str, k: int, batch: int, request: pytest.FixtureRequest
) -> None:
    f1: F1 = request.getfixturevalue(which)
    engine = make_engine(f1.path, num_speculative_tokens=k)
    prompts = PROMPTS[:batch]
    for prompt, answer in zip(prompts, generate(engine, prompts, greedy(30)), strict=True):
        assert answer.token_ids == f1.walk(prompt[-1], 30)
        assert answer.finish_reason == "length"
        assert answer.steps == _predicted(f1, prompt, k, 30)


def test_f1n_accepts_every_draft(f1n: F1) -> None:
    """4.0 of 4, or the number tells which MTP mistake it is (field note E10)."""
    answer = generate(make_engine(f1n.path, num_speculative_tokens=4), [[5, 9]], greedy(50))[0]
    assert [step[1:] for step in answer.steps] == [(4, 4)] * 10


@pytest.mark.parametrize("copies", [(), ("embed",), ("head",), ("embed", "head")])
def test_e8_mtp_copies_do_not_change_acceptance(copies: tuple[str, ...], tmp_path: Path) -> None:
    f1 = build_f1(tmp_path / "m", mtp_copies=copies)
    answer = generate(make_engine(f1.path, num_speculative_tokens=3), [[5, 9]], greedy(24))[0]
    assert answer.steps == [(4, 3, 3)] * 6


F2_SHAPES = {
    "v2_softmax": v2_config(num_nextn_predict_layers=0),
    "v3_groups": v3_config(),
    "v3_yarn": v3_config(
        rope_scaling={
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        }
    ),
}  # fmt: skip


def _random_prompts(count: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("shape", ["v3_groups", "v3_yarn"])
def test_i2_greedy_with_drafts_equals_greedy_without(shape: str, k: int, tmp_path: Path) -> None:
    config = F2_SHAPES[shape]
    path = build_f2(tmp_path / "m", config)
    prompts = _random_prompts(16, config["vocab_size"])
    plain = generate(make_engine(path, num_speculative_tokens=0), prompts, greedy(24))
    drafted = generate(make_engine(path, num_speculative_tokens=k), prompts, greedy(24))
    assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]


def test_greedy_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = build_f2(tmp_path / "m", F2_SHAPES["v3_groups"])
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = _random_prompts(6, F2_SHAPES["v3_groups"]["vocab_size"])
    answers = generate(make_engine(path, num_speculative_tokens=3), prompts, greedy(16))
    for prompt, answer in zip(prompts, answers, strict=True):
        out = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=16, min_new_tokens=16, do_sample=False, pad_token_id=0
        )
        assert answer.token_ids == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("k", [0, 3])
def test_a_stop_id_placed_at_each_position_of_a_run(f1: F1, k: int) -> None:
    """The sweep of field note B2: whatever the alignment, nothing survives behind the stop."""
    engine = make_engine(f1.path, num_speculative_tokens=k)
    walk = f1.walk(9, 20)
    for place in range(2 * (k + 1)):
        answer: Answer = generate(engine, [[5, 9]], greedy(20, stop_token_ids=(walk[place],)))[0]
        assert answer.token_ids == walk[: place + 1]
        assert (answer.finish_reason, answer.stop_token_id) == ("stop", walk[place])
        assert answer.steps == [
            (len(s.token_ids), s.num_drafts, s.num_accepted)
            for s in f1.predict_steps([5, 9], k, 20, (walk[place],))
        ]


@pytest.mark.parametrize("k", [0, 3])
def test_a_cap_placed_at_each_position_of_a_run(f1: F1, k: int) -> None:
    engine = make_engine(f1.path, num_speculative_tokens=k)
    for cap in range(1, 2 * (k + 1) + 1):
        answer = generate(engine, [[5, 9]], greedy(cap))[0]
        assert (answer.token_ids, answer.finish_reason) == (f1.walk(9, cap), "length")


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("k", [0, 3, 8])
def test_the_context_end_cuts_at_every_alignment(f1: F1, k: int, schedule: str) -> None:
    engine = make_engine(f1.path, num_speculative_tokens=k, max_model_len=24, schedule=schedule)
    for length in range(1, 24):
        prompt = f1.walk(0, length)
        answer = generate(engine, [prompt], greedy(100))[0]
        assert (answer.token_ids, answer.finish_reason) == (f1.walk(prompt[-1], 24 - length), "length")
