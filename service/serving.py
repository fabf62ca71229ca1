"""The one path of both generating endpoints: body, prompts, engine, answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic

from fastapi import Request
from msgspec.structs import replace
from starlette.responses import Response

from engine.types import Request as EngineRequest
from service.context import Service, service_of
from service.detokenize import ChoiceText
from service.formats import Format, ResponseHead
from service.generation import ChoiceDelta, ChoicePlan, Generation
from service.json_body import read_json_object
from service.prompts import EncodedPrompt, ModelLimits, choice_seed, sampling_params
from service.schemas import AnyBody, parse_body
from service.streaming import DONE, EventStream, event, while_connected
from service.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[AnyBody]):
    """What makes one generating endpoint different from the other."""

    body: type[AnyBody]
    encode: Callable[[AnyBody, ModelLimits], Awaitable[list[EncodedPrompt]]]
    format: Callable[[ResponseHead, Tokenizer], Format]
    id_prefix: str

    async def serve(self, request: Request) -> Response:
        """Answer ``request``; everything that can be refused is, before the engine is asked.

        Raises:
            ApiError: See ``service/errors.py``.
            ClientGone: The client left; its requests were aborted.
        """
        service = service_of(request)
        value = await read_json_object(request, service.settings.max_body_bytes)
        body = parse_body(self.body, value)
        model = service.check_model(body.model)
        limits = service.limits()
        prompts = await self.encode(body, limits)
        service.lifecycle.check_accepting()  # again: tokenising may have taken a while
        response_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        plans = _plan(body, prompts, limits, response_id, request.state.arrival_time)
        generation = Generation(service.client, service.metrics, plans, limits.info.num_speculative_tokens)
        head = ResponseHead(
            id=response_id,
            created=int(time.time()),
            model=model,
            prompts=prompts,
            n=body.n,
            include_usage=body.include_usage,
            return_token_ids=body.return_token_ids,
            echo=body.echoes,
        )
        form = self.format(head, service.tokenizer)
        if body.stream:
            return EventStream(_events(service, generation, form, include_usage=body.include_usage))
        content = await while_connected(request.receive, _collect(service, generation, form))
        return Response(content, media_type="application/json")


def _plan(
    body: AnyBody,
    prompts: Sequence[EncodedPrompt],
    limits: ModelLimits,
    response_id: str,
    arrival_time: float,
) -> list[ChoicePlan]:
    """The engine's requests, prompt-major; refuses what does not fit. Raises ``ApiError``."""
    params = [sampling_params(body, len(prompt.token_ids), limits) for prompt in prompts]
    plans: list[ChoicePlan] = []
    for index, prompt in enumerate(prompts):
        for choice in range(body.n):
            request = EngineRequest(
                request_id=f"{response_id}-{len(plans)}",
                prompt_token_ids=prompt.token_ids,
                params=replace(params[index], seed=choice_seed(body.seed, choice)),
                arrival_time=arrival_time,
                priority=body.priority,
            )
            text = ChoiceText(
                limits.tokenizer.token_bytes,
                body.stop,
                include_stop=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens,
                min_tokens=body.min_tokens,
                offset=None if body.num_logprobs is None else 0,
            )
            plans.append(ChoicePlan(request, text, index, frozenset(body.stop_token_ids)))
    return plans


async def _events(
    service: Service, generation: Generation, form: Format, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The stream's events; those that are ready together come in one piece."""
    with service.lifecycle.running(generation):
        async with aclosing(generation.batches()) as batches:
            opening = [event(chunk) for chunk in form.opening()]
            async for batch in batches:
                chunks = [form.chunk(delta) for delta in batch]
                events = opening + [event(chunk) for chunk in chunks if chunk is not None]
                opening = []
                if events:
                    yield b"".join(events)
        usage = event(form.usage_chunk(generation)) if include_usage else b""
        yield usage + DONE


async def _collect(service: Service, generation: Generation, form: Format) -> bytes:
    deltas: list[ChoiceDelta] = []
    with service.lifecycle.running(generation):
        async with aclosing(generation.batches()) as batches:
            async for batch in batches:
                deltas.extend(batch)
    return form.response(deltas, generation)
