"""A request's result depends on nothing but the request (invariants I3 and I4), by random schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.types import Request, SamplingParams
from tests.engine.drive import Answer, collect, finish, generate, greedy, make_engine, request
from tests.fixtures.checkpoints import build_f2

COMMON = dict(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PARAMS = [
    greedy(20),
    greedy(20, presence_penalty=1.5, frequency_penalty=0.5),
    greedy(20, repetition_penalty=1.4, logit_bias={3: 2.0}, min_tokens=3, stop_token_ids=(3,)),
    SamplingParams(max_tokens=20, seed=1),
    SamplingParams(max_tokens=20, seed=2, temperature=0.7, top_k=12, top_p=0.9),
    SamplingParams(max_tokens=20, seed=3, min_p=0.1, frequency_penalty=0.7),
]
PROMPTS = [[(7 * i + j * j) % 89 for j in range(length)] for i, length in enumerate([1, 2, 9, 17, 40, 64])]
KINDS = [(prompt, params) for prompt in PROMPTS for params in PARAMS]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_f2(tmp_path_factory.mktemp("f2") / "m")


@pytest.fixture(scope="module")
def alone(path: Path) -> list[Answer]:
    """Each kind of request served alone by a fresh, plain engine (K = 3)."""
    engine = make_engine(path, prefix_cache=False)
    return [generate(engine, [prompt], params)[0] for prompt, params in KINDS]


@pytest.fixture(scope="module")
def engines(path: Path) -> list[Engine]:
    """Engines that differ in everything that must not matter."""
    return [
        make_engine(path, schedule="sync", prefill_chunk_size=7),
        make_engine(path, schedule="overlap", prefill_chunk_size=16),
        make_engine(path, schedule="sync", kv_page_size=1, num_kv_pages=400, prefill_chunk_size=3),
        make_engine(path, schedule="overlap", kv_page_size=64, num_kv_pages=8),
        make_engine(path, schedule="sync", kv_page_size=4, num_kv_pages=30),
        make_engine(path, schedule="overlap", kv_page_size=4, num_kv_pages=30, max_num_seqs=3),
    ]


Arrival = tuple[int, int, int | None]
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # iteration at which it comes
        st.integers(0, len(KINDS) - 1),
        st.one_of(st.none(), st.none(), st.none(), st.integers(0, 8)),  # iterations until it is aborted
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=40, **COMMON)  # type: ignore[arg-type]
@given(arrivals=ARRIVALS, which=st.integers(0, 5))
def test_i3_results_do_not_depend_on_arrivals_neighbours_chunks_pages_or_schedule(
    engines: list[Engine], alone: list[Answer], arrivals: list[Arrival], which: int
) -> None:
    engine = engines[which]
    answers: dict[str, Answer] = {}
    pending = sorted((when, number, kind, stop) for number, (when, kind, stop) in enumerate(arrivals))
    aborts: dict[str, int] = {}
    iteration = 0
    while pending or engine.has_work():
        while pending and pending[0][0] <= iteration:
            _, number, kind, stop = pending.pop(0)
            engine.add(_request(number, kind))
            if stop is not None:
                aborts[str(number)] = iteration + stop
        for name in [name for name, when in aborts.items() if when <= iteration]:
            engine.abort(name)
            del aborts[name]
        collect(engine, answers)
        iteration += 1
    finish(engine)
    for number, (_, kind, stop) in enumerate(arrivals):
        got = answers.get(str(number), Answer())
        if stop is None or got.finish_reason is not None:
            assert got.token_ids == alone[kind].token_ids
            assert got.finish_reason == alone[kind].finish_reason
        else:
            assert got.token_ids == alone[kind].token_ids[: len(got.token_ids)]


def _request(number: int, kind: int) -> Request:
    prompt, params = KINDS[kind]
    return request(str(number), prompt, params)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_b4_at_temperature_0_penalties_and_biases_do_not_depend_on_k(path: Path, k: int) -> None:
    kinds = [params for params in PARAMS if params.temperature == 0]
    plain = make_engine(path, num_speculative_tokens=0)
    drafted = make_engine(path, num_speculative_tokens=k)
    for params in kinds:
        expected = [answer.token_ids for answer in generate(plain, PROMPTS, params)]
        assert [answer.token_ids for answer in generate(drafted, PROMPTS, params)] == expected


def test_b4_penalties_of_either_sign_change_the_text(path: Path) -> None:
    engine = make_engine(path)
    outputs = {
        sign: generate(engine, [PROMPTS[3]], greedy(30, frequency_penalty=sign))[0].token_ids
        for sign in (-2.0, 0.0, 2.0)
    }
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3
    assert len(set(outputs[-2.0])) < len(set(outputs[2.0]))


def test_min_tokens_holds_stop_ids_back_exactly(path: Path) -> None:
    free = generate(make_engine(path), [PROMPTS[4]], greedy(30))[0].token_ids
    stop = (free[2],)
    for k in (0, 3):
        engine = make_engine(path, num_speculative_tokens=k)
        answer = generate(engine, [PROMPTS[4]], greedy(30, stop_token_ids=stop, min_tokens=6))[0]
        assert stop[0] not in answer.token_ids[:6]
        assert len(answer.token_ids) >= 6


def test_preemption_and_resume_change_nothing(path: Path, alone: list[Answer]) -> None:
    """A pool for about two of six requests: they take turns."""
    engine = make_engine(path, kv_page_size=4, num_kv_pages=40, max_num_seqs=6)
    preemptions = 0
    answers: dict[str, Answer] = {}
    kinds = [i for i, (prompt, _) in enumerate(KINDS) if len(prompt) in (17, 40)]
    for number, kind in enumerate(kinds):
        engine.add(_request(number, kind))
    while engine.has_work():
        outputs = engine.iterate()
        preemptions += outputs.stats.preemptions
        for delta in outputs.deltas:
            answers.setdefault(delta.request_id, Answer()).take(delta)
    assert preemptions > 0
    for number, kind in enumerate(kinds):
        assert answers[str(number)].token_ids == alone[kind].token_ids
