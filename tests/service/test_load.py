"""Many clients at once against a real server with a real engine: queue limit, cancels, memory, probes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from engine.worker import DEFAULT_FACTORY
from tests.fixtures.checkpoints import F1
from tests.service.load import Reply, burst, post, soak
from tests.service.test_serve import Server

NUM_PAGES = 400


@pytest.fixture(scope="module")
def server(f1: F1) -> Iterator[Server]:
    server = Server(
        f1.path,
        DEFAULT_FACTORY,
        threads=1,
        max_num_seqs=8,
        max_queued_requests=64,
        num_kv_pages=NUM_PAGES,
        kv_page_size=16,
        max_body_bytes=24 * 2**20,
        engine_timeout=30.0,
    )
    server.until(server.ready)
    yield server
    server.process.terminate()
    assert server.wait() == 0
    server.client.close()


def gauges(server: Server) -> dict[str, float]:
    lines = [line.split(" ") for line in server.client.get("/metrics").text.splitlines() if line[0] != "#"]
    return {
        name: float(value) for name, value in lines if name.startswith(("eyas_requests_", "eyas_kv_pages"))
    }


def check_idle(server: Server) -> None:
    """Within two seconds nothing runs or waits, and every page is accounted for (I4)."""
    deadline = time.monotonic() + 2
    while True:
        now = gauges(server)
        busy = (
            now["eyas_requests_running"] or now["eyas_requests_waiting"] or now['eyas_kv_pages{state="used"}']
        )
        if not busy or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert not busy, now
    pages = sum(now[f'eyas_kv_pages{{state="{state}"}}'] for state in ("used", "cached", "free"))
    assert pages == NUM_PAGES - 1
    started = sum(value for name, value in now.items() if name.startswith("eyas_requests_total"))
    assert started == now["eyas_requests_started_total"]


async def flood(server: Server, num_requests: int) -> list[Reply]:
    body = {"prompt": "w5", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return await burst(server.port, num_requests, body)


@pytest.mark.parametrize("num_requests", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_d7_each_of_a_burst_is_answered(server: Server, num_requests: int) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    replies = asyncio.run(flood(server, num_requests))
    statuses = [reply.status for reply in replies]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 72
    assert all("retry-after: " in reply.headers for reply in replies if reply.status == 429)
    assert process.memory_info().rss - before < 300 * 2**20
    check_idle(server)
    assert server.complete(5, max_tokens=3).status_code == 200


@pytest.mark.parametrize("num_streams,seconds", [(24, 4.0), pytest.param(200, 120.0, marks=pytest.mark.slow)])
def test_cancels_at_any_point_leave_nothing_behind(server: Server, num_streams: int, seconds: float) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "w5 w6", "max_tokens": 60, "ignore_eos": True},
        {"prompt": ["w5", "w9 w2"], "max_tokens": 9},
        {"prompt": " ".join(["w7"] * 300), "max_tokens": 30, "temperature": 0.9, "seed": 3},
        {"prompt": "w8", "max_tokens": 40, "stop": ["3"], "frequency_penalty": 1},
    ]
    assert asyncio.run(soak(server.port, num_streams, seconds, bodies, seed=1)) > num_streams
    check_idle(server)
    spec = server.complete(5, max_tokens=4, temperature=0).json()["metrics"]["speculative_decoding"]
    assert spec["draft_acceptance_rate"] == 1.0, "drafting goes on as before"


@pytest.mark.parametrize("calls", [3, pytest.param(16, marks=pytest.mark.slow)])
def test_d2_probes_are_answered_while_much_goes_on(server: Server, calls: int) -> None:
    """Health is polled while megabytes, one a call, are tokenised, and streams run."""

    async def work() -> list[float]:
        long_text = "w7 " * 340_000
        prompt = " ".join(["w7"] * 500)
        jobs = [
            asyncio.create_task(post(server.port, "/tokenize", {"prompt": long_text})) for _ in range(calls)
        ]
        for _ in range(16):
            body = {"prompt": prompt, "max_tokens": 10, "stream": True}
            jobs.append(asyncio.create_task(post(server.port, "/v1/completions", body)))
        delays = []
        async with httpx.AsyncClient(base_url=server.client.base_url, timeout=30) as probe:
            while not all(job.done() for job in jobs):
                started = time.monotonic()
                assert (await probe.get("/health")).status_code == 200
                delays.append(time.monotonic() - started)
                await asyncio.sleep(0.1)
        statuses = [(await job).status for job in jobs]
        assert statuses == [200] * (calls + 16)
        return delays

    delays = sorted(asyncio.run(work()))
    assert delays[int(len(delays) * 0.99)] < 1.0, delays
