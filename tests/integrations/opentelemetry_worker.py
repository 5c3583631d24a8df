"""Two ranks: each has its own events, spans and bytes of each operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from support.worker import rank_case

import torch_dcpx as dcpx
from torch_dcpx.integrations.opentelemetry import instrument


def state() -> dict[str, Any]:
    """Returns a state of which each rank has a tensor of its own size."""
    rank = dist.get_rank()
    return {f"w{rank}": torch.ones(1000 * (rank + 1)), "step": 1}


@rank_case()
def each_rank_has_one_event_for_each_operation(root: Path) -> None:
    reader, found = InMemoryMetricReader(), []
    provider = MeterProvider([reader])
    ends = instrument(provider, TracerProvider()), dcpx.on_event(found.append)
    saved = dcpx.save(state(), root / "a").result()
    background = dcpx.async_save(state(), root / "b").result()
    dcpx.wait()
    loaded = dcpx.load(state(), root / "b")
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


@rank_case()
def of_a_stock_save_only_the_coordinator_has_an_event(root: Path) -> None:
    found: list[dcpx.Event] = []
    end = dcpx.on_event(found.append)
    dcp.save(state(), storage_writer=dcpx.DcpxWriter(root / "stock"))
    assert [event.call for event in found] == (["dcp.save"] if dist.get_rank() == 0 else [])
    dcp.load(state(), storage_reader=dcpx.DcpxReader(root / "stock"))
    end()
    assert found[-1].call == "dcp.load"


@rank_case()
def every_rank_has_the_failure_of_one(root: Path) -> None:
    found: list[Any] = []
    end = dcpx.on_event(found.append)

    def fail(_done: int, _total: int) -> None:
        raise dcpx.StorageError("no room", errno=28, path="here")

    options = dcpx.WriteOptions(progress=fail if dist.get_rank() == 1 else False)
    with pytest.raises(dcpx.DcpxError) as raised:
        dcpx.save(state(), root / "failed", options=options)
    end()
    assert [(type(event), event.error) for event in found] == [(dcpx.SaveFailed, raised.value)]
