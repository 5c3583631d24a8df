"""Prometheus' text format of the instruments, by OpenTelemetry's exporter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest
from support.async_saves import no_save_is_left
from support.event_calls import STATE, async_save, target

import torch_dcpx as dcpx
from torch_dcpx.integrations import opentelemetry

__all__ = ["no_save_is_left"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> list[Sample]:
    """Returns the samples of Prometheus' text format."""
    found = []
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels or ""))
            pairs = {k: v for k, v in pairs.items() if not k.startswith("otel_")}
            found.append(Sample(name, pairs, float(value)))
    return found


def test_prometheus_gets_names_with_units_and_few_labels(tmp_path: Path) -> None:
    reader = PrometheusMetricReader()
    provider = MeterProvider([reader])
    end = opentelemetry.instrument(provider)
    try:
        report = dcpx.save(STATE, tmp_path).result()
        background = async_save(tmp_path).result()
        dcpx.load(target(), tmp_path)
        with pytest.raises(dcpx.OptionError):
            dcpx.save(STATE)
        text = generate_latest(REGISTRY).decode()
    finally:
        end()
        provider.shutdown()
    own = [sample for sample in samples(text) if sample.name.startswith("dcpx_")]
    by_call = {(s.name, s.labels.get("dcpx_call")): s for s in own if "le" not in s.labels}
    assert report.write is not None
    for name, value in {
        "dcpx_save_duration_seconds_count": 1.0,
        "dcpx_save_duration_seconds_sum": report.total_s,
        "dcpx_save_stall_seconds_sum": report.blocked_s,
        "dcpx_save_io_bytes_total": report.write.file_bytes,
    }.items():
        assert by_call[name, "dcpx.save"].value == value
    assert by_call["dcpx_save_stall_seconds_sum", "dcpx.async_save"].value == background.blocked_s
    assert by_call["dcpx_staged_size_bytes_sum", "dcpx.async_save"].value == 4000
    assert by_call["dcpx_load_duration_seconds_count", "dcpx.load"].value == 1
    assert by_call["dcpx_save_failures_total", "dcpx.save"].labels == {
        "dcpx_call": "dcpx.save", "error_type": "OptionError",
    }  # fmt: skip
    assert by_call["dcpx_checkpoint_age_seconds", None].value >= 0
    assert {label for sample in own for label in sample.labels} == {"dcpx_call", "error_type", "le"}
    assert str(tmp_path) not in text
