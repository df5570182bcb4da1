"""Transfers as spans of OpenTelemetry.

A program records each transfer when it learns of its end:

    spans = TransferSpans()
    for event in engine.events():
        if isinstance(event, Completed):
            spans.record(event.transfer, "pull", {"request": names[event.transfer]})

The package needs ``opentelemetry-api``. Without a configured provider, OpenTelemetry drops the spans.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from llm_datadist.native import Error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_datadist.native import Transfer

__all__ = ["TransferSpans"]

_NANOS = 1_000_000_000


class TransferSpans:
    """Makes a span of each transfer that is recorded. It may be used from any thread.

    Args:
        tracer: the tracer of OpenTelemetry; by default, that of the global provider for ``llm_datadist``.
    """

    def __init__(self, tracer: Any = None) -> None:
        self._tracer = trace.get_tracer("llm_datadist") if tracer is None else tracer

    def record(self, transfer: Transfer[Any], name: str, attributes: Mapping[str, Any] | None = None) -> None:
        """Make a span of a transfer that has just ended. It ends now, and begins at the start of the transfer.

        Args:
            transfer: a transfer whose ``done()`` is ``True``.
            name: what it did; the span is called ``llm_datadist.<name>``.
            attributes: attributes of the span, beside ``llm_datadist.bytes``.

        Raises:
            TimeoutError: the transfer still runs.
        """
        failure = ""
        try:
            transfer.result(0)
        except Error as error:
            failure = str(error)
        figures = {"llm_datadist.bytes": transfer.bytes, **(attributes or {})}
        self.add(name, transfer.nanos / _NANOS, figures, failure)

    def add(self, name: str, seconds: float, attributes: Mapping[str, Any], failure: str = "") -> None:
        """Make a span that ends now.

        Args:
            name: the span is called ``llm_datadist.<name>``.
            seconds: its length.
            attributes: its attributes.
            failure: why the work failed, or an empty text. The status of the span is an error then.
        """
        end = time.time_ns()
        begin = end - round(seconds * _NANOS)
        span = self._tracer.start_span(f"llm_datadist.{name}", start_time=begin, attributes=dict(attributes))
        if failure:
            span.set_status(trace.Status(trace.StatusCode.ERROR, failure))
        span.end(end_time=end)
