"""Greedy answers of two engines, token for token; where they part, the target itself says how near a tie it was.

Kernels choose their order of summation by the batch's shape, so in 16 bits two runs that are both right part where
the target's best tokens are nearly equal. From there on they are different texts, so only a request's first
difference is judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from engine.engine import Engine
from tests.engine.drive import greedy
from tests.gpu.serving import Served, serve

Tokens = list[list[int]]

MARGIN = 0.75
"""Nats below the shipped model's best token at which a 16-bit run may still choose: rounding to bf16 moves
logits, and now and then a router's choice with them. On a CPU, bf16 parts from fp32 in 45 of 216 requests, by at
most 0.41."""


@dataclass(frozen=True)
class Difference:
    """Where two answers of one request part."""

    request: int
    place: int
    tokens: tuple[int, int]
    gap: float
    """Nats between the target's best token and the lesser of the two; infinite if it is not among the 20 best."""


@dataclass(frozen=True)
class Verdict:
    """All first differences between two runs of the same requests."""

    title: str
    requests: int
    differences: list[Difference]

    @property
    def largest(self) -> float:
        return max((one.gap for one in self.differences), default=0.0)

    def beyond(self, margin: float) -> list[Difference]:
        """Those that no rounding explains."""
        return [one for one in self.differences if not one.gap < margin]

    def __str__(self) -> str:
        return f"{self.title} {len(self.differences)} of {self.requests}"


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many requests part in each comparison, and how near the ties were."""
    largest = max(one.largest for one in verdicts)
    return f"{', '.join(map(str, verdicts))} part, at most {largest:.3f} nats below the best token"


def in_batches(engine: Engine, prompts: Tokens, sizes: Sequence[int], max_tokens: int) -> Served:
    """Answers to ``prompts``, so many at once as ``sizes`` says in turn; requests are named by their number."""
    served, done, params = Served(), 0, greedy(max_tokens)
    for size in cycle(sizes):
        if done >= len(prompts):
            return served
        part = [(str(done + place), prompt, params) for place, prompt in enumerate(prompts[done:][:size])]
        batch = serve(engine, part)
        served.answers |= batch.answers
        served.forwards.update(batch.forwards)
        done += len(part)
    raise AssertionError("a cycle has no end")


def tokens_of(served: Served) -> Tokens:
    """Of each request, in the order of their numbers."""
    return [served.answers[str(number)].token_ids for number in range(len(served.answers))]


def gap(judge: Engine, known: list[int], tokens: tuple[int, int]) -> float:
    """How far the lesser of ``tokens`` stands below the best token behind ``known``, by an eager step alone."""
    answer = serve(judge, [("judge", known, greedy(1, logprobs=20))]).answers["judge"]
    top = dict(answer.logprobs[0].top)
    return max(top.values()) - min(top.get(token, -math.inf) for token in tokens)


def compare(judge: Engine, title: str, prompts: Tokens, mine: Tokens, theirs: Tokens) -> Verdict:
    """Every first difference; ``judge`` runs eager. Answers of fewer requests stand for the first ones."""
    found = []
    for number, (prompt, one, other) in enumerate(zip(prompts, mine, theirs, strict=False)):
        assert len(one) == len(other), f"request {number} has {len(one)} tokens, and {len(other)}"
        place = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            pair = one[place], other[place]
            found.append(Difference(number, place, pair, gap(judge, prompt + one[:place], pair)))
    return Verdict(title, min(len(mine), len(theirs)), found)
