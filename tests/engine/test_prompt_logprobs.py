"""Log-probabilities of prompt tokens (field note B10): the target's own, whatever K, chunks and cache."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import prompt_logprobs
from engine.engine import Engine
from engine.types import SamplingParams, TokenDelta, TokenLogprobs
from tests.engine.drive import greedy, make_engine, request
from tests.fixtures.checkpoints import F1, build_f1

CHUNK = 16
K = 3
LENGTHS = [1, 2, 3, K + 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK, 3 * CHUNK + 1, 3 * CHUNK + 2]
"""A prompt of n tokens prefills n - 1 positions."""


def _prompt(length: int, vocab: int = 64) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, vocab, (length,), generator=generator).tolist()


def _drain(engine: Engine) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    while engine.has_work():
        for delta in engine.iterate().deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
        engine._scheduler.check()
    assert engine._scheduler.stats().pages_used == 0
    return deltas


def _scores(engine: Engine, prompts: list[list[int]], **params: int) -> list[list[TokenLogprobs]]:
    for i, prompt in enumerate(prompts):
        engine.add(request(str(i), prompt, greedy(**{"max_tokens": 2, "prompt_logprobs": 4} | params)))
    deltas = _drain(engine)
    found = []
    for i in range(len(prompts)):
        first, *others = deltas[str(i)]
        assert first.prompt_logprobs is not None
        assert all(delta.prompt_logprobs is None for delta in others)
        found.append(first.prompt_logprobs)
    return found


def _assert_equal(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [(one.token_id, one.rank, [i for i, _ in one.top]) for one in found] == [
        (one.token_id, one.rank, [i for i, _ in one.top]) for one in expected
    ]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-5)


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("k", [0, K])
def test_each_token_after_the_first_is_scored_by_the_one_before_it(f1: F1, k: int, schedule: str) -> None:
    engine = make_engine(f1.path, num_speculative_tokens=k, prefill_chunk_size=CHUNK, schedule=schedule)
    log_probs = f1.probs().log()
    prompts = [_prompt(length) for length in LENGTHS]
    prompts.append(f1.walk(5, 20))  # every token the most probable one
    for prompt, scores in zip(prompts, _scores(engine, prompts), strict=True):
        assert [one.token_id for one in scores] == prompt[1:]
        for current, one in zip(prompt, scores, strict=False):
            assert one.logprob == pytest.approx(float(log_probs[current, one.token_id]), abs=1e-4)
            assert one.top[0] == (
                f1.next_token(current),
                pytest.approx(float(log_probs[current].max()), abs=1e-4),
            )
            assert len(one.top) == 4 and (one.rank == 1) == (one.token_id == one.top[0][0])


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_b10_scores_do_not_depend_on_speculation_chunks_or_neighbours(f2: Path, max_tokens: int) -> None:
    prompts = [_prompt(length, 96) for length in LENGTHS]
    whole = make_engine(f2, num_speculative_tokens=0, prefill_chunk_size=512)
    alone = [_scores(whole, [prompt], max_tokens=max_tokens)[0] for prompt in prompts]
    assert [len(scores) for scores in alone] == [length - 1 for length in LENGTHS]
    for k in (0, K):
        for schedule in ("sync", "overlap"):
            engine = make_engine(
                f2, num_speculative_tokens=k, prefill_chunk_size=CHUNK, schedule=schedule, max_num_seqs=4
            )
            for found, expected in zip(_scores(engine, prompts, max_tokens=max_tokens), alone, strict=True):
                _assert_equal(found, expected)


def test_scores_agree_with_those_of_generated_tokens(f2: Path) -> None:
    """What a token's log-probability was when it was emitted is what it is in a prompt."""
    engine = make_engine(f2, num_speculative_tokens=K)
    engine.add(request("a", _prompt(7, 96), greedy(30, logprobs=4)))
    deltas = _drain(engine)["a"]
    emitted = [entry for delta in deltas for entry in delta.logprobs or []]
    text = _prompt(7, 96) + [one.token_id for one in emitted]
    found = _scores(engine, [text])[0][6:]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in emitted], abs=1e-4)


def test_a_prompt_in_the_prefix_cache_is_computed_again(f2: Path) -> None:
    engine = make_engine(f2)
    prompt = _prompt(40, 96)
    first = _scores(engine, [prompt])[0]
    engine.add(request("cached", prompt, greedy(1)))
    assert _drain(engine)["cached"][0].num_cached_tokens > 0
    engine.add(request("scored", prompt, greedy(1, prompt_logprobs=4)))
    (delta,) = _drain(engine)["scored"]
    assert delta.num_cached_tokens == 0
    assert delta.prompt_logprobs is not None
    _assert_equal(delta.prompt_logprobs, first)


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_no_tokens_wanted_ends_with_the_prefill(f1: F1, schedule: str) -> None:
    engine = make_engine(f1.path, schedule=schedule, prefill_chunk_size=CHUNK, max_model_len=60)
    for length in (1, 2, 33, 60):
        engine.add(request(f"scored{length}", _prompt(length), greedy(0, prompt_logprobs=0)))
        engine.add(request(f"plain{length}", _prompt(length), greedy(0)))
    engine.add(request("free", [4, 5], greedy(20)))
    deltas = _drain(engine)
    assert [token for delta in deltas.pop("free") for token in delta.token_ids] == f1.walk(5, 20)
    for name, (delta,) in deltas.items():
        assert (delta.token_ids, delta.finish_reason) == ([], "length")
        if name.startswith("plain"):
            assert delta.prompt_logprobs is None
        else:
            assert delta.prompt_logprobs is not None
            assert len(delta.prompt_logprobs) == int(name.removeprefix("scored")) - 1
            assert all(one.top == [] for one in delta.prompt_logprobs)


def test_preempted_and_aborted_requests_are_scored_whole_or_not_at_all(f1: F1) -> None:
    """Pages for two of four: the others give way, before or after their first token."""
    for schedule in ("sync", "overlap"):
        engine = make_engine(f1.path, schedule=schedule, num_kv_pages=14, prefill_chunk_size=CHUNK)
        prompts = [_prompt(20 + i) for i in range(4)]
        for i, prompt in enumerate(prompts):
            engine.add(request(str(i), prompt, greedy(40, prompt_logprobs=1)))
        engine.iterate()
        engine.abort("1")
        deltas = _drain(engine)
        assert set(deltas) == {"0", "2", "3"}
        for name, mine in deltas.items():
            told = [delta.prompt_logprobs for delta in mine if delta.prompt_logprobs is not None]
            assert [[one.token_id for one in scores] for scores in told] == [prompts[int(name)][1:]]


def test_only_a_slice_of_the_logits_exists_at_once(f2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(f2)
    prompt = _prompt(40, 96)
    whole = _scores(engine, [prompt])[0]
    sizes = []
    score_slice = prompt_logprobs._score_slice

    def recorded(logits: torch.Tensor, ids: torch.Tensor) -> prompt_logprobs._Scores:
        sizes.append(logits.numel())
        return score_slice(logits, ids)

    monkeypatch.setattr(prompt_logprobs, "_score_slice", recorded)
    monkeypatch.setattr(prompt_logprobs, "LOGITS_AT_ONCE", 7 * 96)
    _assert_equal(_scores(engine, [prompt])[0], whole)
    assert max(sizes) == 7 * 96 and sum(sizes) == 39 * 96


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_whose_states_are_not_finite_fails(tmp_path: Path, max_tokens: int) -> None:
    f3 = build_f1(tmp_path / "m", nan_tokens=[9], tokenizer="none")
    engine = make_engine(f3.path)
    engine.add(request("bad", [3, 9, 4], SamplingParams(max_tokens=max_tokens, prompt_logprobs=1)))
    engine.add(
        request("good", [3, 5, f3.walk(9, 3)[-1]], SamplingParams(max_tokens=max_tokens, prompt_logprobs=1))
    )
    deltas = _drain(engine)
    assert deltas["bad"][-1].error is not None and deltas["bad"][-1].error.code == "numerical_error"
    assert deltas["good"][0].prompt_logprobs is not None and deltas["good"][-1].finish_reason == "length"


def test_a_head_that_is_not_finite_ends_a_request_for_scores(tmp_path: Path) -> None:
    """The states behind it are finite, so only the scores' own logits tell."""

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][3] = float("nan")

    engine = make_engine(build_f1(tmp_path / "m", edit_tensors=poison).path)
    engine.add(request("a", [5, 9, 7], greedy(0, prompt_logprobs=1)))
    deltas = [delta for _ in range(20) if engine.has_work() for delta in engine.iterate().deltas]
    assert [delta.finish_reason for delta in deltas] == ["error"]
    assert deltas[0].error is not None and deltas[0].error.code == "numerical_error"


def test_a_fault_of_the_first_drafts_is_counted_once(f1: F1, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the prompt told comes first, the step that would have verified them next."""
    engine = make_engine(f1.path, prefix_cache=False)
    draft, poisoned = engine._runner.draft, []
    assert draft is not None
    original = draft.logits

    def logits(hidden: Tensor) -> Tensor:
        out = original(hidden)
        if not poisoned:
            poisoned.append(True)
            out[0, 3] = math.nan
        return out

    monkeypatch.setattr(draft, "logits", logits)
    engine.add(request("a", [5, 9, 3], greedy(6, prompt_logprobs=1)))
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    while engine.has_work():
        for one in engine.iterate().stats.counts:
            counts[one.name, one.labels] += one.value
    assert counts["nan_guard_trips", ("draft", "nan")] == 1
    assert counts["nan_guard_actions", ("drafts_dropped", "draft")] == 1


def test_who_only_prefills_is_not_drafted_for(f1: F1) -> None:
    engine = make_engine(f1.path)
    engine.add(request("a", [5, 9, 3], greedy(0, prompt_logprobs=1)))
    phases = {forward.phase for forward in engine.iterate().stats.forwards}
    assert phases == {"prefill"}
