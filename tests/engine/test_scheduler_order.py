"""The scheduler by known answers: chunks of prefill, order of service, who gives way when pages run out."""

from __future__ import annotations

import pytest

from engine.scheduler import Scheduler
from tests.engine.fake_device import Harness, make_config, make_request


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 40 for i in range(length)]


# --- prefill -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9])
def test_chunks_cover_all_known_tokens_but_the_last_with_true_next_tokens(length: int, budget: int) -> None:
    scheduler = Scheduler(make_config(prefill_chunk_size=budget))
    tokens = prompt(length)
    scheduler.add(make_request("r", tokens))
    covered: list[int] = []
    shifted: list[int] = []
    plan = scheduler.schedule()
    assert len(plan.bind) == 1 and (len(plan.rows) == 1) == (length == 1)
    while plan.prefill:
        assert plan.rows == []
        (chunk,) = plan.prefill
        assert chunk.start == len(covered) and len(chunk.token_ids) <= budget
        covered += chunk.token_ids
        shifted += chunk.shifted_ids
        assert chunk.is_last == (len(covered) == length - 1)
        plan = scheduler.schedule()
    assert covered == tokens[:-1] and shifted == tokens[1:]
    assert len(plan.rows) == 1


def test_a_prompt_of_one_token_steps_in_the_iteration_that_binds_it() -> None:
    harness = Harness(make_config(), accept=0)
    harness.add(make_request("r", [5], 3))
    plan = harness.iterate()
    assert plan.rows == plan.bind
    assert harness.deltas["r"][0].num_drafts == 0
    harness.drain()
    harness.assert_exact()


def test_the_budget_is_shared_evenly_and_what_is_left_over_goes_to_the_longer() -> None:
    scheduler = Scheduler(make_config(prefill_chunk_size=30, prefix_cache=False))
    for name, length in [("long", 90), ("a", 5), ("b", 9), ("c", 90)]:
        scheduler.add(make_request(name, prompt(length)))
    shares = [(c.sequence.request.request_id, len(c.token_ids)) for c in scheduler.schedule().prefill]
    assert shares == [("long", 9), ("a", 4), ("b", 8), ("c", 9)]


def test_with_more_prompts_than_budget_the_oldest_advance() -> None:
    scheduler = Scheduler(make_config(prefill_chunk_size=2, prefix_cache=False))
    for name, length in [("a", 50), ("b", 5), ("c", 5)]:
        scheduler.add(make_request(name, prompt(length)))
    shares = [(c.sequence.request.request_id, len(c.token_ids)) for c in scheduler.schedule().prefill]
    assert shares == [("a", 1), ("b", 1)]


def test_d6_a_long_prompt_starves_nobody_and_is_not_starved() -> None:
    """A short prompt arrives at every second iteration while a long one prefills and others decode."""
    config = make_config(
        max_num_seqs=8,
        num_pages=600,
        page_size=4,
        prefill_chunk_size=16,
        max_model_len=700,
        prefix_cache=False,
    )
    harness = Harness(config, accept=0)
    for index in range(2):
        harness.add(make_request(f"decoding{index}", [index], 300))
    harness.add(make_request("long", prompt(600), 5))
    added: dict[str, int] = {}
    progress = 0
    while "long" not in harness.finished_at:
        if harness.iterations % 2 == 0:
            name = f"short{harness.iterations}"
            added[name] = harness.iterations
            harness.add(make_request(name, prompt(13, start=harness.iterations), 1))
        plan = harness.iterate()
        rows = {sequence.request.request_id for sequence in plan.rows}
        assert {"decoding0", "decoding1"} <= rows, "a decode waited for a prefill"
        chunks = {chunk.sequence.request.request_id: len(chunk.token_ids) for chunk in plan.prefill}
        progress += chunks.get("long", 0)
        assert sum(chunks.values()) <= 16
        assert progress == 599 or chunks["long"] >= 1, "the long prompt stood still"
    # Short ones take 12 of 32 positions in two iterations: 599 positions need 60, and 5 steps follow.
    assert harness.finished_at["long"] <= 68
    waits = [harness.finished_at[name] - at for name, at in added.items() if name in harness.finished_at]
    assert len(waits) > 25 and max(waits) <= 3
    harness.assert_exact()


# --- order of service --------------------------------------------------------------------------------------


def test_priority_then_arrival_then_order_of_adding() -> None:
    harness = Harness(make_config(max_num_seqs=1))
    for name, priority, arrival in [("c", 1, 0.0), ("b", 0, 2.0), ("d", 1, 0.0), ("a", 0, 1.0)]:
        harness.add(make_request(name, prompt(5), 2, priority=priority, arrival_time=arrival))
    harness.drain()
    assert sorted(harness.finished_at, key=lambda name: harness.finished_at[name]) == ["a", "b", "c", "d"]


def test_rows_keep_their_order_whatever_their_slots() -> None:
    harness = Harness(make_config(max_num_seqs=3), accept=0)
    for name in "abc":
        harness.add(make_request(name, [1, 2], 9))
    harness.iterate()
    harness.scheduler.abort("a")
    harness.add(make_request("d", [4], 9, arrival_time=1.0))
    plan = harness.iterate()
    assert [(s.request.request_id, s.slot) for s in plan.rows] == [("b", 1), ("c", 2), ("d", 0)]


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    config = make_config(num_pages=11, page_size=4, stride=1, max_model_len=40, prefix_cache=False)
    harness = Harness(config)
    harness.add(make_request("running", prompt(20), 10))
    harness.iterate()
    harness.add(make_request("large", prompt(25), 2, arrival_time=1.0))
    harness.add(make_request("small", prompt(2), 2, arrival_time=2.0))
    while not (bound := harness.iterate().bind):
        pass
    assert [sequence.request.request_id for sequence in bound] == ["large", "small"]
    assert "running" in harness.finished_at
    harness.drain()
    harness.assert_exact()


def test_admission_leaves_running_requests_the_pages_of_their_next_step() -> None:
    """The second fits beside the first just now, but the first is about to grow."""
    config = make_config(num_pages=11, page_size=4, stride=1, max_model_len=40, prefix_cache=False)
    harness = Harness(config)
    harness.add(make_request("first", prompt(20), 12))
    harness.iterate()
    harness.add(make_request("second", prompt(20), 4, arrival_time=1.0))
    assert harness.scheduler.stats().pages_free == 5
    assert harness.iterate().bind == []
    harness.drain()
    assert harness.scheduler.stats().preemptions == 0
    harness.assert_exact()


# --- giving way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_when_pages_run_out_the_youngest_gives_way_and_everybody_ends(overlap: bool) -> None:
    config = make_config(num_pages=13, page_size=2, stride=2, max_model_len=24, prefill_chunk_size=50)
    harness = Harness(config, overlap=overlap, accept=0)
    for index in range(4):
        harness.add(make_request(f"r{index}", [index, 1], 20, arrival_time=index))
    harness.drain()
    harness.assert_exact()
    stats = harness.scheduler.stats()
    assert stats.preemptions > 0
    order = [harness.finished_at[f"r{index}"] for index in range(4)]
    assert order == sorted(order), "the oldest is never held up by a younger one"
    harness.assert_idle()


def test_low_priority_gives_way_before_a_younger_one() -> None:
    config = make_config(num_pages=13, page_size=2, stride=1, max_model_len=24, prefix_cache=False)
    harness = Harness(config)
    harness.add(make_request("low", [1, 2], 20, priority=1, arrival_time=0.0))
    harness.iterate()
    harness.add(make_request("high", [3, 4], 20, priority=0, arrival_time=1.0))
    harness.drain()
    assert harness.finished_at["high"] < harness.finished_at["low"]
    assert harness.scheduler.stats().preemptions > 0
    harness.assert_exact()


def test_a_resumed_request_keeps_its_tokens_and_tells_its_first_facts_once() -> None:
    config = make_config(num_pages=13, page_size=2, stride=1, max_model_len=24, prefix_cache=False)
    harness = Harness(config)
    for index in range(2):
        harness.add(make_request(f"r{index}", [index, 1], 20, arrival_time=index))
    resumed = []
    while harness.scheduler.has_work():
        plan = harness.iterate()
        resumed += [s for s in plan.bind if len(s.tokens) > s.num_prompt]
    assert resumed and {s.request.request_id for s in resumed} == {"r1"}
    harness.assert_exact()
    told = [delta.scheduled_time is not None for delta in harness.deltas["r1"]]
    assert told == [True] + [False] * (len(told) - 1)
    assert harness.scheduler.stats().prompt_tokens == 4, (
        "a prompt is counted once, however often it is prefilled"
    )
