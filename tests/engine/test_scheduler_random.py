"""Random schedules: exact outputs, every page accounted for at each step, and everybody ends."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.scheduler import SchedulerConfig
from engine.types import Request, StepStats
from tests.engine.fake_device import VOCAB, Harness, make_config, make_request

CONTEXT = 40
# A few texts that requests share prefixes of: the prefix cache and duplicates have something to do.
TEXTS = [[(seed * i * i + i) % VOCAB for i in range(CONTEXT)] for seed in range(3)]


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    page_size = draw(st.sampled_from([1, 2, 3, 4, 7, 16, 64]))
    one_request = -(-CONTEXT // page_size)
    return make_config(
        page_size=page_size,
        # From a pool that holds exactly one request of full length, where nearly everything is preempted.
        num_pages=1 + one_request + draw(st.sampled_from([0, 0, 1, 2, one_request, 4 * one_request])),
        stride=draw(st.integers(1, 6)),
        max_num_seqs=draw(st.integers(1, 5)),
        prefill_chunk_size=draw(st.sampled_from([1, 2, 5, 8, 64])),
        max_model_len=CONTEXT,
        prefix_cache=draw(st.integers(0, 4)) > 0,
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    shared = draw(st.integers(0, CONTEXT - 2))
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT - 1 - shared))
    return draw(st.sampled_from(TEXTS))[:shared] + own


class RandomSchedule(RuleBasedStateMachine):
    """Any order of arrivals, aborts, faults and iterations."""

    @initialize(config=configs(), overlap=st.booleans(), seed=st.integers(0, 999))
    def start(self, config: SchedulerConfig, overlap: bool, seed: int) -> None:
        self.harness = Harness(config, overlap=overlap, seed=seed)
        self.count = 0

    @rule(
        prompt=prompts(),
        max_tokens=st.integers(1, CONTEXT),
        stop=st.sampled_from([(), (), (3,), (5, 17, 30)]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        copies=st.sampled_from([1, 1, 1, 3]),
    )
    def add(
        self, prompt: list[int], max_tokens: int, stop: tuple[int, ...], priority: int, copies: int
    ) -> None:
        for _ in range(copies):
            self.count += 1
            self.harness.add(
                make_request(
                    f"r{self.count}",
                    prompt,
                    max_tokens,
                    stop=stop,
                    priority=priority,
                    arrival_time=float(self.count),
                )
            )

    @rule(times=st.integers(1, 6))
    def iterate(self, times: int) -> None:
        for _ in range(times):
            self.harness.iterate()

    @precondition(lambda self: self.count)
    @rule(which=st.integers(0, 999))
    def abort(self, which: int) -> None:
        self.harness.scheduler.abort(f"r{1 + which % self.count}")

    @precondition(lambda self: self.harness.scheduler._running)
    @rule(which=st.integers(0, 999))
    def fault(self, which: int) -> None:
        running = self.harness.scheduler._running
        self.harness.scheduler.release(running[which % len(running)], publish=False)

    @invariant()
    def everything_adds_up(self) -> None:
        self.harness.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            self.harness.assert_exact()
            self.harness.assert_idle()


RandomSchedule.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestRandomSchedule = RandomSchedule.TestCase


@dataclass
class Totals:
    """Counters summed over iterations, as a metrics sink would."""

    prompt_tokens: int = 0
    queried: int = 0
    hit: int = 0
    preemptions: int = 0

    def add(self, stats: StepStats) -> None:
        increments = (
            stats.prompt_tokens,
            stats.prefix_cache_queried_tokens,
            stats.prefix_cache_hit_tokens,
            stats.preemptions,
        )
        assert min(increments) >= 0, "a counter went down"
        self.prompt_tokens += increments[0]
        self.queried += increments[1]
        self.hit += increments[2]
        self.preemptions += increments[3]


def random_request(rng: random.Random, name: str, arrival: float) -> Request:
    length = rng.randint(1, CONTEXT - 1)
    shared = rng.randint(0, length)
    prompt = rng.choice(TEXTS)[:shared] + [rng.randrange(VOCAB) for _ in range(length - shared)]
    stop = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 3])))
    return make_request(name, prompt, rng.randint(1, 30), stop=stop, arrival_time=arrival)


def serve_500(config: SchedulerConfig, *, overlap: bool, seed: int) -> tuple[Harness, Totals]:
    """500 requests with stops, caps and aborts inside runs, to the end."""
    rng = random.Random(seed)
    harness = Harness(config, overlap=overlap, seed=seed)
    totals = Totals()
    for index in range(500):
        harness.add(random_request(rng, f"r{index}", float(index)))
        if rng.random() < 0.1:
            harness.scheduler.abort(f"r{rng.randint(0, index)}")
        for _ in range(rng.choice([0, 1, 3, 8])):
            harness.iterate()
            totals.add(harness.scheduler.stats())
    harness.drain(20_000)
    totals.add(harness.scheduler.stats())
    harness.assert_exact()
    return harness, totals


@settings(max_examples=2, deadline=None)
@given(overlap=st.booleans(), seed=st.integers(0, 99))
def test_b15_nothing_leaks_after_500_requests(overlap: bool, seed: int) -> None:
    config = make_config(max_model_len=CONTEXT, num_pages=31, page_size=4)
    harness, totals = serve_500(config, overlap=overlap, seed=seed)
    harness.assert_idle()
    assert totals.hit > 0 and totals.queried == totals.prompt_tokens
    assert len(harness.finished_at) > 400


def test_d12_counters_only_grow_through_preemptions() -> None:
    config = make_config(max_model_len=CONTEXT, num_pages=14, page_size=4)
    harness, totals = serve_500(config, overlap=True, seed=1)
    harness.assert_idle()
    assert totals.preemptions > 0


def test_schedules_are_reproducible() -> None:
    config = make_config(max_model_len=CONTEXT, num_pages=20, page_size=4)
    runs = [serve_500(config, overlap=True, seed=5)[0] for _ in range(2)]
    assert runs[0].deltas.keys() == runs[1].deltas.keys()
    assert runs[0].finished_at == runs[1].finished_at


def test_i3_tokens_do_not_depend_on_the_schedule() -> None:
    """The same requests under six configurations; what was not aborted emits the same."""
    outputs = []
    for index, (page_size, stride) in enumerate([(1, 1), (2, 4), (4, 3), (16, 2), (64, 6), (5, 5)]):
        pages = 2 + -(-2 * CONTEXT // page_size)
        config = make_config(
            page_size=page_size,
            stride=stride,
            num_pages=pages,
            max_model_len=CONTEXT,
            max_num_seqs=1 + index,
            prefix_cache=index != 3,
        )
        harness = Harness(config, overlap=index % 2 == 1, seed=index)
        rng = random.Random(7)
        harness.run(*[random_request(rng, f"r{number}", float(number)) for number in range(40)])
        outputs.append({name: harness.output(name) for name in harness.requests})
    assert all(output == outputs[0] for output in outputs)
