"""The one path of both generating endpoints: body, prompts, engine, answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import structlog
from fastapi import Request
from msgspec.structs import replace
from starlette.responses import Response

from engine.token_bytes import TokenBytes
from engine.types import Request as EngineRequest
from service.context import Service, service_of
from service.detokenize import ChoiceText
from service.errors import request_timeout
from service.formats import Format, ResponseHead, answer_size
from service.generation import ChoiceDelta, ChoicePlan, Generation
from service.json_body import read_json_object
from service.prompt_scores import check_generated_scores, check_scores, prompt_text
from service.prompts import EncodedPrompt, ModelLimits, choice_seed, run, sampling_params
from service.schemas import ChatBody, GenerationBody, parse_body
from service.streaming import DONE, EventStream, event, while_connected
from service.text import Tokenizer
from service.tracing import GenerationTrace

_log = structlog.get_logger(__name__)
AnyBody = TypeVar("AnyBody", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was found valid: what to run and how to tell of it."""

    service: Service
    body: GenerationBody
    generation: Generation
    form: Format

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream's events; those that are ready together come in one piece."""
        form, generation = self.form, self.generation
        with self.service.lifecycle.running(generation):
            async with aclosing(generation.batches()) as batches:
                opening = await run(lambda: [event(chunk) for chunk in form.opening()], form.head.prompt_size)
                async for batch in batches:
                    new = await run(partial(self._new_events, batch), answer_size(batch, form.head))
                    events = opening + new
                    opening = []
                    if events:
                        yield b"".join(events)
            usage = event(form.usage_chunk(generation)) if self.body.include_usage else b""
            yield usage + DONE

    def _new_events(self, batch: Sequence[ChoiceDelta]) -> list[bytes]:
        chunks = [self.form.chunk(delta) for delta in batch]
        return [event(chunk) for chunk in chunks if chunk is not None]

    async def whole(self) -> bytes:
        """The whole answer. Raises ``ApiError``."""
        deltas: list[ChoiceDelta] = []
        with self.service.lifecycle.running(self.generation):
            async with aclosing(self.generation.batches()) as batches:
                async for batch in batches:
                    deltas.extend(batch)
        form = self.form
        size = form.head.prompt_size + answer_size(deltas, form.head)
        return await run(lambda: form.response(deltas, self.generation), size)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[AnyBody]):
    """What makes one generating endpoint different from the other."""

    body: type[AnyBody]
    encode: Callable[[AnyBody, ModelLimits], Awaitable[list[EncodedPrompt]]]
    format: Callable[[ResponseHead, Tokenizer], Format]
    id_prefix: str
    operation: str
    """Name of the operation in traces, as OpenTelemetry's conventions have it."""

    async def serve(self, request: Request) -> Response:
        """Answer ``request``; everything that can be refused is, before the engine is asked.

        Raises:
            ApiError: See ``service/errors.py``.
            ClientGone: The client left; its requests were aborted.
        """
        service = service_of(request)
        state = request.state
        service.lifecycle.check_accepting()
        service.admission.check_room()
        value = await read_json_object(request, service.bodies)
        place = state.closing.enter_context(service.admission.place())
        job = await self.prepare(service, value, state.arrival_time)
        place.claim(len(job.generation.choices), "n" if job.body.n > 1 else "prompt")
        state.closing.callback(_log_end, state.request_id, job)
        if service.tracer is not None:
            trace = GenerationTrace(self.operation, job.form.head, job.body, job.generation)
            state.closing.enter_context(service.tracer.span(trace, request.headers, state.request_id))
        if service.settings.request_timeout is not None:
            left = state.arrival_time + service.settings.request_timeout - time.monotonic()
            timer = asyncio.get_running_loop().call_later(left, job.generation.fail, request_timeout())
            state.closing.callback(timer.cancel)
        if job.body.stream:
            return EventStream(job.events())
        content = await while_connected(request.receive, job.whole())
        return Response(content, media_type="application/json")

    async def prepare(self, service: Service, value: Mapping[str, Any], arrival_time: float) -> Job:
        """Check the decoded body ``value`` and make a job of it. Raises ``ApiError``."""
        body = parse_body(self.body, value)
        model = service.check_model(body.model)
        limits = service.limits()
        prompts = await self.encode(body, limits)
        check_scores(body, prompts)
        service.lifecycle.check_accepting()  # again: tokenising may have taken a while
        head = ResponseHead(
            id=f"{self.id_prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            prompts=prompts,
            n=body.n,
            include_usage=body.include_usage,
            return_token_ids=body.return_token_ids,
            echo=body.echoes,
            logprobs=body.num_logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )
        token_bytes = service.tokenizer.token_bytes
        if isinstance(body, ChatBody) and body.grammar is None:
            output = service.chat_marks.for_prompt(prompts[0].text or "", with_tools=bool(body.offered_tools))
            if output is not None:
                head = head._replace(new_chat_output=output)
                token_bytes = service.chat_token_bytes
        plans = _plan(body, head, limits, token_bytes, arrival_time)
        generation = Generation(service.client, service.metrics, plans, limits.info.num_speculative_tokens)
        return Job(service, body, generation, self.format(head, service.tokenizer))


def _log_end(request_id: str, job: Job) -> None:
    """What became of a request; never its text."""
    head, generation = job.form.head, job.generation
    spec, timing = generation.spec_stats.summary(), generation.timing()
    _log.info(
        "generation",
        request_id=request_id,
        id=head.id,
        outcomes=[choice.outcome for choice in generation.choices],
        error=None if generation.error is None else generation.error.code,
        prompt_tokens=sum(len(prompt.token_ids) for prompt in head.prompts),
        completion_tokens=generation.num_completion_tokens,
        accept_length=None if spec is None else round(spec.mean_acceptance_length, 3),
        time_to_first_token=timing.time_to_first_token,
        e2e_latency=timing.e2e_latency,
    )


def _plan(
    body: GenerationBody,
    head: ResponseHead,
    limits: ModelLimits,
    token_bytes: TokenBytes,
    arrival_time: float,
) -> Sequence[ChoicePlan]:
    """The engine's requests, prompt-major; refuses what does not fit. Raises ``ApiError``."""
    params = [sampling_params(body, len(prompt.token_ids), limits) for prompt in head.prompts]
    check_generated_scores(body, params)
    plans: list[ChoicePlan] = []
    for index, prompt in enumerate(head.prompts):
        offset = None if body.num_logprobs is None else 0
        if offset is not None and body.echoes:
            offset = len(prompt_text(prompt, limits.tokenizer))
        for choice in range(body.n):
            # A whole answer tells them when all is there, so that one choice's can stand for all
            scored = body.stream or choice == 0
            request = EngineRequest(
                request_id=f"{head.id}-{len(plans)}",
                prompt_token_ids=prompt.token_ids,
                params=replace(
                    params[index],
                    seed=choice_seed(body.seed, choice),
                    prompt_logprobs=params[index].prompt_logprobs if scored else None,
                ),
                arrival_time=arrival_time,
                priority=body.priority,
            )
            text = ChoiceText(
                token_bytes,
                body.stop,
                include_stop=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens,
                min_tokens=body.min_tokens,
                offset=offset,
            )
            plans.append(ChoicePlan(request, text, index, frozenset(body.stop_token_ids)))
    return plans
