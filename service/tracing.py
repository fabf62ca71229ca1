"""OpenTelemetry traces: one span for each generating request, with token counts, latencies and accept length.

Attribute names are those of OpenTelemetry's conventions for generative AI (``gen_ai.*``), and Eyas's own
(``eyas.*``) where those have none. No text of a request or an answer is in a span. The SDK is an optional
dependency (``eyas[otlp]``), so it is imported only when traces are wanted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from engine.errors import ConfigError
from service.formats import ResponseHead
from service.generation import Generation
from service.schemas import GenerationBody

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

FLUSH_SECONDS = 3.0
"""How long the end of the server waits for spans that a collector does not take."""

Attributes = dict[str, str | int | float | list[str]]


class GenerationTrace(NamedTuple):
    """What a span is made of; read when the request has ended."""

    operation: str
    head: ResponseHead
    body: GenerationBody
    generation: Generation

    def asked(self) -> Attributes:
        """What the client asked for."""
        body = self.body
        given: Mapping[str, str | int | float | None] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": "eyas",
            "gen_ai.request.model": self.head.model,
            "gen_ai.request.choice.count": body.n,
            "gen_ai.request.max_tokens": body.token_limit,
            "gen_ai.request.seed": body.seed,
            "gen_ai.request.temperature": body.temperature,
            "gen_ai.request.top_p": body.top_p,
            "gen_ai.request.top_k": body.top_k,
            "gen_ai.request.frequency_penalty": body.frequency_penalty,
            "gen_ai.request.presence_penalty": body.presence_penalty,
        }
        return {name: value for name, value in given.items() if value is not None}

    def told(self) -> Attributes:
        """What became of it."""
        generation = self.generation
        timing = generation.timing()
        spec = generation.spec_stats.summary()
        attributes: Attributes = {
            "gen_ai.response.id": self.head.id,
            "gen_ai.response.model": self.head.model,
            "gen_ai.response.finish_reasons": [choice.outcome or "none" for choice in generation.choices],
            "gen_ai.usage.input_tokens": sum(len(prompt.token_ids) for prompt in self.head.prompts),
            "gen_ai.usage.output_tokens": generation.num_completion_tokens,
            "eyas.cached_tokens": generation.num_cached_tokens,
        }
        latencies = {
            "eyas.latency.queue": timing.queue_time,
            "eyas.latency.time_to_first_token": timing.time_to_first_token,
            "eyas.latency.inter_token": timing.inter_token_latency,
            "eyas.latency.e2e": timing.e2e_latency,
        }
        attributes |= {name: value for name, value in latencies.items() if value is not None}
        if spec is not None:
            attributes["eyas.spec.accept_length"] = spec.mean_acceptance_length
            attributes["eyas.spec.num_steps"] = spec.num_spec_steps
            attributes["eyas.spec.num_accepted_tokens"] = spec.num_accepted_draft_tokens
            attributes["eyas.spec.num_draft_tokens"] = spec.num_draft_tokens
        return attributes


class Tracer:
    """Sends spans to where its provider does."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("eyas")

    @classmethod
    def to_endpoint(cls, endpoint: str, service_name: str) -> Tracer:
        """A tracer that sends batches of spans over OTLP/HTTP, from a thread of its own.

        Args:
            endpoint: URL of the collector; a URL without a path gets ``/v1/traces``.
            service_name: ``service.name`` of the spans.

        Raises:
            ConfigError: The SDK is not installed, or the URL is none.
        """
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--otlp-endpoint {endpoint}: must be an http or https URL")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError("--otlp-endpoint needs the OpenTelemetry SDK: install eyas[otlp]") from None
        if url.path in ("", "/"):
            url = url._replace(path="/v1/traces")
        provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url.geturl())))
        return cls(provider)

    @contextmanager
    def span(self, trace: GenerationTrace, headers: Mapping[str, str], request_id: str) -> Iterator[None]:
        """A span from the request's arrival to the end of the block, a child of the client's ``traceparent``."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        generation = trace.generation
        age = time.monotonic() - generation.choices[0].request.arrival_time
        span = self._tracer.start_span(
            f"{trace.operation} {trace.head.model}",
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes={**trace.asked(), "eyas.request_id": request_id},
            start_time=time.time_ns() - int(age * 1e9),
        )
        context = span.get_span_context()
        if context.trace_flags.sampled:
            for choice in generation.choices:
                choice.trace_id = f"{context.trace_id:032x}"
        try:
            yield
        finally:
            span.set_attributes(trace.told())
            if generation.error is not None:
                span.set_attribute("error.type", generation.error.code or "error")
                span.set_status(Status(StatusCode.ERROR))
            span.end()

    async def close(self) -> None:
        """Send what is left, if that does not take too long."""
        # A daemon: a collector that does not answer must not hold up the end of the process.
        flush = threading.Thread(target=self._provider.shutdown, name="otlp-flush", daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, FLUSH_SECONDS)
