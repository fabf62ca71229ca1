"""Engines that die are followed by others: how often, when, and what clients see in between."""

from __future__ import annotations

import asyncio

import pytest

from engine.client import DeathSink
from engine.errors import EngineDeadError
from engine.types import Ready, Request, SamplingParams
from service import supervisor
from service.supervisor import SupervisedClient
from tests.service.fake_engine import FakeEngine, engine_info
from tests.service.harness import until


class Engines:
    """Makes scripted engines; those whose number is in ``broken`` die while they load."""

    def __init__(self, broken: set[int] | None = None) -> None:
        self.broken = broken or set()
        self.made: list[FakeEngine] = []
        self.events: list[str] = []

    def make(self, on_death: DeathSink) -> FakeEngine:
        number = len(self.made)
        engine = FakeEngine(
            lambda request: [5] * 50, info=engine_info(num_pages=number + 1), auto_start=False
        )
        engine._on_death = on_death
        loop = asyncio.get_running_loop()
        loop.call_soon(
            engine.die if number in self.broken else lambda: engine._receive(Ready(engine.engine_info))
        )
        self.made.append(engine)
        return engine

    def supervise(self, max_restarts: int) -> SupervisedClient:
        return SupervisedClient(
            self.make,
            max_restarts=max_restarts,
            first_delay=0.001,
            on_ready=lambda: self.events.append("ready"),
            on_down=lambda: self.events.append("down"),
            on_restart=lambda: self.events.append("restart"),
            on_death=lambda reason: self.events.append(f"dead: {reason}"),
        )


def request(request_id: str) -> Request:
    params = SamplingParams(max_tokens=50)
    return Request(request_id=request_id, prompt_token_ids=[5], params=params, arrival_time=0.0)


async def test_a_dead_engine_is_followed_by_another_that_serves() -> None:
    engines = Engines()
    client = engines.supervise(3)
    await client.start()
    stream = client.submit(request("a"))
    engines.made[0].die()
    assert client.state == "starting"
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        client.submit(request("b"))
    await until(lambda: client.state == "ready")
    assert client.info.num_pages == 2
    assert sum([len(delta.token_ids) async for delta in client.submit(request("b"))]) == 50
    client.abort("a")  # of the engine before: nothing happens
    assert engines.events == ["ready", "down", "restart", "ready"]
    assert engines.made[0].stopped
    await client.stop()
    assert client.state == "dead"
    assert engines.made[1].stopped


async def test_between_two_engines_no_progress_is_told() -> None:
    engines = Engines()
    client = engines.supervise(3)
    await client.start()
    engines.made[0].report("capturing", 7, 7)
    engines.made[0].die()
    assert client.state == "starting" and client.progress is None
    await until(lambda: client.state == "ready")
    assert client.progress is None, "the second one told none"
    await client.stop()


async def test_attempts_are_bounded_and_failed_ones_count() -> None:
    engines = Engines(broken={1, 2})
    client = engines.supervise(2)
    await client.start()
    engines.made[0].die()
    await until(lambda: client.state == "dead")
    assert engines.events == ["ready", "down", "restart", "down", "restart", "down", "dead: killed"]
    assert len(engines.made) == 3
    await client.stop()


async def test_an_engine_that_lived_long_begins_a_new_series(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    client = engines.supervise(1)
    await client.start()
    monkeypatch.setattr(supervisor, "STABLE_SECONDS", -1.0)
    for number in range(3):
        engines.made[number].die()
        await until(lambda: client.state == "ready")
    monkeypatch.setattr(supervisor, "STABLE_SECONDS", 1e9)
    engines.made[3].die()
    await until(lambda: client.state == "dead")
    await client.stop()


async def test_an_engine_that_never_was_ready_is_not_tried_again() -> None:
    engines = Engines(broken={0})
    client = engines.supervise(3)
    with pytest.raises(EngineDeadError):
        await client.start()
    assert client.state == "dead"
    assert engines.events == ["down", "dead: killed"]
    await client.stop()


async def test_stop_ends_a_restart() -> None:
    engines = Engines()
    client = engines.supervise(3)
    await client.start()
    engines.made[0].die()
    await client.stop()
    await asyncio.sleep(0.01)
    assert client.state == "dead"
    assert engines.events in (["ready", "down"], ["ready", "down", "restart"])
