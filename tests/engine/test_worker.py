"""The worker's loop, driven by hand through a link that records what is sent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine.options import EngineOptions
from engine.types import (
    AbortRequest,
    AddRequest,
    Fatal,
    FromEngine,
    Heartbeat,
    Outputs,
    Progress,
    Ready,
    Request,
    SamplingParams,
    Shutdown,
    ToEngine,
)
from engine.worker import EXIT_CRASHED, EXIT_ORPHANED, EXIT_REFUSED, Launch, run
from tests.engine.fake_engine import COUNT, CRASHING_FACTORY, FACTORY, RAISE, REFUSE, REFUSING_FACTORY


class ScriptedLink:
    """Gives each entry of ``script`` to one ``receive``, then nothing a few times, then ``Shutdown``."""

    def __init__(self, *script: list[ToEngine], idle_rounds: int = 5) -> None:
        self._script = [*script, *([] for _ in range(idle_rounds)), [Shutdown()]]
        self.sent: list[FromEngine] = []
        self.timeouts: list[float] = []

    def receive(self, timeout: float) -> list[ToEngine]:
        self.timeouts.append(timeout)
        return self._script.pop(0)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list:
        return [message for message in self.sent if isinstance(message, kind)]


def request(request_id: str, kind: int = COUNT, max_tokens: int = 3) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return AddRequest(
        Request(request_id=request_id, prompt_token_ids=[kind], params=params, arrival_time=0.0)
    )


def run_script(
    *script: list[ToEngine], factory: str = FACTORY, idle_rounds: int = 5
) -> tuple[int, ScriptedLink]:
    link = ScriptedLink(*script, idle_rounds=idle_rounds)
    return run(factory, EngineOptions(model="fake"), link), link


def test_a_request_is_served_and_the_exit_is_clean():
    code, link = run_script([request("a")])
    assert code == 0
    assert [message.done for message in link.of(Progress)] == [1, 2]
    assert link.of(Ready)[0].info.vocab_size == 1000
    tokens = [t for out in link.of(Outputs) for delta in out.deltas for t in delta.token_ids]
    assert tokens == [0, 1, 2]
    assert not link.of(Fatal)


def test_the_loop_waits_only_when_idle():
    _, link = run_script([request("a", max_tokens=4)], idle_rounds=3)
    # Idle before the request; it takes two steps, the second one after a receive that must not wait.
    assert [timeout == 0.0 for timeout in link.timeouts[:4]] == [False, True, False, False]


def test_an_idle_loop_sends_heartbeats_and_no_outputs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.worker.HEARTBEAT_SECONDS", 0.0)
    _, link = run_script(idle_rounds=4)
    assert len(link.of(Heartbeat)) == 5
    assert not link.of(Outputs)


def test_a_refused_request_is_answered_once_and_others_go_on():
    _, link = run_script([request("a"), request("bad", REFUSE)])
    deltas = [delta for out in link.of(Outputs) for delta in out.deltas]
    [refusal] = [delta for delta in deltas if delta.request_id == "bad"]
    assert refusal.finish_reason == "error"
    assert refusal.error is not None
    assert (refusal.error.code, refusal.error.param) == ("invalid_request", "prompt_token_ids")
    assert sum(len(delta.token_ids) for delta in deltas if delta.request_id == "a") == 3


def test_an_abort_that_leaves_nothing_to_do_is_still_reported():
    _, link = run_script([request("a", max_tokens=50)], [AbortRequest("a")])
    assert link.of(Outputs)[0].stats.requests_running == 1
    assert link.of(Outputs)[-1].stats.requests_running == 0
    assert link.of(Outputs)[-1].stats.pages_used == 0


def test_unchanged_statistics_are_not_repeated():
    _, link = run_script([AbortRequest("unknown")], [AbortRequest("unknown")], [AbortRequest("unknown")])
    assert len(link.of(Outputs)) == 1


@pytest.mark.parametrize(
    ("factory", "code", "words"),
    [
        (REFUSING_FACTORY, EXIT_REFUSED, "model_type='x'"),
        (CRASHING_FACTORY, EXIT_CRASHED, "ZeroDivisionError: in load"),
    ],
)
def test_a_failed_load_ends_with_its_reason(factory: str, code: int, words: str):
    got, link = run_script(factory=factory)
    assert got == code
    assert isinstance(link.sent[-1], Fatal)
    assert words in link.sent[-1].message


def test_an_exception_in_an_iteration_ends_with_its_reason():
    code, link = run_script([request("a", RAISE)])
    assert code == EXIT_CRASHED
    assert "IndexError: in iterate" in link.of(Fatal)[0].message


def start_worker(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A worker process whose sockets nobody has bound."""
    launch = Launch(
        inbox=f"ipc://{tmp_path}/in",
        outbox=f"ipc://{tmp_path}/out",
        factory=FACTORY,
        options=EngineOptions(model="fake"),
    )
    argv = [sys.executable, "-m", "engine.worker", msgspec.json.encode(launch).decode()]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2])


def test_a_worker_ends_with_its_starter(tmp_path: Path):
    worker = start_worker(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(1.0)
    assert worker.stdin is not None
    worker.stdin.close()
    assert worker.wait(30) == EXIT_ORPHANED
