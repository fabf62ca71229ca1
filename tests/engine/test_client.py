"""Both clients against a scripted engine: the same behaviour, and every way in which a process can die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import zmq

from engine.client import EngineClient, InProcessEngineClient
from engine.errors import EngineDeadError, RequestError
from engine.options import EngineOptions
from engine.process_client import ProcessEngineClient
from engine.types import GrammarSpec, Request, SamplingParams, StepStats, TokenDelta
from tests.engine.fake_engine import (
    COUNT,
    CRASHING_FACTORY,
    ENDLESS,
    FACTORY,
    HANGING_FACTORY,
    LOOP,
    RAISE,
    REFUSE,
    REFUSING_FACTORY,
    SIGTERM_SELF,
)

STALL = 1.5
BOUND = 30.0
"""A hang is a failure, not a wait; far above what anything here takes."""


def request(request_id: str = "r", kind: int = COUNT, max_tokens: int = 5) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(request_id=request_id, prompt_token_ids=[kind], params=params, arrival_time=0.0)


async def read(client: EngineClient, what: Request) -> list[TokenDelta]:
    async with asyncio.timeout(BOUND):
        return [delta async for delta in client.submit(what)]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def started(kind: type, **options: object) -> AsyncIterator[EngineClient]:
    client = kind(EngineOptions(model="fake"), factory=FACTORY, **options)
    try:
        async with asyncio.timeout(BOUND):
            await client.start()
        yield client
    finally:
        async with asyncio.timeout(BOUND):
            await client.stop()


def process_client(**options: object) -> contextlib.AbstractAsyncContextManager[ProcessEngineClient]:
    return started(ProcessEngineClient, stall_timeout=STALL, **options)


both = pytest.mark.parametrize("kind", [ProcessEngineClient, InProcessEngineClient])


@both
async def test_requests_are_served_side_by_side(kind: type):
    async with started(kind) as client:
        assert client.state == "ready"
        assert client.info.vocab_size == 1000
        assert client.progress is not None
        assert client.progress.done == 2
        got = await asyncio.gather(*(read(client, request(f"r{n}", max_tokens=n)) for n in range(1, 9)))
        assert [tokens(deltas) for deltas in got] == [list(range(n)) for n in range(1, 9)]
        assert all(deltas[-1].finish_reason == "length" for deltas in got)
    assert client.state == "dead"


@both
async def test_statistics_reach_the_callback_and_its_failure_stops_nothing(kind: type):
    seen: list[StepStats] = []

    def sink(stats: StepStats) -> None:
        seen.append(stats)
        raise RuntimeError("a broken sink")

    async with started(kind, on_stats=sink) as client:
        assert tokens(await read(client, request())) == [0, 1, 2, 3, 4]
        await until(lambda: seen[-1].requests_running == 0)
    assert seen[0].requests_running == 1


async def test_a_request_that_cannot_be_sent_leaves_nothing_behind():
    async with process_client() as client:
        params = SamplingParams(max_tokens=5, grammar=GrammarSpec("regex", "\ud800"))  # no UTF-8
        with pytest.raises(UnicodeEncodeError):
            client.submit(Request(request_id="r", prompt_token_ids=[COUNT], params=params, arrival_time=0.0))
        assert tokens(await read(client, request())) == [0, 1, 2, 3, 4]  # its id is free


@both
async def test_a_refusal_is_a_delta(kind: type):
    async with started(kind) as client:
        [delta] = await read(client, request(kind=REFUSE))
        assert delta.finish_reason == "error"
        assert delta.error is not None
        assert delta.error.code == "invalid_request"
        assert client.state == "ready"


@both
async def test_an_abort_ends_the_stream_and_frees_the_request(kind: type):
    running: list[int] = []
    async with started(kind, on_stats=lambda stats: running.append(stats.requests_running)) as client:
        stream = client.submit(request(kind=ENDLESS))
        await anext(stream)
        client.abort("r")
        rest = [delta async for delta in stream]
        assert [delta.finish_reason for delta in rest if delta.finish_reason] == ["abort"]
        await until(lambda: running[-1] == 0)
        client.abort("r")
        client.abort("never seen")
        assert tokens(await read(client, request("other"))) == [0, 1, 2, 3, 4]


@both
@pytest.mark.parametrize("how", ["aclose", "cancel"])
async def test_leaving_a_stream_early_aborts_the_request(kind: type, how: str):
    running: list[int] = []
    async with started(kind, on_stats=lambda stats: running.append(stats.requests_running)) as client:

        async def consume() -> None:
            async with contextlib.aclosing(client.submit(request(kind=ENDLESS))) as stream:
                async for _ in stream:
                    if how == "aclose":
                        return

        task = asyncio.create_task(consume())
        await until(lambda: bool(running))
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task], timeout=BOUND)
        await until(lambda: running[-1] == 0)


@both
async def test_a_live_id_cannot_be_used_twice(kind: type):
    async with started(kind) as client:
        stream = client.submit(request(kind=ENDLESS))
        with pytest.raises(RequestError, match="in use"):
            client.submit(request())
        await stream.aclose()
        assert tokens(await read(client, request("other"))) == [0, 1, 2, 3, 4]


@both
async def test_stop_answers_open_streams_and_can_be_repeated(kind: type):
    deaths: list[str] = []
    async with started(kind, on_death=deaths.append) as client:
        stream = client.submit(request(kind=ENDLESS))
        await anext(stream)
        await client.stop()
        with pytest.raises(EngineDeadError, match="stopped"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            client.submit(request())
    assert deaths == []


@both
@pytest.mark.parametrize(
    ("factory", "words"),
    [(REFUSING_FACTORY, "model_type='x'"), (CRASHING_FACTORY, "ZeroDivisionError: in load")],
)
async def test_a_failed_load_is_told(kind: type, factory: str, words: str):
    client = kind(EngineOptions(model="fake"), factory=factory)
    with pytest.raises(EngineDeadError, match="not ready"):
        _ = client.info
    async with asyncio.timeout(BOUND):
        with pytest.raises(EngineDeadError, match=words):
            await client.start()
        await client.stop()
    assert client.state == "dead"


@both
async def test_an_exception_in_the_engine_answers_everybody(kind: type):
    deaths: list[str] = []
    async with started(kind, on_death=deaths.append) as client:
        others = [client.submit(request(f"e{n}", ENDLESS)) for n in range(3)]
        with pytest.raises(EngineDeadError, match="IndexError"):
            await read(client, request(kind=RAISE))
        for stream in others:
            with pytest.raises(EngineDeadError, match="IndexError"):
                async for _ in stream:
                    pass
        assert client.state == "dead"
        with pytest.raises(EngineDeadError):
            client.submit(request("late"))
    assert len(deaths) == 1


async def test_stop_before_start_leaves_nothing():
    client = ProcessEngineClient(EngineOptions(model="fake"), factory=FACTORY)
    await client.stop()
    with pytest.raises(EngineDeadError):
        await client.start()
    assert client.pid is None


async def test_killed_engine():
    async with process_client() as client:
        stream = client.submit(request(kind=ENDLESS))
        await anext(stream)
        os.kill(client.pid, signal.SIGKILL)
        async with asyncio.timeout(BOUND):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async for _ in stream:
                    pass
        assert client.state == "dead"


@pytest.mark.parametrize("how", ["SIGSTOP", "endless loop"])
async def test_stuck_engine_is_ended(how: str):
    async with process_client() as client:
        stream = client.submit(request(kind=ENDLESS))
        await anext(stream)
        if how == "SIGSTOP":
            os.kill(client.pid, signal.SIGSTOP)
        else:
            client.submit(request("loop", LOOP))
        async with asyncio.timeout(BOUND):
            with pytest.raises(EngineDeadError, match="stuck"):
                async for _ in stream:
                    pass
        await until(lambda: not psutil.pid_exists(client.pid))


class NotYetConnected:
    """A socket that has no peer for its first sends."""

    def __init__(self, socket: zmq.Socket[bytes], refusals: int) -> None:
        self._socket, self.refusals = socket, refusals

    def send(self, data: bytes, flags: int) -> None:
        if self.refusals:
            self.refusals -= 1
            raise zmq.Again
        self._socket.send(data, flags)

    def close(self) -> None:
        self._socket.close()


async def test_what_is_sent_before_the_engine_is_connected_arrives_in_order():
    """It may be ready over one socket before the other is connected; nothing is lost then, nor its end."""
    async with process_client() as client:
        assert client._outbox is not None
        client._outbox = NotYetConnected(client._outbox, refusals=5)  # type: ignore[assignment]
        got = await asyncio.gather(*(read(client, request(f"r{n}", max_tokens=n)) for n in (2, 3)))
        assert [tokens(deltas) for deltas in got] == [[0, 1], [0, 1, 2]]
        client._outbox.refusals = 3  # type: ignore[attr-defined]
        await client.stop()
        assert client._process.returncode == 0


async def test_what_a_dead_engine_was_to_be_sent_is_dropped():
    async with process_client() as client:
        assert client._outbox is not None
        client._outbox = NotYetConnected(client._outbox, refusals=10**9)  # type: ignore[assignment]
        stream = client.submit(request())
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await anext(stream)
        await until(lambda: not client._unsent)


async def test_an_idle_engine_and_a_blocked_service_are_not_deaths():
    async with process_client() as client:
        time.sleep(1.5 * STALL)
        await asyncio.sleep(1.5 * STALL)
        assert client.state == "ready"
        assert tokens(await read(client, request())) == [0, 1, 2, 3, 4]


async def test_signals_to_the_process_group_do_not_end_the_engine():
    async with process_client() as client:
        assert tokens(await read(client, request(kind=SIGTERM_SELF))) == [0, 1, 2, 3, 4]
        assert os.getpgid(client.pid) != os.getpgid(0)


async def test_clean_stop_exits_with_zero_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with process_client() as client:
        [directory] = tmp_path.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        process = psutil.Process(client.pid)
        await client.stop()
        assert client._process.returncode == 0
    assert not process.is_running()
    assert list(tmp_path.iterdir()) == []


STARTER = f"""
import asyncio
from engine.options import EngineOptions
from engine.process_client import ProcessEngineClient
from tests.engine.fake_engine import FACTORY, LOOP
from tests.engine.test_client import request

async def main():
    client = ProcessEngineClient(EngineOptions(model="fake"), factory=FACTORY, stall_timeout={10 * BOUND})
    await client.start()
    client.submit(request(kind=LOOP))
    print(client.pid, flush=True)
    await asyncio.sleep({10 * BOUND})

asyncio.run(main())
"""


async def test_a_killed_service_leaves_nothing_behind(tmp_path: Path):
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-c", STARTER]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=root, env=env) as starter:
        assert starter.stdout is not None
        engine = int(starter.stdout.readline())
        assert psutil.pid_exists(engine)
        starter.kill()
    await until(lambda: not psutil.pid_exists(engine) or psutil.Process(engine).status() == "zombie")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cancelled", [False, True])
async def test_stop_during_the_load(cancelled: bool):
    client = ProcessEngineClient(EngineOptions(model="fake"), factory=HANGING_FACTORY)
    starting = asyncio.create_task(client.start())
    await until(lambda: client.progress is not None)
    assert client.state == "starting"
    if cancelled:
        starting.cancel()
    async with asyncio.timeout(BOUND):
        await client.stop()
        with pytest.raises((EngineDeadError, asyncio.CancelledError)):
            await starting
    assert not psutil.pid_exists(client.pid)


async def test_a_temporary_directory_with_a_long_name_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    client = ProcessEngineClient(EngineOptions(model="fake"), factory=FACTORY)
    with pytest.raises(EngineDeadError, match="TMPDIR"):
        await client.start()
    await client.stop()
