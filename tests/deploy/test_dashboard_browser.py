"""The live page in a headless Chromium, in front of a real server whose tokens and drafts are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.types import Count
from service.metrics import ServiceMetrics
from tests.deploy.browser import Page, browser, chromium
from tests.deploy.server import eyas_server
from tests.fixtures.checkpoints import F1
from tests.service.fake_engine import engine_info
from tests.service.test_metrics import stats

pytestmark = pytest.mark.skipif(chromium() is None, reason="chromium is not installed")

KEY = "key-1"
PROMPT = "w5 w7 w6"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def url(f1_wrong: F1, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("dashboard") / "server.log"
    with eyas_server(f1_wrong.path, log, api_key=KEY, max_num_seqs=4, num_kv_pages=64) as server:
        yield server.url


@pytest.fixture(params=["light", "dark"])
def page(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    with browser(tmp_path / "profile") as page:
        page.open(url.replace("//", f"//any:{KEY}@") + "/dashboard", dark=request.param == "dark")
        page.until("document.getElementById('state').textContent === 'ready'")
        yield page
        page.screenshot(tmp_path / f"{request.param}.png")


def text(page: Page, element: str) -> str:
    return str(page.evaluate(f"document.getElementById('{element}').textContent"))


def requested(page: Page) -> list[str]:
    sent: list[dict[str, Any]] = [
        event["params"] for event in page.events if event.get("method") == "Network.requestWillBeSent"
    ]
    return [params["request"]["url"] for params in sent]


def test_the_page(page: Page, url: str, f1_wrong: F1):
    page.evaluate(
        f"document.getElementById('prompt').value = '{PROMPT}';"
        f"document.getElementById('max-tokens').value = '{NUM_TOKENS}';"
        "document.getElementById('go').click()"
    )
    page.until("document.getElementById('told').textContent !== ''")

    # Each token has its text and the colour of its origin, as the checkpoint's construction predicts.
    steps = f1_wrong.predict_steps([5, 7, 6], 3, NUM_TOKENS, f1_wrong.eos_token_ids)
    kinds = [
        "accepted" if i < step.num_accepted else "target"
        for step in steps
        for i in range(len(step.token_ids))
    ]
    spans = page.evaluate(
        "Array.from(document.querySelectorAll('#output span'), (s) => [s.className, s.textContent.trim()])"
    )
    words = [f"w{token}" for step in steps for token in step.token_ids]
    assert spans == [[kind, word] for kind, word in zip(kinds, words, strict=True)]
    accepted = sum(step.num_accepted for step in steps)
    assert text(page, "told").startswith(f"{NUM_TOKENS} tokens in {len(steps)} speculative steps")
    assert f"; {accepted} of {3 * len(steps)} drafts accepted" in text(page, "told")

    # The tiles follow within a poll or two, and the histogram tells the steps of the last minute.
    page.until("document.getElementById('lengths-more').textContent.includes('steps, last minute')")
    page.until("!document.getElementById('ttft').textContent.includes('\\u2013')")
    assert float(text(page, "accept")) == pytest.approx(1 + accepted / len(steps), abs=0.01)
    assert text(page, "model") == f1_wrong.path.name
    assert "K = 3" in text(page, "about")
    assert text(page, "replay") == "0 %"
    assert text(page, "guard") == "quiet"
    assert text(page, "graphs") == "No captured graphs."
    assert text(page, "audit") == "No output was audited."
    assert page.evaluate("document.querySelectorAll('#positions meter').length") == 3
    assert page.evaluate("document.querySelector('#trend-accept path').getAttribute('d').length") > 0

    # Nothing failed, and nothing was asked of anyone else.
    assert not [event for event in page.events if event.get("method") == "Runtime.exceptionThrown"]
    assert all(
        address.startswith((url, "about:", url.replace("//", f"//any:{KEY}@"))) for address in requested(page)
    )

    # An error of the server is shown, and the form works on.
    page.evaluate("document.getElementById('prompt').value = ''; document.getElementById('go').click()")
    page.until("document.getElementById('told').textContent.toLowerCase().includes('prompt')")
    page.until("document.getElementById('go').textContent === 'Complete'")


def page_text(**step: Any) -> str:
    """What a server with graphs and audits serves at ``/metrics``, after one iteration."""
    metrics = ServiceMetrics()
    captured = {"step": [1, 1, 2, 2], "draft": [1, 2]}
    metrics.engine_ready(
        "m",
        "1",
        engine_info(graphs_captured=captured, graph_capture_seconds=2.54, graph_memory_bytes=3 << 20),
    )
    metrics.engine_step(stats(**step))
    return metrics.exposition()[0].decode()


def serve_instead(page: Page, metrics: str) -> None:
    page.evaluate(f"void (window.fetch = async () => new Response({json.dumps(metrics)}))")


def test_graphs_step_times_and_audits(page: Page):
    serve_instead(page, page_text())
    page.until("document.getElementById('graphs').textContent.startsWith('Captured')")
    assert text(page, "graphs") == "Captured graphs: 4 step, 2 draft, in 2.5 s and 3 MiB."
    assert text(page, "steps") == "" and text(page, "guard") == "quiet"
    counts = [
        Count("audits", ("scored",), 3),
        Count("audits", ("skipped",), 1),
        Count("audit_tokens", (), 1200),
        Count("audit_mismatches", ("2",), 2),
    ]
    serve_instead(
        page,
        page_text(counts=counts, step_gpu_seconds=[0.0025] * 5000, step_host_gap_seconds=[0.00004] * 5000),
    )
    page.until("document.getElementById('audit').textContent.startsWith('Audit')")
    assert text(page, "audit") == (
        "Audit: 1,200 tokens of 3 requests scored again, 2 mismatches; 1 audits skipped, 0 failed."
    )
    assert text(page, "steps").startswith("A step takes 2.5 ms, the gap before it 25 µs")
    assert text(page, "guard") == "2"
    assert not [event for event in page.events if event.get("method") == "Runtime.exceptionThrown"]
