"""The application around a scripted engine, called by httpx, or as raw ASGI to be able to leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from service.app import create_app
from service.metrics import ServiceMetrics
from service.settings import Settings
from service.text import Tokenizer
from service.tracing import Tracer
from tests.fixtures.tokenizers import BOS, EOS, byte_tokenizer
from tests.service.fake_engine import FakeEngine

PIECES = (b"\xf0\x9f", b"\x98\x80", b"\xe4\xbd", b"\xa0\xe5\xa5", b"\xbd!", b"stop", b"top!", b"ab", b"cab")
"""Multi-byte tokens from id 258 on: an emoji and two CJK characters split over tokens, and some words."""
PIECE_ID = {piece: 258 + i for i, piece in enumerate(PIECES)}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ suffix | default('') }}"
)
MODEL = "fake"


def tokens_of(*parts: str | bytes) -> list[int]:
    """Token ids: each ``str`` byte by byte, each ``bytes`` as one of ``PIECES``."""
    ids: list[int] = []
    for part in parts:
        ids += [PIECE_ID[part]] if isinstance(part, bytes) else [2 + byte for byte in part.encode()]
    return ids


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE, **config: Any) -> Tokenizer:
    """The byte tokenizer with a chat template; ``config`` as in ``tokenizer_config.json``."""
    values = {"bos_token": BOS, "eos_token": EOS, "chat_template": chat_template, **config}
    return Tokenizer(byte_tokenizer(300, PIECES), values)


class Harness:
    """One application and its engine."""

    def __init__(self, app: FastAPI, engine: FakeEngine, metrics: ServiceMetrics) -> None:
        self.app = app
        self.engine = engine
        self.metrics = metrics
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def complete(self, **body: Any) -> httpx.Response:
        """POST /v1/completions with a default prompt."""
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **body})

    async def chat(self, **body: Any) -> httpx.Response:
        """POST /v1/chat/completions with a default message."""
        messages = [{"role": "user", "content": "hi"}]
        return await self.http.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": messages, **body}
        )

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value."""
        value = self.metrics.registry.get_sample_value(f"eyas_{name}", labels)
        assert value is not None, f"no metric eyas_{name} {labels}"
        return value


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    *,
    output: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    tracer: Tracer | None = None,
    wait: bool = True,
    **settings: Any,
) -> AsyncGenerator[Harness, None]:
    """A running application; ``output`` is what every request generates if no engine is given."""
    engine = engine or FakeEngine(lambda request: output)
    metrics = ServiceMetrics()
    values = {"model": Path(MODEL), "drain_timeout": 0.2, **settings}
    app = create_app(Settings(**values), engine, metrics, tokenizer or make_tokenizer(), tracer)
    async with app.router.lifespan_context(app):
        if wait:
            await app.state.service.lifecycle.started()
        harness = Harness(app, engine, metrics)
        async with harness.http:
            yield harness


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a response, checked for its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and "Traceback" not in error["message"]
    assert isinstance(error["type"], str) and isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    return dict(error)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a complete stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = parse_events(response.content)
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def parse_events(raw: bytes) -> list[str]:
    """The data of each server-sent event."""
    blocks = raw.decode("utf-8").split("\n\n")
    assert blocks[-1] == "", "the stream must end with a whole event"
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [block.removeprefix("data: ") for block in blocks[:-1]]


def text_by_choice(chunks: Sequence[dict[str, Any]]) -> dict[int, str]:
    """The concatenated deltas of each choice, of either endpoint."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + new
    return texts


class Connection:
    """One request as raw ASGI messages: what was sent so far can be seen, and the client can leave."""

    def __init__(
        self,
        app: FastAPI,
        path: str,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        more_body: bool = False,
    ) -> None:
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self._changed = asyncio.Condition()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.send(body, more_body=more_body)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))  # type: ignore[arg-type]

    def send(self, body: bytes, *, more_body: bool = False) -> None:
        """Send a part of the body, the last one unless ``more_body``."""
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": more_body})

    def leave(self) -> None:
        """Close the connection."""
        self._messages.put_nowait({"type": "http.disconnect"})

    async def wait_for(self, condition: Callable[[Connection], bool]) -> None:
        """Wait until ``condition`` holds for what was received."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: condition(self)), 10)

    async def _receive(self) -> dict[str, Any]:
        message = await self._messages.get()
        if message["type"] == "http.disconnect":
            self.leave()  # it is told as often as it is asked for
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        async with self._changed:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = dict(message["headers"])
            else:
                self.body += message.get("body", b"")
            self._changed.notify_all()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition`` holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)
