"""OpenTelemetry's SDK in memory, with what saves and loads report to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import torch_dcpx as dcpx
from torch_dcpx.integrations import opentelemetry


class Telemetry:
    """Providers of a test, and what they have got."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))

    def metrics(self) -> dict[str, Any]:
        """Returns what is exported, by name."""
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        (resource,) = data.resource_metrics
        (scope,) = resource.scope_metrics
        assert (scope.scope.name, scope.scope.version) == ("torch_dcpx", dcpx.__version__)
        return {metric.name: metric for metric in scope.metrics if metric.data.data_points}

    def points(self) -> dict[str, dict[tuple[Any, ...], Any]]:
        """Returns the points of each metric by the values of their attributes, in order."""
        return {
            name: {tuple(value for _, value in sorted(p.attributes.items())): p for p in points}
            for name, points in ((n, m.data.data_points) for n, m in self.metrics().items())
        }

    def spans(self) -> list[ReadableSpan]:
        """Returns the spans of operations, without those of phases."""
        return [span for span in self.exporter.get_finished_spans() if "/" not in span.name]

    def phases(self, of: ReadableSpan) -> list[ReadableSpan]:
        """Returns the spans of phases within a span, by time."""
        spans = [each for each in self.exporter.get_finished_spans() if "/" in each.name]
        found = [each for each in spans if each.parent == of.get_span_context()]
        return sorted(found, key=lambda each: each.start_time or 0)


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    """Returns what saves and loads report from now on."""
    made = Telemetry()
    end = opentelemetry.instrument(made.meters, made.tracers)
    yield made
    end()
    made.meters.shutdown()
    made.tracers.shutdown()
