"""Spans of OpenTelemetry for transfers, recorded by a program and by the transfer thread of the vLLM integration."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk needs Python 3.10")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from llm_datadist import Engine, Timeout
from llm_datadist.integrations.opentelemetry import TransferSpans

LIMIT = 60.0


@pytest.fixture
def exported() -> tuple[InMemorySpanExporter, TransferSpans]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter, TransferSpans(provider.get_tracer("test"))


def test_transfers_are_spans(exported: tuple[InMemorySpanExporter, TransferSpans]) -> None:
    exporter, spans = exported
    with Engine(pool="16MiB") as engine:
        cache = engine.allocate("kv", blocks=8, tensors=2, shape=(4096,), dtype="uint8")
        before = time.time_ns()
        copied, failed = engine.copy(cache[1], cache[0]), engine.link("127.0.0.1:1", timeout=0.05)
        copied.result(LIMIT)
        with pytest.raises(Timeout) as failure:
            failed.result(LIMIT)
        spans.record(copied, "copy", {"request": "r"})
        spans.record(failed, "link")
    good, bad = exporter.get_finished_spans()
    assert (good.name, dict(good.attributes or {})) == (
        "llm_datadist.copy",
        {"llm_datadist.bytes": 8192, "request": "r"},
    )
    assert good.status.status_code == trace.StatusCode.UNSET
    assert good.start_time is not None
    assert good.end_time is not None
    # The clock of the span and that of the transfer may differ by a little.
    assert abs(good.end_time - good.start_time - copied.nanos) <= 1000
    assert before - 1_000_000 <= good.end_time <= time.time_ns()
    assert bad.status.status_code == trace.StatusCode.ERROR
    assert bad.status.description == str(failure.value)


def test_a_span_has_the_length_that_is_given(exported: tuple[InMemorySpanExporter, TransferSpans]) -> None:
    exporter, spans = exported
    spans.add("receive", 2.5, {"llm_datadist.blocks": 3}, "why")
    (span,) = exporter.get_finished_spans()
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 2_500_000_000
    assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, "why")
