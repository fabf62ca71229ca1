"""``eyas generate``: one prompt through an engine in this process, with statistics."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from contextlib import aclosing
from typing import NamedTuple

from pydantic_core import PydanticCustomError
from rich.console import Console

from engine.client import InProcessEngineClient
from engine.errors import ConfigError, EngineError, RequestError
from engine.types import Request, SamplingParams
from engine.worker import DEFAULT_FACTORY
from service.chat_template import ChatTemplateError
from service.detokenize import ChoiceText
from service.errors import ApiError
from service.generation import ChoicePlan, Generation
from service.metrics import ServiceMetrics
from service.prompts import ModelLimits
from service.schema_fields import stop_list
from service.settings import Settings
from service.text import Tokenizer


class Sampling(NamedTuple):
    """How to choose the tokens of the one request."""

    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]


def read_prompt(argument: str | None) -> str:
    """The prompt: the command's argument, else what standard input holds.

    Raises:
        ConfigError: It is not UTF-8, or there is none.
    """
    if argument is not None:
        return _checked_text("prompt", argument)
    if sys.stdin is None:
        raise ConfigError("prompt: neither an argument nor standard input is there")
    try:
        # Not sys.stdin's own encoding, which lets other bytes pass as lone surrogates
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8: {error}") from None


def read_stops(stops: list[str]) -> tuple[str, ...]:
    """The values of ``--stop``.

    Raises:
        ConfigError: One, or their number, is none that the API takes as ``stop``, or it is not UTF-8.
    """
    try:
        return tuple(_checked_text("--stop", stop) for stop in stop_list(stops))
    except PydanticCustomError as error:
        raise ConfigError(f"--stop: {error.message()}") from None


def _checked_text(name: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # Python keeps bytes of an argument that are not UTF-8 as lone surrogates
        raise ConfigError(f"{name}: is not UTF-8") from None
    return text


def generate(
    settings: Settings, prompt: str, sampling: Sampling, *, chat: bool, factory: str = DEFAULT_FACTORY
) -> None:
    """Print the continuation of ``prompt`` on standard output as it comes, then statistics on standard error.

    Args:
        settings: Options of the engine.
        prompt: Text, or with ``chat`` the user's message.
        sampling: See `Sampling`.
        chat: Put ``prompt`` through the chat template.
        factory: ``module:class`` whose ``load`` makes the engine.

    Raises:
        EngineError: The engine cannot start or died, or refuses the request.
    """
    tokenizer = Tokenizer.from_directory(settings.tokenizer_dir)
    try:
        asyncio.run(_generate(settings, tokenizer, prompt, sampling, chat, factory))
    except ApiError as error:
        raise EngineError(error.message) from None
    except ChatTemplateError as error:
        raise EngineError(f"--chat: {error}") from None


async def _generate(
    settings: Settings, tokenizer: Tokenizer, prompt: str, sampling: Sampling, chat: bool, factory: str
) -> None:
    if chat:
        message = {"role": "user", "content": prompt}
        prompt = tokenizer.render_chat([message], add_generation_prompt=True, variables={})
    token_ids = tokenizer.encode(prompt, add_special_tokens=not chat)
    if not token_ids:
        raise RequestError("the prompt is empty", "prompt")
    client = InProcessEngineClient(settings.engine_options(), factory=factory)
    try:
        await client.start()
        limits = ModelLimits(client.info, tokenizer)
        room = limits.max_tokens - len(token_ids)
        if room < 1:
            raise RequestError(f"the prompt has {len(token_ids)} tokens, at most {limits.max_tokens - 1} fit")
        request = Request(
            request_id="generate",
            prompt_token_ids=token_ids,
            params=SamplingParams(
                max_tokens=min(sampling.max_tokens, room),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop_token_ids=tuple(sorted(limits.eos_token_ids)),
            ),
            arrival_time=time.monotonic(),
        )
        text = ChoiceText(tokenizer.token_bytes, sampling.stop)
        await _print_generation(client, ChoicePlan(request, text, 0, frozenset()))
    finally:
        await client.stop()


async def _print_generation(client: InProcessEngineClient, plan: ChoicePlan) -> None:
    generation = Generation(client, ServiceMetrics(), [plan], client.info.num_speculative_tokens)
    first_token_time: float | None = None
    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            first_token_time = first_token_time or time.monotonic()
            sys.stdout.write("".join(delta.text for delta in batch))
            sys.stdout.flush()
    seconds = time.monotonic() - plan.request.arrival_time
    print()
    waited = (first_token_time or time.monotonic()) - plan.request.arrival_time
    Console(stderr=True).print(
        _statistics(generation, plan, waited, seconds), markup=False, highlight=False, soft_wrap=True
    )


def _statistics(generation: Generation, plan: ChoicePlan, waited: float, seconds: float) -> str:
    tokens = generation.num_completion_tokens
    lines = [
        f"{len(plan.request.prompt_token_ids)} prompt tokens, {tokens} tokens in {seconds:.3f} s "
        f"({tokens / seconds:.1f} tokens/s), the first after {waited:.3f} s"
    ]
    spec = generation.spec_stats.summary()
    if spec is not None:
        lines.append(spec.describe())
    return "\n".join(lines)
