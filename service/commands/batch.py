"""``eyas generate --input``: a file of requests in OpenAI's batch format through an engine in this process."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.client import InProcessEngineClient
from engine.errors import ConfigError, EngineDeadError
from engine.logs import configure_logs
from engine.worker import DEFAULT_FACTORY
from service.context import Service
from service.errors import ApiError, bad_request
from service.json_body import parse_json_object
from service.lifecycle import Lifecycle
from service.metrics import ServiceMetrics
from service.routes.generate import CHAT, COMPLETIONS
from service.schemas import ChatBody, CompletionBody
from service.serving import Endpoint
from service.settings import Settings
from service.spec_stats import SpecStats
from service.targets import refuse_unwritable_file
from service.text import Tokenizer

_ENDPOINTS: dict[str, Endpoint[ChatBody] | Endpoint[CompletionBody]] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
}


class Line(msgspec.Struct, frozen=True):
    """A line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Answer(msgspec.Struct, frozen=True):
    """What HTTP would have answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Result(msgspec.Struct, frozen=True):
    """A line of the output."""

    id: str
    custom_id: str
    response: Answer
    error: None = None


class Totals:
    """Statistics over all requests."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_requests = 0
        self.num_failed = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.spec = SpecStats(num_speculative_tokens)
        self._started = time.monotonic()

    def describe(self) -> str:
        """For people, in a line or two."""
        seconds = time.monotonic() - self._started
        rate = self.completion_tokens / seconds
        lines = [
            f"{self.num_requests} requests, {self.num_failed} failed: {self.prompt_tokens} prompt tokens, "
            f"{self.completion_tokens} tokens in {seconds:.3f} s ({rate:.1f} tokens/s)"
        ]
        summary = self.spec.summary()
        if summary is not None:
            lines.append(summary.describe())
        return "\n".join(lines)


def run_batch(settings: Settings, source: Path, target: Path, *, factory: str = DEFAULT_FACTORY) -> None:
    """Answer every request of ``source``, and write each answer to ``target`` when it is there.

    The order of the answers is that of their ends; ``custom_id`` tells which is which. A request that is
    refused or fails is answered with its status and error, like the others.

    Args:
        settings: Options of the engine.
        source: One JSON object a line: ``custom_id``, ``method``, ``url``, ``body``.
        target: Is overwritten once the engine has started.
        factory: ``module:class`` whose ``load`` makes the engine.

    Raises:
        ConfigError: ``source`` cannot be read or has a line that is no request, or ``target`` cannot be written;
            nothing was started.
        EngineDeadError: The engine cannot start or died; ``target`` has what was done until then.
    """
    configure_logs("warning", settings.log_format)
    num_lines = _check(source)
    if target.exists() and target.samefile(source):
        raise ConfigError(f"--output {target}: is the file of --input")
    refuse_unwritable_file("--output", target)
    tokenizer = Tokenizer.from_directory(settings.tokenizer_dir)
    try:
        asyncio.run(_run(settings, tokenizer, source, target, num_lines, factory))
    except OSError as error:
        raise ConfigError(f"--output {target}: {error}") from None


def _check(source: Path) -> int:
    """The number of requests, all of them well-formed and with ids of their own."""
    seen: set[str] = set()
    try:
        for number, line in _lines(source):
            if line.custom_id in seen:
                raise ConfigError(f"{source}, line {number}: custom_id {line.custom_id!r} is there twice")
            seen.add(line.custom_id)
    except OSError as error:
        raise ConfigError(f"--input {source}: {error}") from None
    if not seen:
        raise ConfigError(f"--input {source}: no request in it")
    return len(seen)


def _lines(source: Path) -> Generator[tuple[int, Line]]:
    decoder = msgspec.json.Decoder(Line)
    with source.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                try:
                    yield number, decoder.decode(raw)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise ConfigError(f"{source}, line {number}: {error}") from None


async def _run(
    settings: Settings, tokenizer: Tokenizer, source: Path, target: Path, num_lines: int, factory: str
) -> None:
    client = InProcessEngineClient(settings.engine_options(), factory=factory)
    service = Service(settings, client, ServiceMetrics(), tokenizer, Lifecycle(client))
    console = Console(stderr=True)
    try:
        await client.start()
        totals = Totals(client.info.num_speculative_tokens)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # Not opened before the engine has started: what it holds may be the answers of an earlier run
        with (
            target.open("wb") as out,
            Progress(*columns, console=console) as progress,
            closing(_lines(source)) as lines,
        ):
            bar = progress.add_task("requests", total=num_lines)

            async def work() -> None:
                for _, line in lines:
                    answer = await _answer(service, line, totals)
                    if client.state == "dead":
                        return
                    result = Result(f"batch_req_{uuid.uuid4().hex}", line.custom_id, answer)
                    out.write(msgspec.json.encode(result) + b"\n")
                    progress.advance(bar)

            # Twice what runs: the next request waits in the engine when a slot is free.
            await asyncio.gather(*(work() for _ in range(min(num_lines, 2 * client.info.max_num_seqs))))
        if client.state == "dead":
            raise EngineDeadError("the engine died; the output has the requests that were done until then")
        console.print(totals.describe(), markup=False, highlight=False, soft_wrap=True)
    finally:
        await client.stop()


async def _answer(service: Service, line: Line, totals: Totals) -> Answer:
    request_id = uuid.uuid4().hex
    totals.num_requests += 1
    try:
        content = await _generate(service, line, totals)
    except ApiError as error:
        totals.num_failed += 1
        return Answer(error.status, request_id, msgspec.Raw(msgspec.json.encode(error.body())))
    return Answer(200, request_id, msgspec.Raw(content))


async def _generate(service: Service, line: Line, totals: Totals) -> bytes:
    endpoint = _ENDPOINTS.get(line.url)
    if endpoint is None or line.method != "POST":
        message = f"Only POST {' and '.join(_ENDPOINTS)} are possible."
        raise bad_request(message, "url", "not_found")
    job = await endpoint.prepare(service, parse_json_object(bytes(line.body)), time.monotonic())
    if job.body.stream:
        raise bad_request("stream: not in a batch.", "stream")
    content = await job.whole()
    totals.prompt_tokens += sum(len(prompt.token_ids) for prompt in job.form.head.prompts)
    totals.completion_tokens += job.generation.num_completion_tokens
    totals.spec.merge(job.generation.spec_stats)
    return content
