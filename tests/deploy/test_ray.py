"""The Ray Serve application with two real replicas on CPUs: answers, streams, affinity, and one that is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.fixtures.checkpoints import F1

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow

PORT = 18011
BOUND = 120.0
PROMPT = [5, 7, 6]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def client(f1: F1) -> Iterator[httpx.Client]:
    from ray import serve

    from deploy.ray.app import build

    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    options = {"model": str(f1.path), "max_num_seqs": "4", "num_kv_pages": "64", "drain_timeout": "5"}
    serve.run(build({"replicas": "2", "gpus": "0", **options}), route_prefix="/")
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=BOUND) as client:
        yield client
    serve.shutdown()
    ray.shutdown()


def engines(model: F1) -> list[psutil.Process]:
    """The engine processes of the replicas, and of nobody else: the checkpoint's path is this session's own."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if "engine.worker" in command and str(model.path) in " ".join(command):
                found.append(process)
        except psutil.Error:
            continue
    return found


def complete(client: httpx.Client, **body: Any) -> httpx.Response:
    fields = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True, **body}
    return client.post("/v1/completions", json=fields)


def ids(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def test_answers_and_streams_are_those_of_the_service(client: httpx.Client, f1: F1):
    expected = f1.walk(PROMPT[-1], NUM_TOKENS)
    response = complete(client)
    assert ids(response) == expected
    assert response.headers["x-request-id"]
    streamed = complete(client, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == expected


def test_errors_pass_through(client: httpx.Client):
    assert complete(client, top_p=7).json()["error"]["param"] == "top_p"
    assert client.get("/nothing").status_code == 404
    assert client.get("/metrics").status_code == 404
    assert client.post("/v1/completions", content=b"{").status_code in (400, 415)
    assert client.get("/ready").json() == {"status": "ready"}


def test_equal_beginnings_go_to_the_same_replica(client: httpx.Client):
    # Only the replica that has seen a prompt has its blocks: a miss would show as no cached token.
    for start in (2, 20):
        prompt = " ".join(f"w{2 + (start + i) % 60}" for i in range(200))
        cached = [
            complete(client, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for _ in range(6)
        ]
        assert cached[0] == 0 and all(count > 0 for count in cached[1:]), cached


def test_one_replica_is_killed_and_requests_go_on(client: httpx.Client, f1: F1):
    expected = f1.walk(PROMPT[-1], NUM_TOKENS)
    before = engines(f1)
    assert len(before) == 2
    victim = before[0]
    with ThreadPoolExecutor(4) as pool:
        replica = victim.parent()
        assert replica is not None
        futures = [pool.submit(complete, client) for _ in range(20)]
        replica.send_signal(signal.SIGKILL)
        futures += [pool.submit(complete, client) for _ in range(40)]
        answers = [future.result() for future in futures]
    assert [ids(answer) for answer in answers] == [expected] * len(answers)

    deadline = time.monotonic() + BOUND
    while len(engines(f1)) < 2 or not client.get("/ready").is_success:
        assert time.monotonic() < deadline, "the replica was not replaced"
        time.sleep(0.5)
    assert ids(complete(client)) == expected


def test_a_replica_whose_engine_died_is_replaced(client: httpx.Client, f1: F1):
    victim = engines(f1)[0]
    victim.kill()
    deadline = time.monotonic() + BOUND
    while victim.is_running() or len(engines(f1)) < 2:
        assert time.monotonic() < deadline, "the engine was not replaced"
        time.sleep(0.5)
    for _ in range(8):
        answer = complete(client)
        while answer.status_code == 503 and time.monotonic() < deadline:
            time.sleep(0.5)
            answer = complete(client)
        assert ids(answer) == f1.walk(PROMPT[-1], NUM_TOKENS)
