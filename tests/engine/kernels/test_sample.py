"""The kernels that sample, against the plain operators: the same decisions from the same uniforms.

Sums are rounded in another order, so a uniform that falls within rounding of a boundary could decide otherwise;
none of these fixed ones does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.guard import Flag
from engine.sampler import FULL, Variant, mask_words
from engine.spec import Accepted, Drafted, Rows
from engine.state import FLAGS, NUM_DRAFTS, SlotState
from engine.types import SamplingParams
from tests.engine.kernels.step_pair import (
    INF,
    NAN,
    SLOTS,
    Pair,
    make_state,
    plant,
    same,
    tied_logits,
)

step = pytest.importorskip("engine.kernels.step", reason="Triton is not installed")

SAMPLED = Variant(sampled=True, truncated=False, processed=False)
CONSTRAINED = replace(FULL, constrained=True)


def _params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, **options)


PARAMS = [
    _params(temperature=0.0),
    _params(temperature=1.0),
    _params(temperature=0.6, top_p=0.8),
    _params(temperature=1.3, top_k=5),
    _params(temperature=0.9, min_p=0.15),
    _params(temperature=1.1, top_k=20, top_p=0.7, min_p=0.02),
    _params(temperature=0.7, presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3),
    _params(temperature=0.0, repetition_penalty=1.7, logit_bias={3: 2.0, 7: -100.0}),
    _params(temperature=0.8, top_p=0.9, min_tokens=200, stop_token_ids=[1, 2, 5], logit_bias={5: 40.0}),
]
"""One for each slot."""


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A row is read at once, and its search never leaves registers; or, as if it were long, in many pieces."""
    if request.param == "large":
        monkeypatch.setattr(step, "MAX_VALUES", 32)
        monkeypatch.setattr(step, "FEW", 4)
    return str(request.param)


def bound_state(k: int, vocab: int, generator: torch.Generator) -> SlotState:
    """Slots of requests with ``PARAMS``, in the middle of their output."""
    state = make_state(k, vocab, generator)
    core, table = state.core.clone(), state.block_table.clone()
    for slot, params in enumerate(PARAMS):
        tokens = torch.randint(0, vocab, (14,), generator=generator).tolist()
        state.bind(slot, tokens, 6, params, 1000 * k + slot)
    state.core.copy_(core)
    state.block_table.copy_(table)
    state.core[:, FLAGS] = 0
    state.draft_probs[:] = torch.randn(state.draft_probs.shape, generator=generator).mul(2).softmax(-1)
    return state


@dataclass
class Sampling:
    """A pair of operators in one step of sampled rows."""

    pair: Pair
    rows: tuple[Rows, Rows]

    @classmethod
    def of(
        cls, state: SlotState, k: int, device: torch.device, slots: list[int], variant: Variant
    ) -> Sampling:
        pair = Pair.of(state, k, device)
        return cls(pair, pair.load(slots, variant=variant))

    def accept(self, logits: Tensor, allowed: Tensor | None = None) -> tuple[Accepted, Accepted]:
        device = self.pair.device
        moved = None if allowed is None else allowed.to(device)
        found = self.pair.fused.accept(self.rows[0], logits.to(device), moved)
        expected = self.pair.plain.accept(self.rows[1], logits, allowed)
        for name in ("count", "seq_len", "last", "flags"):
            same(getattr(found, name), getattr(expected, name), name)
        live = (self.rows[1].slots < SLOTS)[:, None]  # what a padding row emits means nothing
        if expected.history is not None:
            assert found.history is not None
            same(found.history.cpu()[live[:, 0]], expected.history[live[:, 0]], "history")
        kept = (torch.arange(logits.shape[1]) <= expected.count[:, None]) & live
        same(found.emitted.cpu()[kept], expected.emitted[kept], "emitted")
        assert bool(((found.emitted >= 0) & (found.emitted < logits.shape[-1])).all())
        return found, expected

    def draft(
        self, logits: list[Tensor], histories: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Drafted, Drafted]:
        """Drafts from ``logits`` ``[B, V]`` each; those of sampled rows come from the same distributions."""
        made = []
        for ops, own, history, device in zip(
            (self.pair.fused, self.pair.plain), self.rows, histories, (self.pair.device, "cpu"), strict=True
        ):
            steps = []
            for number, one in enumerate(logits):
                steps.append(ops.propose(own, one.to(device), own.seq_len + 1, history, number))
                if history is not None:
                    history = torch.cat([history, steps[-1][0][:, None]], dim=1)
            probs = [one[1] for one in steps if one[1] is not None]
            drafted = Drafted(
                [one[0] for one in steps],
                torch.stack(probs, dim=1) if probs else None,
                [one[2] for one in steps],
            )
            made.append(drafted)
        for found, expected in zip(made[0].found, made[1].found, strict=True):
            same(found, expected, "found")
        live = (self.rows[1].slots < self.pair.plain_state.padding_slot).tolist()
        sound = [
            live[row] and not bool(torch.stack(made[1].found)[:, row].any()) for row in range(len(logits[0]))
        ]
        for found, expected in zip(made[0].tokens, made[1].tokens, strict=True):
            same(found.cpu()[sound], expected[sound], "tokens")
            assert bool(((found >= 0) & (found < logits[0].shape[1])).all())
        self._same_probs(made[1], sound)
        return made[0], made[1]

    def _same_probs(self, drafted: Drafted, sound: list[bool]) -> None:
        slots = self.rows[1].slots
        if not self.rows[1].variant.sampled:
            return
        sampled = self.pair.plain_state.floats[slots, 0] > 0
        for row in (torch.tensor(sound) & sampled).nonzero().flatten().tolist():
            assert drafted.probs is not None
            found = self.pair.fused_state.draft_probs[slots[row]].cpu()
            torch.testing.assert_close(found, drafted.probs[row], rtol=1e-5, atol=1e-7)
            assert (found > 0).equal(drafted.probs[row] > 0)

    def commit(self, accepted: tuple[Accepted, Accepted], drafted: tuple[Drafted, Drafted]) -> None:
        found = self.pair.fused.commit(self.rows[0], accepted[0], drafted[0])
        expected = self.pair.plain.commit(self.rows[1], accepted[1], drafted[1])
        same(found[:, -3:], expected[:, -3:], "packed")
        for name in ("core", "output_counts"):
            one, other = getattr(self.pair.fused_state, name), getattr(self.pair.plain_state, name)
            same(one, other, name)


def spread_logits(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).mul(2.5).to(dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [0, 1, 3])
def test_steps_decide_as_the_plain_operators(k: int, seed: int, size: str, device: torch.device) -> None:
    """Verify, accept, draft and commit, twice over; greedy and sampled rows beside each other."""
    vocab = 77
    generator = torch.Generator().manual_seed(100 * k + seed)
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    make = (spread_logits, tied_logits)[seed == 2]
    state = bound_state(k, vocab, generator)
    for _ in range(2):
        slots = [*torch.randperm(SLOTS, generator=generator).tolist(), SLOTS]
        sampling = Sampling.of(state, k, device, slots, FULL)
        logits = make(len(slots), k + 1, vocab, generator=generator, dtype=dtype)
        for row in range(0, len(slots), 2):  # half of the rows like their drafts
            for place in range(k):
                logits[row, place, sampling.rows[1].tokens[row, place + 1]] = 6
        accepted = sampling.accept(logits)
        draft_logits = [make(len(slots), vocab, generator=generator, dtype=dtype) for _ in range(k)]
        drafted = (
            sampling.draft(draft_logits, (accepted[0].history, accepted[1].history)) if k else (None, None)
        )
        sampling.commit(accepted, drafted)  # type: ignore[arg-type]
        state = sampling.pair.plain_state


@pytest.mark.parametrize("variant", [SAMPLED, FULL, CONSTRAINED])
def test_a_grammar_and_every_variant(variant: Variant, size: str, device: torch.device) -> None:
    """Without penalties a row decides the same in each variant that serves it; a mask holds in all of them."""
    vocab, k = 100, 3
    generator = torch.Generator().manual_seed(5)
    state = bound_state(k, vocab, generator)
    slots = [0, 1, 1, 0, 1] if variant == SAMPLED else [1, 2, 3, 4, 5]
    sampling = Sampling.of(state, k, device, slots, variant)
    logits = spread_logits(5, k + 1, vocab, generator=generator)
    allowed = None
    if variant.constrained:
        allowed = torch.randint(-(2**31), 2**31, (5, k + 1, mask_words(vocab)), generator=generator).to(
            torch.int32
        )
        allowed[2] = -1
        drafts = sampling.rows[1].tokens[:, 1:]
        for row in range(5):
            allowed[row, :-1].scatter_(1, drafts[row, :, None] // 32, -1)  # drafts are allowed
    found, _ = sampling.accept(logits, allowed)
    if allowed is not None:
        for row in range(5):
            token = int(found.emitted[row, found.count[row]])
            assert (int(allowed[row, int(found.count[row]), token // 32]) >> (token % 32)) & 1
    assert (found.history is None) == (not variant.processed)


def test_only_the_next_token_is_verified_at_width_one(size: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(9)
    state = bound_state(3, 60, generator)
    state.core[:SLOTS, NUM_DRAFTS] = 3
    pair = Pair.of(state, 3, device)
    for variant in (FULL, Variant(False, False, False)):
        sampling = Sampling(pair, pair.load(list(range(SLOTS)), variant=variant, width=1))
        assert not sampling.rows[0].num_drafts.any()
        accepted = sampling.accept(spread_logits(SLOTS, 1, 60, generator=generator))
        assert not accepted[0].count.any()
        drafts = [spread_logits(SLOTS, 60, generator=generator) for _ in range(3)]
        drafted = sampling.draft(drafts, (accepted[0].history, accepted[1].history))
        sampling.commit(accepted, drafted)


def test_a_first_draft_phase_counts_its_own_drafts(device: torch.device) -> None:
    """With a frequency penalty under which no token is the best one twice."""
    vocab, k = 40, 3
    generator = torch.Generator().manual_seed(2)
    state = bound_state(k, vocab, generator)
    state.bind(6, [1, 2, 3], 2, _params(temperature=0.0, frequency_penalty=2.0), 4)
    sampling = Sampling.of(state, k, device, [6, 1, SLOTS], FULL)
    logits = torch.full((3, vocab), -20.0)
    logits[:, 11], logits[:, 12], logits[:, 13] = 1.0, 0.95, 0.9
    empty = torch.empty((3, 0), dtype=torch.int64)
    drafted = sampling.draft([logits] * k, (empty.to(device), empty))
    assert [int(one[0]) for one in drafted[0].tokens] == [11, 12, 13]
    sampling.pair.fused.begin(sampling.rows[0], drafted[0])
    sampling.pair.plain.begin(sampling.rows[1], drafted[1])
    same(sampling.pair.fused_state.core, sampling.pair.plain_state.core, "core")


@pytest.mark.parametrize("values", [(NAN,), (INF,), (-INF,), (INF, -INF), (-INF, NAN)])
def test_a_fault_is_told_by_the_logits_as_they_came(
    values: tuple[float, ...], size: str, device: torch.device
) -> None:
    """Also where a grammar or a bias hides it; and a grammar's own infinities are none."""
    vocab, k = 50, 1
    generator = torch.Generator().manual_seed(3)
    state = bound_state(k, vocab, generator)
    sampling = Sampling.of(state, k, device, list(range(SLOTS)), CONSTRAINED)
    logits = spread_logits(SLOTS, k + 1, vocab, generator=generator)
    for slot in range(0, SLOTS, 2):
        logits[slot, 0, torch.randperm(vocab, generator=generator)[: len(values)]] = torch.tensor(values)
    allowed = torch.full((SLOTS, k + 1, mask_words(vocab)), 0x0F0F0F0F, dtype=torch.int32)
    device_allowed = allowed.to(device)
    found = sampling.pair.fused.accept(sampling.rows[0], logits.to(device), device_allowed)
    kind = Flag.TARGET_NAN if any(map(math.isnan, values)) else Flag.TARGET_INF
    assert found.flags.tolist() == [int(kind) if slot % 2 == 0 else 0 for slot in range(SLOTS)]
    assert bool(((found.emitted >= 0) & (found.emitted < vocab)).all())


def test_faults_of_drafts_are_told(size: str, device: torch.device) -> None:
    vocab, k = 70, 3
    generator = torch.Generator().manual_seed(13)
    sampling = Sampling.of(bound_state(k, vocab, generator), k, device, list(range(SLOTS)), FULL)
    logits = [plant(spread_logits(SLOTS, vocab, generator=generator), generator) for _ in range(k)]
    empty = torch.empty((SLOTS, 0), dtype=torch.int64)
    drafted, _ = sampling.draft(logits, (empty.to(device), empty))
    assert any(bool(one.any()) for one in drafted.found)


ROWS: dict[str, list[float]] = {
    "all equal": [1.5] * 120,
    "two levels": [2.0] * 60 + [1.0] * 60,
    "around zero": [(-1) ** place * 2.0 ** -(place % 40) for place in range(120)],
    "far apart": [3e37, -3e37, 1e-38, *[-1e30] * 117],
    "close together": [1.0 + place * 2.0**-23 for place in range(120)],
    "a ramp": [place * 0.05 for place in range(120)],
}
LIMITS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 61},
    {"temperature": 0.5, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.6, "min_p": 0.001},
    {"top_k": 50, "min_tokens": 9, "stop_token_ids": [*range(40), *range(80, 120)]},  # 40 are possible
]


@pytest.mark.parametrize("few", [4, 64])
@pytest.mark.parametrize("name", ROWS)
def test_thresholds_keep_what_a_sort_keeps(
    name: str, few: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that resist a search, each under several limits: the same tokens have the same probabilities."""
    monkeypatch.setattr(step, "MAX_VALUES", 32)
    monkeypatch.setattr(step, "FEW", few)
    count = len(LIMITS)
    state = make_state(1, 120, torch.Generator().manual_seed(1), num_slots=SLOTS + 1)
    for slot, limits in enumerate(LIMITS):
        state.bind(slot, [0], 1, _params(**{"temperature": 1.0} | limits), slot)
    sampling = Sampling.of(state, 1, device, list(range(count)), FULL)
    logits = torch.tensor([ROWS[name]] * count)
    empty = torch.empty((count, 0), dtype=torch.int64)
    _, plain = sampling.draft([logits], (empty.to(device), empty))
    assert plain.probs is not None and bool((plain.probs.sum(-1) > 0.999).all())
