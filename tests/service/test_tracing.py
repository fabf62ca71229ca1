"""Spans of generating requests: what they hold, to whom they belong, and that they reach a collector."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from engine.errors import ConfigError
from service.tracing import Tracer
from tests.service.fake_engine import FakeEngine
from tests.service.harness import Connection, error_of, serving, tokens_of, until

SECRET = "zebra"
HELLO = [*tokens_of("hello"), 1]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracer(provider)


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


async def test_a_span_tells_tokens_latencies_and_accept_length(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    engine = FakeEngine(lambda request: HELLO, accepts=lambda step: 1)
    trace_id, parent_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    async with serving(engine, tracer=tracer) as harness:
        harness.http.headers["traceparent"] = f"00-{trace_id}-{parent_id}-01"
        harness.http.headers["x-request-id"] = "mine"
        answer = (
            await harness.chat(messages=[{"role": "user", "content": SECRET}], seed=3, stop=["Q"])
        ).json()
    span = only(exporter)
    told = dict(span.attributes or {})
    assert span.name == "chat fake"
    assert span.context is not None and f"{span.context.trace_id:032x}" == trace_id
    assert span.parent is not None and f"{span.parent.span_id:016x}" == parent_id
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "fake"
    assert told["gen_ai.request.seed"] == 3
    assert told["gen_ai.response.id"] == answer["id"]
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 6
    spec = answer["metrics"]["speculative_decoding"]
    assert told["eyas.spec.accept_length"] == spec["mean_acceptance_length"] == 2.0
    assert told["eyas.latency.e2e"] == answer["metrics"]["timing"]["e2e_latency"]
    assert told["eyas.request_id"] == "mine"
    assert span.start_time is not None and span.end_time is not None
    assert span.end_time - span.start_time >= told["eyas.latency.e2e"] * 1e9
    assert SECRET not in span.to_json() and "hello" not in span.to_json()


async def test_latency_buckets_have_the_trace_as_their_exemplar(tracer: Tracer) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with serving(FakeEngine(lambda request: HELLO), tracer=tracer) as harness:
        traced = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
        assert (await harness.http.post("/v1/completions", json={"prompt": "hi"}, headers=traced)).is_success
        opened = (await harness.http.get("/metrics", headers={"Accept": "application/openmetrics-text"})).text
        plain = (await harness.http.get("/metrics")).text
    for name in ("time_to_first_token_seconds", "request_latency_seconds"):
        found = [
            sample.exemplar.labels
            for family in text_string_to_metric_families(opened)
            for sample in family.samples
            if sample.name == f"eyas_{name}_bucket" and sample.exemplar
        ]
        assert found == [{"trace_id": trace_id}], name
    assert trace_id not in plain


async def test_a_stream_has_its_span_when_it_ends_and_refusals_have_none(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    async with serving(output=HELLO, tracer=tracer) as harness:
        error_of(await harness.complete(temperature=9))
        await harness.complete(stream=True, n=2)
    assert (only(exporter).attributes or {})["gen_ai.response.finish_reasons"] == ("stop", "stop")


@pytest.mark.parametrize("how", ["death", "leaving"])
async def test_a_span_tells_how_a_request_failed(
    tracer: Tracer, exporter: InMemorySpanExporter, how: str
) -> None:
    engine = FakeEngine(lambda request: HELLO, gate=lambda request, step: asyncio.Event() if step else None)
    async with serving(engine, tracer=tracer) as harness:
        connection = Connection(harness.app, "/v1/completions", b'{"prompt": "hi", "stream": true}')
        await connection.wait_for(lambda c: b"data: " in c.body)
        engine.die() if how == "death" else connection.leave()
        await connection.task
    span = only(exporter)
    told = span.attributes or {}
    assert told["gen_ai.usage.output_tokens"] == 1
    assert told["gen_ai.response.finish_reasons"] == ("error" if how == "death" else "abort",)
    assert told.get("error.type") == ("engine_dead" if how == "death" else None)
    assert span.status.is_ok is (how == "leaving")


class Collector(http.server.BaseHTTPRequestHandler):
    exports: list[tuple[str, ExportTraceServiceRequest]]

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        self.exports.append((self.path, ExportTraceServiceRequest.FromString(raw)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[http.server.ThreadingHTTPServer]:
    Collector.exports = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


async def test_spans_reach_a_collector_before_the_server_ends(
    collector: http.server.ThreadingHTTPServer,
) -> None:
    tracer = Tracer.to_endpoint(f"http://127.0.0.1:{collector.server_port}", "fake")
    async with serving(output=HELLO, tracer=tracer) as harness:
        await harness.complete()
    ((path, export),) = Collector.exports
    assert path == "/v1/traces"
    (resource,) = export.resource_spans
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert names["service.name"] == "fake"
    assert resource.scope_spans[0].spans[0].name == "text_completion fake"


async def test_a_collector_that_is_not_there_changes_nothing() -> None:
    tracer = Tracer.to_endpoint("http://127.0.0.1:9", "fake")
    async with asyncio.timeout(20):
        async with serving(output=HELLO, tracer=tracer) as harness:
            assert (await harness.complete()).status_code == 200
            await until(lambda: harness.engine.running == 0)


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://x", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        Tracer.to_endpoint(url, "fake")
