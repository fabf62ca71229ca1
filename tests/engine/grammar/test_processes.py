"""The processes that grammars are walked and compiled in: whatever ends them, others go on."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine.grammar import children
from engine.grammar.walker import GrammarWalker
from tests.engine.drive import Answer, collect, generate, greedy, make_engine, request
from tests.engine.grammar.support import ids, regex, sampled, text_of
from tests.fixtures.checkpoints import F1

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_d9_a_grammar_that_cannot_be_followed_ends_its_request_only(flat: F1, schedule: str) -> None:
    """It compiles at once, but each token takes many times as long as the one before."""
    hostile = "a"
    for _ in range(6):
        hostile = f"({hostile}){{1,50}}"
    engine = make_engine(flat.path, schedule=schedule)
    good = sampled(regex("[a-z]{40}"), seed=2)
    (alone,) = generate(engine, [[3, 4]], good)
    for slow in (False, True):
        engine._grammars.walker(slow=slow)._time_limit = 0.5
    engine.add(request("good", [3, 4], good))
    engine.add(request("free", [3, 4], greedy(20)))
    answers: dict[str, Answer] = {}
    while "good" not in answers:
        collect(engine, answers)
    engine.add(request("hostile", [3, 4], sampled(regex(f"b?{hostile}"), logit_bias={ids("a")[0]: 90.0})))
    while engine.has_work():
        collect(engine, answers)
    assert answers["good"].token_ids == alone.token_ids
    assert len(answers["free"].token_ids) == 20
    assert answers["hostile"].finish_reason == "error"
    assert re.fullmatch("b?a+", text_of(answers["hostile"].token_ids)), "what came before the end was masked"
    engine.close()


def test_the_death_of_the_walking_process_costs_nobody_anything(flat: F1) -> None:
    engine = make_engine(flat.path)
    params = sampled(regex("[a-z]{40}"), seed=2)
    (alone,) = generate(engine, [[3, 4]], params)
    child = engine._grammars.walker()._child
    assert child is not None
    child._process.kill()
    child._process.join()
    again = generate(engine, [[3, 4], [3, 4]], params)
    assert [answer.finish_reason for answer in again] == ["stop", "stop"]
    assert [answer.token_ids for answer in again] == [alone.token_ids] * 2
    assert isinstance(engine._grammars.walker(), GrammarWalker)


def test_a_process_whose_engine_is_gone_ends_without_a_traceback() -> None:
    child = children.Child(children.compile_one, regex("a"), [b"", b"", b"a"], 5.0)
    child.connection.close()
    child._process.join()
    assert child.close() == 0, "an exception that nobody catches ends it with 1"


def test_no_process_outlives_an_engine_that_is_killed(flat: F1) -> None:
    """Not even one that is busy with a grammar without end."""
    code = (
        "import sys\n"
        "from tests.engine.drive import make_engine, request\n"
        "from tests.engine.grammar.support import nested, regex, sampled\n"
        "from engine.types import GrammarSpec\n"
        "if __name__ == '__main__':\n"
        "    engine = make_engine(sys.argv[1])\n"
        "    engine.add(request('endless', [3], sampled(GrammarSpec('json_schema', nested(400)))))\n"
        "    engine.add(request('a', [3], sampled(regex('[a-z]{9999}'), 9999)))\n"
        "    print('ready', flush=True)\n"
        "    while engine.has_work():\n"
        "        engine.iterate()\n"
    )
    arguments = [sys.executable, "-c", code, str(flat.path)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        family: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(family) < 4 and time.monotonic() < deadline:  # resource tracker, fork server, two at work
            family = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        assert len(family) >= 4
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
