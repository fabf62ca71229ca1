"""``python -m tests.service.overhead``: tokens/s through HTTP with 64 streams, and of the engine alone, in turns.

Both run the shipped model with one engine thread, K = 3, greedy, no prefix cache, on the same 16 prompts.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.request
from statistics import median

import msgspec

from engine.bench import EngineContender
from engine.types import SamplingParams
from service.commands.bench import read_prompts
from service.settings import load_settings
from tests.service.load import post

STREAMS, MAX_TOKENS, ROUNDS, PORT = 64, 128, 3, 18777


async def _through_http(prompts: list[list[int]], total: int) -> float:
    """Tokens a second of ``total`` requests, ``STREAMS`` at a time."""
    waiting = [prompts[i % len(prompts)] for i in range(total)]
    start = time.perf_counter()

    async def client() -> None:
        while waiting:
            body = {
                "prompt": waiting.pop(),
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            reply = await post(PORT, "/v1/completions", body)
            assert reply.status == 200 and b"[DONE]" in reply.body, reply

    await asyncio.gather(*(client() for _ in range(STREAMS)))
    return total * MAX_TOKENS / (time.perf_counter() - start)


def main() -> None:
    settings = load_settings({"threads": 1, "no_prefix_cache": True, "port": PORT, "log_level": "error"})
    prompts = read_prompts(settings)
    total = len(prompts) * (1 + STREAMS // 8)
    engine = EngineContender("engine", msgspec.structs.replace(settings.engine_options(), threads=1))
    options = ["--threads", "1", "--no-prefix-cache", "--port", str(PORT), "--log-level", "error"]
    server = subprocess.Popen([sys.executable, "-m", "service.cli", "serve", *options])
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready")
                break
            except OSError:
                time.sleep(0.2)
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, seed=0)
        alone, http = [], []
        for _ in range(ROUNDS):
            outcome = engine.run(prompts, params, STREAMS)
            alone.append(outcome.tokens / outcome.seconds)
            http.append(asyncio.run(_through_http(prompts, total)))
        print(f"engine alone {median(alone):.0f} tokens/s ({min(alone):.0f} to {max(alone):.0f})")
        print(f"through HTTP {median(http):.0f} tokens/s ({min(http):.0f} to {max(http):.0f})")
        print(f"ratio {median(http) / median(alone):.3f}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
