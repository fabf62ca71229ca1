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

from torch import Tensor

from engine.engine import Engine
from engine.model.moe import Moe
from tests.engine.drive import greedy
from tests.gpu.serving import Served, serve

Tokens = list[list[int]]

MARGIN = 0.75
"""Nats below the shipped model's best token at which a 16-bit run may still choose: rounding to bf16 moves logits.
On a CPU, bf16 parts from fp32 in 45 of 216 requests, by at most 0.41."""
ROUTER_MARGIN = 0.005
"""How much better a router's last choice must be than the best expert it left out, for bf16 to choose alike. Where
it is not, another expert may move all logits by nats (seen: 1.9). On a CPU bf16 moves the shipped model's scores by
0.001 (median) to 0.01 (99 of 100), and 44 of 100 tokens are nearer to a tie than this in one of five layers."""


@dataclass(frozen=True)
class Difference:
    """Where two answers of one request part."""

    request: int
    place: int
    tokens: tuple[int, int]
    gap: float
    """Nats between the target's best token and the lesser of the two; infinite if it is not among the 20 best."""
    router_gap: float
    """How far the target's routers are from another choice there, at the nearest, where that was asked."""


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
        return [one for one in self.differences if not (one.gap < margin or one.router_gap < ROUTER_MARGIN)]

    def __str__(self) -> str:
        return f"{self.title} {len(self.differences)} of {self.requests}"


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many requests part in each comparison, and how near the ties were."""
    largest = max(one.largest for one in verdicts)
    near = f"at most {largest:.3f} nats below the best token"
    distance = near if largest < math.inf else "some beyond the 20 best tokens"
    told = f"{', '.join(map(str, verdicts))} part, {distance}"
    routed = {
        (one.request, one.place)
        for verdict in verdicts
        for one in verdict.differences
        if one.router_gap < ROUTER_MARGIN
    }
    return told + (f", {len(routed)} by a router's tie" if routed else "")


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


def router_gap(exact: Engine, known: list[int]) -> float:
    """Score of the last chosen expert less that of the best one left out, behind ``known``, least over the layers.

    Infinite without routers.
    """
    found: list[float] = []

    def note(module: Moe, args: tuple[Tensor, ...]) -> None:
        router = module.router
        assert router.scoring == "sigmoid" and router.num_groups == 1, "as the shipped model has it"
        scores = router.projection(args[0][:1].float()).sigmoid()
        best = (scores if router.bias is None else scores + router.bias).topk(router.top_k + 1).values[0]
        found.append(float(best[-2] - best[-1]))

    layers = [module for module in exact._runner.decoder.modules() if isinstance(module, Moe)]
    if not layers:
        return math.inf
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    serve(exact, [("judge", known, greedy(1))])
    for handle in handles:
        handle.remove()
    return min(found[-len(layers) :])  # of the step, whose first row is the last known token


def compare(
    judge: Engine, title: str, prompts: Tokens, mine: Tokens, theirs: Tokens, exact: Engine | None = None
) -> Verdict:
    """Every first difference. Answers of fewer requests stand for the first ones.

    Args:
        judge: The target by itself, eager.
        exact: The same in fp32 and in the synchronous schedule, to ask its routers where tokens are far apart.
    """
    found = []
    for number, (prompt, one, other) in enumerate(zip(prompts, mine, theirs, strict=False)):
        assert len(one) == len(other), f"request {number} has {len(one)} tokens, and {len(other)}"
        place = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            pair = one[place], other[place]
            known = prompt + one[:place]
            distance = gap(judge, known, pair)
            routed = math.inf if exact is None or distance < MARGIN else router_gap(exact, known)
            found.append(Difference(number, place, pair, distance, routed))
    return Verdict(title, min(len(mine), len(theirs)), found)
