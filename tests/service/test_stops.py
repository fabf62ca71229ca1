"""Stops inside accepted runs: what is kept is the same wherever runs begin, streamed or not (B2, B21, C2)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.fake_engine import FakeEngine, engine_info
from tests.service.harness import Harness, events_of, serving, text_by_choice, tokens_of

EOS = 1
LETTERS = "abcdefghijklmnop"


def check_statistics(body: dict[str, Any], num_speculative_tokens: int) -> dict[str, Any]:
    """The invariants that clients check."""
    stats = body["metrics"]["speculative_decoding"]
    histogram = stats["acceptance_histogram"]
    accepted, steps = stats["num_accepted_draft_tokens"], stats["num_spec_steps"]
    assert len(histogram) == num_speculative_tokens + 1 == stats["num_spec_tokens"] + 1
    assert sum(histogram) == steps
    assert sum(j * count for j, count in enumerate(histogram)) == accepted
    assert stats["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert stats["draft_acceptance_rate"] == pytest.approx(accepted / stats["num_draft_tokens"])
    return dict(stats)


async def both_modes(harness: Harness, **body: Any) -> dict[str, Any]:
    """The whole answer, after checking that the stream says the same."""
    whole = (await harness.complete(**body)).json()
    chunks = events_of(await harness.complete(**body, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"] == whole["usage"]
    stats = [body["metrics"]["speculative_decoding"] for body in (chunks[-1], whole)]
    assert stats[0] == stats[1]
    texts = text_by_choice(chunks)
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        last = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]][-1]
        assert last["finish_reason"] == choice["finish_reason"]
        assert last["stop_reason"] == choice["stop_reason"]
    return whole


@pytest.mark.parametrize("place", range(4, 9))
@pytest.mark.parametrize("kind", ["string", "id", "eos", "cap"])
async def test_b2_sweep_of_a_stop_over_a_run(place: int, kind: str) -> None:
    """Runs of 4 tokens begin at 0, 4 and 8; the end comes at each place of the second run."""
    tokens = tokens_of(LETTERS)
    if kind == "eos":
        tokens[place] = EOS
    ask: dict[str, Any] = {
        "string": {"stop": LETTERS[place]},
        "id": {"stop_token_ids": [tokens[place]]},
        "eos": {},
        "cap": {"max_tokens": place + 1},
    }[kind]
    engine = FakeEngine(lambda request: tokens, accepts=lambda step: 3)
    async with serving(engine) as harness:
        before = harness.sample("generation_tokens_total")
        body = await both_modes(harness, **{"max_tokens": 16, "logprobs": 1, "return_token_ids": True, **ask})
        (choice,) = body["choices"]
        kept = place + 1
        assert choice["text"] == LETTERS[: kept if kind == "cap" else place]
        assert choice["finish_reason"] == ("length" if kind == "cap" else "stop")
        assert choice["stop_reason"] == {"string": LETTERS[place], "id": tokens[place]}.get(kind)
        assert choice["token_ids"] == tokens[:kept], "no id after the one that stopped"
        assert len(choice["logprobs"]["tokens"]) == body["usage"]["completion_tokens"] == kept
        assert harness.sample("generation_tokens_total") - before == 2 * kept
        stats = check_statistics(body, 3)
        full, rest = divmod(kept, 4)
        assert stats["num_accepted_draft_tokens"] == 3 * full + min(3, rest)
        assert stats["num_spec_steps"] == full + (rest > 0)
        assert harness.sample("spec_accepted_tokens_total") == 2 * stats["num_accepted_draft_tokens"]
        assert harness.sample("spec_drafts_total") == 2 * stats["num_spec_steps"]
        assert engine.running == 0
        if kind == "string" and kept < 12:
            assert engine.aborted == [request.request_id for request in engine.requests]


@pytest.mark.parametrize("num_accepted", range(4))
async def test_b21_c2_text_does_not_depend_on_the_length_of_runs(num_accepted: int) -> None:
    output = [
        *tokens_of(
            "x", b"\xf0\x9f", b"\x98\x80", b"\xe4\xbd", b"\xa0\xe5\xa5", b"\xbd!", "👩‍👩‍👧 st", b"top!"
        ),
        EOS,
    ]
    info = engine_info(num_speculative_tokens=num_accepted)
    engine = FakeEngine(lambda request: output, accepts=lambda step: num_accepted, info=info)
    async with serving(engine) as harness:
        body = await both_modes(harness, max_tokens=100)
        assert body["choices"][0]["text"] == "x😀你好!👩‍👩‍👧 sttop!"
        if num_accepted == 0:
            assert body["metrics"]["speculative_decoding"] is None
        else:
            check_statistics(body, num_accepted)


@pytest.mark.parametrize("cap", range(1, 7))
async def test_c2_a_cap_inside_a_character_ends_both_modes_alike(cap: int) -> None:
    output = tokens_of("a", b"\xf0\x9f", b"\x98\x80", b"\xe4\xbd", b"\xa0\xe5\xa5", b"\xbd!")
    texts = ["a", "a\ufffd", "a😀", "a😀\ufffd", "a😀你\ufffd", "a😀你好!"]
    async with serving(FakeEngine(lambda request: output, accepts=lambda step: 2)) as harness:
        body = await both_modes(harness, max_tokens=cap)
        assert body["choices"][0]["text"] == texts[cap - 1]
        assert body["usage"]["completion_tokens"] == cap


@pytest.mark.parametrize(
    ("ask", "text", "reason"),
    [
        ({"stop": ["stop"]}, "a", "stop"),
        ({"stop": ["stop"], "include_stop_str_in_output": True}, "astop", "stop"),
        ({"stop": ["top", "stop"]}, "a", "stop"),
        ({"stop": ["to", "stop"]}, "as", "stop"),
        ({"stop": ["!", "x"]}, "astop", "stop"),
        ({"stop": ["nope", "stop?"]}, "astop!b", "length"),
        ({"stop": ["!b!"]}, "astop!b", "length"),
        ({"stop": ["stop"], "min_tokens": 3}, "astop!b", "length"),
        ({"stop": ["!b"], "min_tokens": 3}, "astop", "stop"),
        ({"stop": ["b"], "min_tokens": 4}, "astop!b", "length"),
    ],
)
async def test_stop_strings(ask: dict[str, Any], text: str, reason: str) -> None:
    output = tokens_of("a", "s", b"top!", "b")
    async with serving(FakeEngine(lambda request: output, accepts=lambda step: 3)) as harness:
        choice = (await both_modes(harness, max_tokens=4, **ask))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, reason)


async def test_a_stop_string_before_the_end_of_sequence_of_the_same_run_wins() -> None:
    engine = FakeEngine(lambda request: [*tokens_of("xyz"), EOS], accepts=lambda step: 3)
    async with serving(engine) as harness:
        body = await both_modes(harness, stop="y")
        assert body["choices"][0]["text"] == "x" and body["choices"][0]["stop_reason"] == "y"
        assert body["usage"]["completion_tokens"] == 2


async def test_statistics_are_summed_over_choices_and_steps_without_drafts_are_not_counted() -> None:
    engine = FakeEngine(lambda request: [*tokens_of("abcdefg"), EOS], accepts=lambda step: 3)
    async with serving(engine) as harness:
        one = check_statistics(await both_modes(harness), 3)
        three = check_statistics(await both_modes(harness, n=3), 3)
        for key in ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"):
            assert three[key] == 3 * one[key]
        assert three["mean_acceptance_length"] == one["mean_acceptance_length"]


async def test_ignore_eos_goes_on_and_never_shows_the_token() -> None:
    engine = FakeEngine(lambda request: [*tokens_of("ab"), EOS, *tokens_of("cd")], accepts=lambda step: 3)
    async with serving(engine) as harness:
        choice = (await both_modes(harness, max_tokens=5, ignore_eos=True))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
