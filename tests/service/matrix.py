"""Each request parameter over speculation, streaming and batch: run it, and print what agrees.

``python -m tests.service.matrix`` prints the table. At temperature 0 an answer must be the same for every
number of speculative tokens (K), streamed or not, alone or beside seven other requests. Above 0 it must be so
for one K and seed, and over K the tokens must have the same distribution. The engine is the real one, in this
process, on two checkpoints: F1, whose draft errs after every third token, so that runs of each length are
accepted; and F2, of random weights, whose answers depend on the whole context.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from scipy.stats import chi2_contingency

from engine.client import InProcessEngineClient
from engine.logs import configure_logs
from service.app import create_app
from service.metrics import ServiceMetrics
from service.settings import Settings
from service.text import Tokenizer
from tests.fixtures.checkpoints import build_f1, build_f2

KS = (0, 1, 3)
STREAM = (False, True)
BATCHES = (1, 8)
CHECKPOINTS = ("f1", "f2")
MAX_TOKENS = 13
NUM_SAMPLES = 64
"""Choices of one request whose tokens are compared between numbers of speculative tokens."""
SAMPLED_POSITIONS = (0, 1, 2, 4, 7)
LEAST_P_VALUE = 1e-4

GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_tokens": {"max_tokens": 6},
    "max_completion_tokens": {"max_completion_tokens": 7},
    "min_tokens": {"min_tokens": 10, "stop": [" w1", " w2", " w3"]},
    "n": {"n": 3},
    "stop": {"stop": [" w4", "2 w", "7"]},
    "stop_token_ids": {"stop_token_ids": list(range(2, 64, 7))},
    "include_stop_str_in_output": {"stop": ["7", "3 w"], "include_stop_str_in_output": True},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"1": 3}},
    "skip_special_tokens": {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {"1": 3}},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "frequency_penalty < 0": {"frequency_penalty": -2.0},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": {"7": 100, "9": -100}},
    "logit_bias, penalties": {"logit_bias": {"7": 4, "9": 4, "11": 4}, "frequency_penalty": 1.5},
    "top_k, top_p, min_p": {"top_k": 3, "top_p": 0.5, "min_p": 0.2},
    "seed": {"seed": 5},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 3},
    "return_token_ids": {"return_token_ids": True},
    "add_special_tokens": {"add_special_tokens": False},
    "priority": {"priority": 3},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "temperature > 1": {"temperature": 1.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1, "temperature": 1.5},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"7": 3, "9": -100}},
    "n": {"n": 3},
    "logprobs": {"logprobs": 3},
}
DRAWN = {name: body for name, body in SAMPLED.items() if name not in ("n", "logprobs")}
"""Those that say how to draw: here the distributions are compared."""
REFUSED: dict[str, Any] = {"best_of": 2, "suffix": "x", "use_beam_search": True, "bad_words": ["a"]}


class Cell(NamedTuple):
    """One way to run a request."""

    checkpoint: str
    k: int
    stream: bool
    batch: int


Answer = list[dict[str, Any]]
"""The choices: text, reason, token ids, log-probabilities."""


class Results(NamedTuple):
    """What every request answered in every cell, and the sampled ids by parameter, checkpoint and K."""

    answers: dict[str, dict[Cell, Answer]]
    samples: dict[tuple[str, str], dict[int, np.ndarray]]
    """Ids [NUM_SAMPLES, positions]."""
    refused: dict[str, set[int]]


def requests() -> dict[str, dict[str, Any]]:
    """Bodies by name; those above temperature 0 are seeded."""
    base = {"prompt": "w5 w6 w9", "max_tokens": MAX_TOKENS, "return_token_ids": True}
    greedy = {name: {**base, "temperature": 0, **body} for name, body in GREEDY.items()}
    if "max_completion_tokens" in greedy:
        del greedy["max_completion_tokens"]["max_tokens"]
    sampled = {f"T>0: {name}": {**base, "seed": 11, **body} for name, body in SAMPLED.items()}
    return greedy | sampled


@asynccontextmanager
async def application(model: Path, k: int) -> AsyncGenerator[httpx.AsyncClient, None]:
    settings = Settings(
        model=model, num_speculative_tokens=k, max_num_seqs=16, num_kv_pages=600, kv_page_size=16, threads=1
    )
    client = InProcessEngineClient(settings.engine_options())
    app = create_app(settings, client, ServiceMetrics(), Tokenizer.from_directory(model))
    async with app.router.lifespan_context(app):
        await app.state.service.lifecycle.started()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            yield http


async def ask(http: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> Answer:
    """The choices of an answer, put together from its chunks if streamed."""
    response = await http.post("/v1/completions", json={**body, "stream": stream}, timeout=120)
    assert response.status_code == 200, response.text
    bodies = [response.json()] if not stream else list(_chunks(response.text))
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in bodies for choice in chunk["choices"]):
        whole = choices.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "offsets": []})
        whole["text"] += choice["text"]
        whole["ids"] += choice["token_ids"]
        if choice["logprobs"]:
            whole["logprobs"] += choice["logprobs"]["token_logprobs"]
            whole["offsets"] += choice["logprobs"]["text_offset"]
        whole["reason"] = choice["finish_reason"]
        whole["stop"] = choice.get("stop_reason")
    return [choices[index] for index in sorted(choices)]


def _chunks(text: str) -> Iterator[dict[str, Any]]:
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return (json.loads(event.removeprefix("data: ")) for event in events[:-2])


def build(root: Path, checkpoint: str) -> Path:
    """The directory of one of ``CHECKPOINTS``."""
    if checkpoint == "f1":
        return build_f1(root / "f1", wrong_draft_tokens=range(0, 64, 3)).path
    return build_f2(root / "f2", tokenizer=True)


async def run(models: dict[str, Path]) -> Results:
    """Run every request in every cell of some checkpoints. Takes some tens of seconds."""
    bodies = requests()
    results = Results({name: {} for name in bodies}, {}, {name: set() for name in REFUSED})
    for checkpoint, k in product(models, KS):
        async with application(models[checkpoint], k) as http:
            for stream in STREAM:
                for name, body in bodies.items():
                    results.answers[name][Cell(checkpoint, k, stream, 1)] = await ask(http, body, stream)
                names = list(bodies)
                for first in range(0, len(names), 8):
                    # Each is a neighbour of the others; the last ones begin first, so slots differ too.
                    order = names[first : first + 8][::-1]
                    answers = await asyncio.gather(*(ask(http, bodies[name], stream) for name in order))
                    for name, answer in zip(order, answers, strict=True):
                        results.answers[name][Cell(checkpoint, k, stream, 8)] = answer
            for name, parameters in DRAWN.items():
                body = {
                    **bodies[f"T>0: {name}"],
                    **parameters,
                    "n": NUM_SAMPLES,
                    "ignore_eos": True,
                    "seed": 23,
                }
                answer = await ask(http, {**body, "max_tokens": max(SAMPLED_POSITIONS) + 1}, False)
                ids = np.array([choice["ids"] for choice in answer])
                results.samples.setdefault((name, checkpoint), {})[k] = ids[:, SAMPLED_POSITIONS]
            for name, value in REFUSED.items():
                response = await http.post("/v1/completions", json={"prompt": "w5", name: value})
                assert response.status_code != 400 or response.json()["error"]["param"] == name
                results.refused[name].add(response.status_code)
    return results


def same(left: Answer, right: Answer) -> bool:
    """Equal, log-probabilities to 1e-4."""
    if len(left) != len(right):
        return False
    for one, other in zip(left, right, strict=True):
        exact = [{**choice, "logprobs": None} for choice in (one, other)]
        if exact[0] != exact[1] or len(one["logprobs"]) != len(other["logprobs"]):
            return False
        if not np.allclose(one["logprobs"], other["logprobs"], rtol=0, atol=1e-4):
            return False
    return True


def disagreements(results: Results, name: str) -> list[Cell]:
    """Cells whose answer differs from that of the first cell that it must equal."""
    answers = results.answers[name]
    over_k = not name.startswith("T>0")

    def reference(cell: Cell) -> Cell:
        return Cell(cell.checkpoint, KS[0] if over_k else cell.k, STREAM[0], BATCHES[0])

    return [cell for cell in answers if not same(answers[cell], answers[reference(cell)])]


def p_values(results: Results, name: str, checkpoint: str) -> list[float]:
    """At each sampled position, that of "the ids have one distribution for every K" (chi-square)."""
    samples = results.samples[name, checkpoint]
    values = []
    for position in range(len(SAMPLED_POSITIONS)):
        ids = [samples[k][:, position] for k in KS]
        common = np.bincount(np.concatenate(ids))
        # Rare ids share one bin: the test needs some counts in each.
        bins = np.where(common >= 5 * len(KS), np.arange(len(common)), len(common))
        table = np.array([np.bincount(bins[sample], minlength=len(common) + 1) for sample in ids])
        table = table[:, table.sum(axis=0) > 0]
        values.append(float(chi2_contingency(table).pvalue) if table.shape[1] > 1 else 1.0)
    return values


def table(results: Results) -> str:
    """The matrix as Markdown."""
    lines = [
        f"| parameter | K {KS} x stream x batch {BATCHES} x {CHECKPOINTS} | over K |",
        "| --- | --- | --- |",
    ]
    for name in results.answers:
        wrong = disagreements(results, name)
        num_cells = len(results.answers[name])
        told = f"{num_cells - len(wrong)} of {num_cells} as they must be"
        over_k = "identical"
        if name.startswith("T>0"):
            over_k = "-"
            if (key := name.removeprefix("T>0: ")) in DRAWN:
                least = min(min(p_values(results, key, checkpoint)) for checkpoint in CHECKPOINTS)
                over_k = (
                    f"one distribution (least p {least:.3f} of {len(SAMPLED_POSITIONS) * len(CHECKPOINTS)})"
                )
        lines.append(f"| {name} | {told} | {over_k} |")
    for name, statuses in results.refused.items():
        lines.append(f"| {name} | refused: {', '.join(map(str, sorted(statuses)))} | - |")
    return "\n".join(lines)


if __name__ == "__main__":
    configure_logs("warning", "text")
    with tempfile.TemporaryDirectory() as directory:
        models = {name: build(Path(directory), name) for name in CHECKPOINTS}
        print(table(asyncio.run(run(models))))
