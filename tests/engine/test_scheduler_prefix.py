"""The prefix cache under the scheduler: hits near the ideal, no tail of a cut run, nothing shared wrongly."""

from __future__ import annotations

import random

import pytest

from engine.ladder import Suspicion
from engine.types import StepStats
from tests.engine.fake_device import VOCAB, Harness, make_config, make_request, next_token


def random_tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def ideal_hit(shared: int, prompt: list[int], page_size: int) -> int:
    """Most tokens that can come from the cache when ``shared`` leading tokens were seen before.

    A block needs the token after it, and one position is left to prefill.
    """
    return min(max(shared - 1, 0) // page_size, (len(prompt) - 2) // page_size) * page_size


def serve(harness: Harness, name: str, prompt: list[int], max_tokens: int = 6) -> int:
    """Serve one request alone; prompt tokens that came from the cache."""
    harness.run(make_request(name, prompt, max_tokens))
    return harness.deltas[name][0].num_cached_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_b12_a_popular_prompt_and_its_variants_hit_every_block_they_can(
    page_size: int, overlap: bool
) -> None:
    harness = Harness(make_config(page_size=page_size, num_pages=1 + 800 // page_size), overlap=overlap)
    prompt = random_tokens(40, seed=0)
    assert serve(harness, "first", prompt) == 0
    for index in range(100):
        assert serve(harness, f"same{index}", prompt) == ideal_hit(40, prompt, page_size)
    for shared in sorted({int(blocks * page_size) for blocks in (0.5, 1, 1.5, 2)}):
        variant = [*prompt[:shared], (prompt[shared] + 1) % VOCAB, *random_tokens(9, seed=shared)]
        assert serve(harness, f"variant{shared}", variant) == ideal_hit(shared, variant, page_size)
    assert harness.scheduler.stats().preemptions == 0
    harness.assert_idle()


def test_output_is_cached_too_and_a_conversation_hits_it() -> None:
    harness = Harness(make_config(page_size=4))
    prompt = random_tokens(10, seed=1)
    serve(harness, "first", prompt, max_tokens=15)
    seen = prompt + harness.output("first")
    follow_up = [*seen, *random_tokens(5, seed=2)]
    # The last of 25 tokens was never written: the block that ends at position 23 is the last to be published.
    assert serve(harness, "second", follow_up) == ideal_hit(len(seen), follow_up, 4) == 24


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", range(1, 10))
def test_b2_the_tail_behind_a_stop_is_not_in_the_cache(place: int, overlap: bool) -> None:
    """Runs of 4 tokens, pages of one position: any kept tail would be matched by the true continuation."""
    prompt = random_tokens(6, seed=3)
    tokens = list(prompt)
    while len(tokens) < 30:
        tokens.append(next_token(tokens))
    stop = tokens[6 + place - 1]
    end = tokens.index(stop, 6) + 1
    harness = Harness(make_config(page_size=1), overlap=overlap, accept=3)
    harness.run(make_request("cut", prompt, 20, stop=(stop,)))
    assert harness.output("cut") == tokens[6:end]
    assert serve(harness, "longer", tokens[:25]) == end - 1


@pytest.mark.parametrize("overlap", [False, True])
def test_two_live_requests_that_part_exactly_at_a_block_boundary(overlap: bool) -> None:
    """Equal blocks, other next tokens: their draft KV differs, so the last equal block is not shared."""
    shared = random_tokens(8, seed=4)
    ends = [[1, *random_tokens(6, seed=5)], [2, *random_tokens(6, seed=6)]]
    config = make_config(page_size=4, stride=3, num_pages=60)
    for late in (0, 1, 2, 3, 6):
        harness = Harness(config, overlap=overlap)
        harness.add(make_request("a", shared + ends[0], 12))
        for _ in range(late):
            harness.iterate()
        harness.add(make_request("b", shared + ends[1], 12))
        harness.drain()
        harness.assert_exact()
        assert harness.deltas["b"][0].num_cached_tokens in (0, 4)
        assert serve(harness, "again", shared + ends[1]) == 12


@pytest.mark.parametrize("overlap", [False, True])
def test_a_block_computed_twice_is_owned_once(overlap: bool) -> None:
    """The second is shorter, so it does not wait for the first, and both compute two equal blocks."""
    prompt = random_tokens(30, seed=7)
    harness = Harness(make_config(page_size=4, stride=2, num_pages=100), overlap=overlap)
    harness.add(make_request("long", prompt, 25))
    harness.add(make_request("short", prompt[:10], 25))
    harness.iterate()
    long, short = harness.scheduler._running
    before = list(long.pages)
    assert not set(before) & set(short.pages)
    while len(long.blocks) < 7:
        harness.iterate()
    assert long.pages[:2] == short.pages[:2] and long.pages[2:7] == before[2:7]
    assert not set(long.pages[2:]) & set(short.pages)
    harness.drain()
    harness.assert_exact()
    harness.assert_idle()


def test_choices_of_one_prompt_prefill_it_once() -> None:
    config = make_config(page_size=4, max_num_seqs=4, num_pages=200, prefill_chunk_size=16)
    harness = Harness(config)
    prompt = random_tokens(50, seed=8)
    for index in range(4):
        harness.add(make_request(f"n{index}", prompt, 4))
    prefilled = 0
    while harness.scheduler.has_work():
        prefilled += sum(len(chunk.token_ids) for chunk in harness.iterate().prefill)
    harness.assert_exact()
    assert prefilled == 49 + 3 * (49 - 48)
    assert [harness.deltas[f"n{index}"][0].num_cached_tokens for index in range(4)] == [0, 48, 48, 48]


def test_nobody_waits_for_a_prefill_that_is_longer_than_its_own() -> None:
    config = make_config(page_size=4, num_pages=200, prefill_chunk_size=8, max_model_len=300)
    harness = Harness(config)
    prompt = random_tokens(200, seed=9)
    harness.add(make_request("long", prompt, 4))
    harness.add(make_request("short", prompt[:10], 4))
    assert len(harness.iterate().bind) == 2
    harness.drain()
    assert harness.finished_at["short"] < 8
    harness.assert_exact()


def test_who_waits_for_a_shared_prefill_keeps_its_slot() -> None:
    config = make_config(page_size=4, num_pages=200, prefill_chunk_size=8, max_num_seqs=3)
    harness = Harness(config)
    prompt = random_tokens(40, seed=10)
    for name, tokens in [("a", prompt), ("b", prompt), ("c", [1, 2]), ("d", [3, 4])]:
        harness.add(make_request(name, tokens, 30))
    assert [sequence.request.request_id for sequence in harness.iterate().bind] == ["a", "c"]
    while not (bound := harness.iterate().bind):
        pass
    assert bound[0].request.request_id == "b", "d took the slot that b waits for"
    harness.drain()
    harness.assert_exact()


def test_the_first_of_equal_prompts_may_be_aborted_while_others_wait_for_it() -> None:
    harness = Harness(make_config(page_size=4, num_pages=200, prefill_chunk_size=8))
    for index in range(3):
        harness.add(make_request(f"n{index}", random_tokens(40, seed=11), 4))
    harness.iterate()
    harness.scheduler.abort("n0")
    assert [sequence.request.request_id for sequence in harness.iterate().bind] == ["n1"]
    harness.drain()
    assert len(harness.finished_at) == 2
    harness.assert_exact()


def test_a_preempted_request_resumes_from_its_own_blocks() -> None:
    config = make_config(num_pages=13, page_size=2, stride=1, max_model_len=24, prefill_chunk_size=50)
    harness = Harness(config)
    for index in range(2):
        harness.add(make_request(f"r{index}", [index, 1], 20, arrival_time=index))
    resumed = []
    while harness.scheduler.has_work():
        plan = harness.iterate()
        resumed += [s.num_hit_blocks for s in plan.bind if len(s.tokens) > s.num_prompt]
    harness.assert_exact()
    assert resumed and all(count > 0 for count in resumed)


@pytest.mark.parametrize("overlap", [False, True])
def test_b16_what_a_faulty_request_published_is_withdrawn(overlap: bool) -> None:
    harness = Harness(make_config(page_size=2, num_pages=100), overlap=overlap)
    healthy = random_tokens(9, seed=12)
    serve(harness, "healthy", healthy, max_tokens=2)
    faulty = [*healthy, *random_tokens(10, seed=13)]
    harness.add(make_request("faulty", faulty, 50))
    for _ in range(4):
        harness.iterate()
    (sequence,) = harness.scheduler._running
    assert len(sequence.blocks) > sequence.num_hit_blocks > 0
    harness.scheduler.release(sequence, publish=False)
    harness.scheduler.release(sequence, publish=True)
    harness.scheduler.check()
    harness.drain()
    assert serve(harness, "again", faulty) == ideal_hit(9, faulty, 2) == 8
    harness.assert_idle()


def test_nobody_waits_for_a_block_that_was_withdrawn() -> None:
    harness = Harness(make_config(page_size=2, num_pages=100))
    prompt = random_tokens(12, seed=14)
    harness.add(make_request("faulty", prompt, 50))
    harness.iterate()
    harness.iterate()
    harness.add(make_request("holder", prompt, 50))
    harness.iterate()
    harness.iterate()
    faulty, holder = harness.scheduler._running
    assert holder.num_hit_blocks == 5
    harness.scheduler.release(faulty, publish=False)
    harness.add(make_request("next", prompt, 5))
    assert [sequence.request.request_id for sequence in harness.iterate().bind] == ["next"]
    harness.drain()
    harness.assert_exact()
    harness.assert_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_waits_for_a_block_of_one_that_is_held(overlap: bool) -> None:
    """It has been prefilled anew after a fault, and publishes in its turn, which may be far off."""
    harness = Harness(make_config(page_size=4, num_pages=200, max_num_seqs=3), overlap=overlap)
    prompt = random_tokens(13, seed=15)
    harness.add(make_request("suspect", prompt, 30))
    harness.iterate()
    (suspect,) = harness.scheduler._running
    harness.scheduler.rebuild(suspect, Suspicion(None, None, contract=False, rungs=(False,)))
    suspect.held = True
    harness.iterate()
    assert suspect.slot is not None and not suspect.left_to_prefill and not suspect.blocks
    for name in ("same", "longer"):
        harness.add(make_request(name, [*prompt, 1] if name == "longer" else prompt, 30))
    # The second waits for the first of the two, and neither for the suspect
    assert [sequence.request.request_id for sequence in harness.iterate().bind] == ["same"]
    bound = [sequence.request.request_id for _ in range(3) for sequence in harness.iterate().bind]
    assert bound == ["longer"] and suspect.held and not suspect.blocks
    suspect.held = False
    harness.drain()
    harness.assert_exact()
    harness.assert_idle()
    assert harness.deltas["longer"][0].num_cached_tokens == 12


def test_equal_hashes_never_share_a_page() -> None:
    """D16: with a hash that is constant, whatever is matched has equal tokens."""
    harness = Harness(make_config(page_size=2), digest=lambda data: b"")
    for index in range(6):
        serve(harness, f"r{index}", random_tokens(12, seed=index % 3))
    harness.run(*[make_request(f"s{index}", random_tokens(12, seed=index % 3), 9) for index in range(6)])
    harness.assert_idle()


def test_without_the_cache_nothing_is_matched_kept_or_counted() -> None:
    harness = Harness(make_config(prefix_cache=False))
    for index in range(3):
        assert serve(harness, f"r{index}", random_tokens(20, seed=0)) == 0
    stats: StepStats = harness.scheduler.stats()
    assert (stats.prefix_cache_queried_tokens, stats.prefix_cache_hit_tokens) == (0, 0)
    assert (stats.pages_cached, stats.pages_free) == (0, 64)


def test_who_is_preempted_matches_its_blocks_again_though_the_cache_did_not_change() -> None:
    harness = Harness(make_config(page_size=4))
    prompt = random_tokens(24, seed=3)
    serve(harness, "first", prompt, max_tokens=1)
    scheduler = harness.scheduler
    scheduler.add(make_request("second", [*prompt[:22], prompt[0]], 6))
    [second] = scheduler.schedule().bind
    assert second.num_hit_blocks == 5
    scheduler._preempt(second)
    assert scheduler.schedule().bind == [second] and second.num_hit_blocks == 5
