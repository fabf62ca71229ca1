"""The scheduler by known answers: refusals, ends inside a run, void results, statistics."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.scheduler import RowResult, Scheduler, Sequence
from engine.types import TokenDelta, TokenLogprobs
from tests.engine.fake_device import Harness, expected_output, make_config, make_request, next_token


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 40 for i in range(length)]


# --- what can never be served ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [
        (0, 1, "prompt_token_ids"),
        (100, 1, "prompt_token_ids"),
        (101, 1, "prompt_token_ids"),
        (5, -1, "max_tokens"),
    ],
)
def test_a_request_without_a_future_is_refused(length: int, max_tokens: int, param: str) -> None:
    scheduler = Scheduler(make_config(max_model_len=100))
    with pytest.raises(RequestError) as error:
        scheduler.add(make_request("r", prompt(length), max_tokens))
    assert error.value.param == param
    assert not scheduler.has_work()


def test_the_longest_prompt_emits_one_token() -> None:
    harness = Harness(make_config(max_model_len=100))
    harness.run(make_request("r", prompt(99), 50))
    assert len(harness.output("r")) == 1
    assert harness.deltas["r"][-1].finish_reason == "length"


def test_a_live_id_cannot_be_used_twice_but_an_ended_one_can() -> None:
    harness = Harness(make_config())
    harness.add(make_request("r", prompt(5)))
    with pytest.raises(RequestError, match="'r' is in use"):
        harness.scheduler.add(make_request("r", prompt(6)))
    harness.drain()
    harness.run(make_request("r", prompt(6)))


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_longest_request_that_fits_ends_and_one_token_more_is_refused(
    stride: int, page_size: int, overlap: bool
) -> None:
    config = make_config(
        stride=stride, page_size=page_size, num_pages=1 + 32 // page_size, max_model_len=1000
    )
    longest = config.max_request_tokens
    assert longest == 32 + 2 - {1: 1, 2: 2, 4: 6}[stride]
    harness = Harness(config, overlap=overlap)
    with pytest.raises(RequestError, match=f"at most {longest}") as error:
        harness.add(make_request("r", prompt(5), longest - 5 + 1))
    assert error.value.param == "max_tokens"
    with pytest.raises(RequestError) as error:
        harness.add(make_request("r", prompt(longest), 1))
    assert error.value.param == "prompt_token_ids"
    for length in (1, 5, longest - 1):
        harness.run(make_request("r", prompt(length), longest - length))
        assert len(harness.output("r")) == longest - length


# --- the end of a request ----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("place", range(1, 10))
def test_a_cap_or_a_stop_id_cuts_at_its_place_in_a_run(place: int, stride: int, overlap: bool) -> None:
    """Every step accepts all drafts, so 9 neighbouring places cover every place in a run."""
    tokens = prompt(6)
    for _ in range(20):
        tokens.append(next_token(tokens))
    output = tokens[6:]
    stop = output[place - 1]
    first = output.index(stop)
    harness = Harness(make_config(stride=stride), accept=stride - 1, overlap=overlap)
    harness.run(make_request("cap", prompt(6), place), make_request("stop", prompt(6), 20, stop=(stop,)))
    assert harness.output("cap") == output[:place]
    assert harness.output("stop") == output[: first + 1]
    assert harness.deltas["stop"][-1].stop_token_id == stop
    for deltas in harness.deltas.values():
        for delta in deltas:
            assert delta.num_accepted == min(stride - 1 if delta.num_drafts else 0, len(delta.token_ids))
    harness.assert_idle()


def running(**changes: object) -> tuple[Scheduler, Sequence]:
    """A request of one known token, its first step planned."""
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("r", [3], **changes))  # type: ignore[arg-type]
    (sequence,) = scheduler.schedule().rows
    return scheduler, sequence


def result(sequence: Sequence, token_ids: list[int]) -> RowResult:
    logprobs = [TokenLogprobs(token, -1.0, []) for token in token_ids]
    return RowResult(sequence, sequence.epoch, token_ids, 3, len(token_ids) - 1, logprobs=logprobs)


def test_a_stop_id_at_the_cap_is_a_stop() -> None:
    scheduler, sequence = running(max_tokens=2, stop=(8,))
    (delta,) = scheduler.process([result(sequence, [7, 8, 9])])
    assert (delta.finish_reason, delta.stop_token_id, delta.token_ids) == ("stop", 8, [7, 8])


def test_a_stop_id_in_the_prompt_or_after_the_cap_does_not_stop() -> None:
    scheduler, sequence = running(max_tokens=2, stop=(3, 9))
    (delta,) = scheduler.process([result(sequence, [7, 8, 9])])
    assert (delta.finish_reason, delta.stop_token_id, delta.token_ids) == ("length", None, [7, 8])


def test_logprobs_and_accepted_drafts_are_cut_with_the_tokens() -> None:
    scheduler, sequence = running(max_tokens=9, stop=(8,))
    (delta,) = scheduler.process([result(sequence, [7, 8, 9, 10])])
    assert delta.token_ids == [7, 8] and delta.num_accepted == 2 and delta.num_drafts == 3
    assert [entry.token_id for entry in delta.logprobs or []] == [7, 8]


def test_the_bonus_token_is_not_an_accepted_draft() -> None:
    scheduler, sequence = running(max_tokens=9)
    (delta,) = scheduler.process([result(sequence, [7, 8, 9, 10])])
    assert delta.token_ids == [7, 8, 9, 10] and delta.num_accepted == 3 and delta.finish_reason is None


def test_only_the_first_delta_tells_of_cache_and_queue() -> None:
    harness = Harness(make_config(page_size=4))
    harness.run(make_request("a", prompt(20), 9))
    harness.run(make_request("b", prompt(20), 9))
    first, *later = harness.deltas["b"]
    assert first.num_cached_tokens == 16 and first.scheduled_time is not None
    assert later and all(d.num_cached_tokens == 0 and d.scheduled_time is None for d in later)
    assert harness.deltas["a"][0].num_cached_tokens == 0


# --- results that come too late ----------------------------------------------------------------------------


def test_results_of_an_aborted_request_are_void() -> None:
    scheduler, sequence = running()
    late = result(sequence, [7, 8])
    assert scheduler.abort("r") is True
    assert scheduler.process([late]) == []
    assert scheduler.abort("r") is False
    assert scheduler.abort("never seen") is False
    assert not scheduler.has_work()
    scheduler.check()


def test_release_is_idempotent_in_every_state() -> None:
    harness = Harness(make_config(max_num_seqs=1))
    for name in ("running", "waiting"):
        harness.add(make_request(name, prompt(9), 20))
    harness.iterate()
    sequences = [*harness.scheduler._running, *harness.scheduler._waiting]
    for sequence in sequences * 2:
        harness.scheduler.release(sequence)
        harness.scheduler.check()
    harness.assert_idle()


def test_a_step_in_flight_after_the_end_is_void() -> None:
    scheduler, sequence = running(max_tokens=5)
    first = result(sequence, [7, 8, 9, 10])
    scheduler.schedule()
    second = result(sequence, [11, 12])
    third = result(sequence, [13])
    assert [d.token_ids for d in scheduler.process([first])] == [[7, 8, 9, 10]]
    assert [d.token_ids for d in scheduler.process([second])] == [[11]]
    assert scheduler.process([third]) == []
    scheduler.check()


def test_no_step_is_planned_that_the_steps_in_flight_make_useless() -> None:
    scheduler, _ = running(max_tokens=2)
    assert len(scheduler.schedule().rows) == 1
    assert scheduler.schedule().rows == [], "two steps in flight emit the two tokens at least"


# --- statistics --------------------------------------------------------------------------------------------


def test_statistics_are_increments_and_the_state_now() -> None:
    harness = Harness(make_config(page_size=4, num_pages=40, max_num_seqs=1), accept=0)
    harness.add(make_request("a", prompt(9), 30))
    harness.add(make_request("b", prompt(9), 30))
    harness.iterate()
    stats = harness.scheduler.stats()
    assert (stats.requests_running, stats.requests_waiting, stats.prompt_tokens) == (1, 1, 9)
    assert (stats.prefix_cache_queried_tokens, stats.prefix_cache_hit_tokens) == (9, 0)
    assert stats.pages_free + stats.pages_cached + stats.pages_used == 39 and stats.pages_used == 4
    assert harness.scheduler.stats().prompt_tokens == 0
    harness.drain()
    stats = harness.scheduler.stats()
    assert (stats.prefix_cache_queried_tokens, stats.prefix_cache_hit_tokens) == (9, 4)


def test_expected_output_is_what_one_request_alone_emits() -> None:
    """The oracle of the other tests, against a hand-made chain."""
    request = make_request("r", [1, 2], 3)
    first = next_token([1, 2])
    second = next_token([1, 2, first])
    third = next_token([1, 2, first, second])
    assert expected_output(request, 100) == ([first, second, third], "length")
    assert expected_output(request, 4) == ([first, second], "length")
    assert expected_output(make_request("r", [1, 2], 3, stop=(first,)), 100) == ([first], "stop")


def test_deltas_are_typed_messages() -> None:
    scheduler, sequence = running()
    (delta,) = scheduler.process([result(sequence, [7])])
    assert isinstance(delta, TokenDelta) and delta.error is None
