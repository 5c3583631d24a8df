"""OpenTelemetry with its real SDK: instruments and spans say what the reports say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode
from support.async_saves import failing_options, gated, no_save_is_left
from support.event_calls import STATE, async_save, target
from support.rank_fixture import StartRanks
from support.telemetry import Telemetry, telemetry

import torch_dcpx as dcpx
from torch_dcpx.integrations import opentelemetry

__all__ = ["no_save_is_left", "telemetry"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")

DOC = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


def every_way(path: Path) -> None:
    """Makes each instrument report."""
    dcpx.save(STATE, path)
    async_save(path).result()
    dcpx.load(target(), path)
    with pytest.raises(dcpx.NotCommittedError):
        dcpx.load(target(), path / "nowhere")
    with pytest.raises(dcpx.OptionError):
        dcpx.save(STATE)


# ---- Instruments --------------------------------------------------------------------------------


def test_instruments_say_what_the_reports_say(tmp_path: Path, telemetry: Telemetry) -> None:
    saves = [dcpx.save(STATE, tmp_path).result() for _ in range(2)]
    background = async_save(tmp_path).result()
    load = dcpx.load(target(), tmp_path)
    points = telemetry.points()

    duration, stall = points["dcpx.save.duration"], points["dcpx.save.stall"]
    assert duration.keys() == stall.keys() == {("dcpx.save",), ("dcpx.async_save",)}
    assert duration["dcpx.save",].count == stall["dcpx.save",].count == 2
    assert duration["dcpx.save",].sum == sum(report.total_s for report in saves)
    assert duration["dcpx.async_save",].sum == background.total_s
    assert stall["dcpx.async_save",].sum == background.blocked_s
    assert points["dcpx.save.io"]["dcpx.save",].value == sum(r.write.file_bytes for r in saves)
    assert points["dcpx.save.io"]["dcpx.async_save",].value == background.file_bytes
    assert points["dcpx.staged.size"].keys() == {("dcpx.async_save",)}
    assert points["dcpx.staged.size"]["dcpx.async_save",].sum == 4000
    assert points["dcpx.load.duration"]["dcpx.load",].sum == load.total_s
    assert load.read is not None
    assert points["dcpx.load.io"]["dcpx.load",].value == load.read.read_bytes
    assert not {"dcpx.save.failures", "dcpx.load.failures"} & points.keys()


def test_stock_calls_report_all_but_a_stall(tmp_path: Path, telemetry: Telemetry) -> None:
    writer, reader = dcpx.DcpxWriter(tmp_path), dcpx.DcpxReader(tmp_path)
    dcp.save(STATE, storage_writer=writer)
    dcp.load(target(), storage_reader=reader)
    points = telemetry.points()
    assert writer.last_report is not None and reader.last_report is not None
    assert points["dcpx.save.io"]["dcp.save",].value == writer.last_report.file_bytes
    assert points["dcpx.load.io"]["dcp.load",].value == reader.last_report.read_bytes
    assert points["dcpx.save.duration"]["dcp.save",].count == 1
    assert points["dcpx.load.duration"]["dcp.load",].count == 1
    assert not {"dcpx.save.stall", "dcpx.staged.size"} & points.keys()


def test_failures_are_counted_by_type(tmp_path: Path, telemetry: Telemetry) -> None:
    for _ in range(2):
        with pytest.raises(dcpx.StorageError):
            dcpx.save(STATE, tmp_path, options=failing_options())
    assert async_save(tmp_path, options=failing_options()).exception() is not None
    with pytest.raises(dcpx.OptionError):
        dcpx.save(STATE)
    with pytest.raises(dcpx.NotCommittedError):
        dcpx.load(target(), tmp_path)
    points = telemetry.points()
    failed = {key: point.value for key, point in points["dcpx.save.failures"].items()}
    assert failed == {
        ("dcpx.save", "StorageError"): 2,
        ("dcpx.async_save", "StorageError"): 1,
        ("dcpx.save", "OptionError"): 1,
    }
    (load,) = points["dcpx.load.failures"].values()
    assert dict(load.attributes) == {"dcpx.call": "dcpx.load", "error.type": "NotCommittedError"}
    assert points.keys() == {"dcpx.save.failures", "dcpx.load.failures"}  # and no duration


def test_age_counts_from_the_last_durable_checkpoint(
    tmp_path: Path, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(opentelemetry, "monotonic", lambda: now[0])

    def age() -> float:
        (point,) = telemetry.points()["dcpx.checkpoint.age"].values()
        return point.value

    assert "dcpx.checkpoint.age" not in telemetry.points()  # nothing before the first
    dcpx.save(STATE, tmp_path)
    now[0] += 60
    assert age() == 60
    with pytest.raises(dcpx.StorageError):
        dcpx.save(STATE, tmp_path, options=failing_options())
    assert age() == 60  # a failed save makes nothing durable
    gate, options = gated()
    handle = dcpx.async_save(STATE, tmp_path, options=options)
    now[0] += 10
    assert age() == 70  # nor does one under way
    gate.open()
    handle.result()
    dcpx.wait()
    now[0] += 5
    assert age() == 5
    dcpx.load(target(), tmp_path)
    assert age() == 0


def test_manager_and_hook_are_counted_once(tmp_path: Path, telemetry: Telemetry) -> None:
    with dcpx.CheckpointManager(tmp_path / "run", keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, state={"w": torch.ones(2)}).result()
        manager.resume(state={"w": torch.zeros(2)})
    with dcpx.use():
        dcp.save(STATE, checkpoint_id=tmp_path / "hooked")
    points = telemetry.points()
    counts = {key: point.count for key, point in points["dcpx.save.duration"].items()}
    assert counts == {("dcpx.async_save",): 2, ("dcp.save",): 1}
    assert points["dcpx.load.duration"]["dcpx.load",].count == 1


# ---- Spans --------------------------------------------------------------------------------------


def test_span_lasts_from_the_call_to_the_end(tmp_path: Path, telemetry: Telemetry) -> None:
    events: list[Any] = []
    remove = dcpx.on_event(events.append)
    report = dcpx.save(STATE, tmp_path).result()
    dcpx.load(target(), tmp_path)
    remove()
    save, load = telemetry.spans()
    assert (save.name, load.name) == ("dcpx.save", "dcpx.load")
    for span, event in zip((save, load), events, strict=True):
        assert (span.start_time, span.end_time) == (event.began_ns, event.ended_ns)
        assert span.status.status_code is StatusCode.UNSET
        assert span.parent is None
    assert dict(save.attributes or {}) == {
        "dcpx.call": "dcpx.save",
        "dcpx.path": str(tmp_path),
        "dcpx.save_id": report.save_id,
        "dcpx.ranks": 1,
    }
    assert dict(load.attributes or {}) == {"dcpx.call": "dcpx.load", "dcpx.path": str(tmp_path)}


def test_parent_of_a_span_is_the_callers_span(tmp_path: Path, telemetry: Telemetry) -> None:
    tracer = telemetry.tracers.get_tracer("training")
    gate, options = gated()
    with tracer.start_as_current_span("step 1") as step:
        handle = dcpx.async_save(STATE, tmp_path, options=options)
    with tracer.start_as_current_span("step 2"):  # when the save ends
        gate.open()
        handle.result()
        dcpx.wait()
        with tracer.start_as_current_span("evaluation") as evaluation:
            dcpx.load(target(), tmp_path)
    spans = {(span.attributes or {}).get("dcpx.call"): span for span in telemetry.spans()}
    for call, parent in (("dcpx.async_save", step), ("dcpx.load", evaluation)):
        assert spans[call].parent == parent.get_span_context()


def test_phases_are_spans_within(tmp_path: Path, telemetry: Telemetry) -> None:
    report = async_save(tmp_path).result()
    load = dcpx.load(target(), tmp_path)
    writer = dcpx.DcpxWriter(tmp_path)
    dcp.save(STATE, storage_writer=writer)
    assert writer.last_report is not None
    reports = (report, load, writer.last_report)
    for span, own in zip(telemetry.spans(), reports, strict=True):
        phases = telemetry.phases(span)
        assert [each.name for each in phases] == [f"{span.name}/{p.name}" for p in own.phases]
        for each, phase in zip(phases, own.phases, strict=True):
            assert (each.start_time, each.end_time) == (phase.began_ns, phase.ended_ns)
            assert dict(each.attributes or {}) == {"thread.id": phase.thread}
    names = {each.name for each in telemetry.phases(telemetry.spans()[0])}
    assert names >= {"dcpx.save/snapshot", "dcpx.save/write", "dcpx.save/commit"}


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_save_is_an_error_with_its_exception(
    tmp_path: Path, telemetry: Telemetry, is_async: bool
) -> None:
    if is_async:
        async_save(tmp_path, options=failing_options())
    else:
        with pytest.raises(dcpx.StorageError):
            dcpx.save(STATE, tmp_path, options=failing_options())
    (span,) = telemetry.spans()
    assert span.name == "dcpx.save"
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "StorageError: no room"
    assert span.attributes is not None and span.attributes["error.type"] == "StorageError"
    (recorded,) = span.events
    assert recorded.name == "exception" and recorded.attributes is not None
    assert recorded.attributes["exception.type"] == "torch_dcpx.errors.StorageError"
    assert "raise StorageError" in str(recorded.attributes["exception.stacktrace"])


# ---- The whole ----------------------------------------------------------------------------------


def test_reference_lists_every_instrument_and_no_attribute_names_a_path(
    tmp_path: Path, telemetry: Telemetry
) -> None:
    every_way(tmp_path)
    kinds = {"Sum": "counter", "Histogram": "histogram", "Gauge": "gauge"}
    made = {
        name: (
            kinds[type(metric.data).__name__],
            metric.unit,
            tuple(sorted({key for p in metric.data.data_points for key in p.attributes})),
        )
        for name, metric in telemetry.metrics().items()
    }
    rows = re.findall(r"^\| `(dcpx\.\S+)` \| (\w+) \| `(\S+)` \| (.*?) \|", DOC.read_text(), re.M)
    listed = {
        name: (kind, unit, tuple(re.findall(r"`([^`]+)`", attributes)))
        for name, kind, unit, attributes in rows
    }
    assert listed == made
    assert len(made) == 9
    assert {key for *_, keys in made.values() for key in keys} == {"dcpx.call", "error.type"}
    assert str(tmp_path) not in telemetry.reader.get_metrics_data().to_json()  # type: ignore[union-attr]


def test_uninstrument_ends_all_and_instrument_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Telemetry()
    ends: list[Callable[[], None]] = []
    for _ in range(2):
        ends.append(opentelemetry.instrument(made.meters, made.tracers))
        dcpx.save(STATE, tmp_path)
        assert len(telemetry_ages(made)) == 1
        ends[-1]()
        ends[-1]()
        dcpx.save(STATE, tmp_path)
        assert telemetry_ages(made) == []
    assert made.points()["dcpx.save.duration"]["dcpx.save",].count == 2
    assert len(made.spans()) == 2
    assert [record.message for record in caplog.records if record.name != "torch_dcpx"] == []
    made.meters.shutdown()
    made.tracers.shutdown()


def telemetry_ages(made: Telemetry) -> list[Any]:
    return list(made.points().get("dcpx.checkpoint.age", {}).values())


def test_default_providers_are_those_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Telemetry()
    monkeypatch.setattr("opentelemetry.metrics._internal._METER_PROVIDER", made.meters)
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", made.tracers)
    end = opentelemetry.instrument()
    dcpx.save(STATE, tmp_path)
    end()
    assert "dcpx.save.duration" in made.points()
    assert len(made.spans()) == 1
    made.meters.shutdown()
    made.tracers.shutdown()


# ---- Two ranks: each has its own events, spans and bytes of each operation ----------------------


def own_state() -> dict[str, Any]:
    """Returns a state of which each rank has a tensor of its own size."""
    rank = dist.get_rank()
    return {f"w{rank}": torch.ones(1000 * (rank + 1)), "step": 1}


def each_rank_has_one_event_for_each_operation(root: Path) -> None:
    reader, found = InMemoryMetricReader(), []
    provider = MeterProvider([reader])
    ends = opentelemetry.instrument(provider, TracerProvider()), dcpx.on_event(found.append)
    saved = dcpx.save(own_state(), root / "a").result()
    background = dcpx.async_save(own_state(), root / "b").result()
    dcpx.wait()
    loaded = dcpx.load(own_state(), root / "b")
    for end in ends:
        end()
    assert [event.call for event in found] == ["dcpx.save", "dcpx.async_save", "dcpx.load"]
    assert [event.report for event in found] == [saved, background, loaded]
    assert found[1].staged_bytes == 4000 * (dist.get_rank() + 1)
    own = [saved.write.file_bytes, background.write.file_bytes]
    assert own[0] < saved.file_bytes  # which is of both ranks
    (resource,) = reader.get_metrics_data().resource_metrics  # type: ignore[union-attr]
    (io,) = [m for m in resource.scope_metrics[0].metrics if m.name == "dcpx.save.io"]
    assert [point.value for point in io.data.data_points] == own  # type: ignore[union-attr]
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, own[0])
    assert sum(everybody) == saved.file_bytes  # no byte counts twice


def of_a_stock_save_only_the_coordinator_has_an_event(root: Path) -> None:
    found: list[dcpx.Event] = []
    end = dcpx.on_event(found.append)
    dcp.save(own_state(), storage_writer=dcpx.DcpxWriter(root / "stock"))
    assert [event.call for event in found] == (["dcp.save"] if dist.get_rank() == 0 else [])
    dcp.load(own_state(), storage_reader=dcpx.DcpxReader(root / "stock"))
    end()
    assert found[-1].call == "dcp.load"


def every_rank_has_the_failure_of_one(root: Path) -> None:
    found: list[Any] = []
    end = dcpx.on_event(found.append)

    def fail(_done: int, _total: int) -> None:
        raise dcpx.StorageError("no room", errno=28, path="here")

    options = dcpx.WriteOptions(progress=fail if dist.get_rank() == 1 else False)
    with pytest.raises(dcpx.DcpxError) as raised:
        dcpx.save(own_state(), root / "failed", options=options)
    end()
    assert [(type(event), event.error) for event in found] == [(dcpx.SaveFailed, raised.value)]


@pytest.mark.multirank
def test_each_rank_reports_its_own_part(ranks: StartRanks, tmp_path: Path) -> None:
    for case in (
        each_rank_has_one_event_for_each_operation,
        of_a_stock_save_only_the_coordinator_has_an_event,
        every_rank_has_the_failure_of_one,
    ):
        ranks(2)(case, tmp_path)
