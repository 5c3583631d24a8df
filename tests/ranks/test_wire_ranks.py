"""What two ranks send each other through torch's collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.rank_fixture import StartRanks
from support.tensor_bits import bits
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_dcpx as dcpx

LAYERS = 150


def state(mesh: Any, fill: float) -> dict[str, Any]:
    rows = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    layers = {
        f"layers.{number}.self_attn.q_proj.weight": distribute_tensor(
            rows * (number + fill), mesh, [Shard(0)]
        )
        for number in range(LAYERS)
    }
    return {"model": layers, "shared": torch.full((3,), fill), "step": int(fill)}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts the bytes that torch's collectives of objects send, by the kind of the object."""
    sent: dict[str, int] = {}
    make = c10d._object_to_tensor

    def counting(value: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(value, *args, **kwargs)
        kinds = {SavePlan: "save", LoadPlan: "load", list: "results", Metadata: "metadata"}
        kind = next((name for kind, name in kinds.items() if isinstance(value, kind)), "else")
        sent[kind] = sent.get(kind, 0) + made[0].numel()
        return made

    c10d._object_to_tensor = counting
    try:
        yield sent
    finally:
        c10d._object_to_tensor = make


def planners_and_writers_send_little_and_keep_every_bit(root: Path, mesh: Any) -> None:
    wanted = state(mesh, 3.0)
    sent = {}
    found = {}
    sides = {
        "stock": (dcp.FileSystemWriter, dcp.DefaultSavePlanner),
        "planner": (dcp.FileSystemWriter, dcpx.DcpxSavePlanner),
        "writer": (dcpx.DcpxWriter, dcp.DefaultSavePlanner),
        "both": (dcpx.DcpxWriter, dcpx.DcpxSavePlanner),
    }
    for name, (writer, planner) in sides.items():
        with counted() as sent[name]:
            dcp.save(dict(wanted), storage_writer=writer(root / name), planner=planner())
        metadata = dcp.FileSystemReader(root / name).read_metadata()
        found[name] = (metadata.state_dict_metadata, metadata.planner_data)
        assert found[name] == found["stock"]
        for reader, load_planner in (
            (dcp.FileSystemReader, dcp.DefaultLoadPlanner),
            (dcpx.DcpxReader, dcpx.DcpxLoadPlanner),
        ):
            loaded = state(mesh, 0.0)
            dcp.load(loaded, storage_reader=reader(root / name), planner=load_planner())
            assert bits(loaded) == bits(wanted)
    # The coordinator sends two answers, the other rank nothing but its plan.
    plans = 3 if dist.get_rank() == 0 else 1
    assert sent["stock"]["save"] > 150 * LAYERS * plans
    for name in ("planner", "writer", "both"):
        assert sent[name]["save"] < 12 * LAYERS * plans, (name, sent[name])
    for name in ("writer", "both"):
        assert sent[name]["results"] * 8 < sent["stock"]["results"], (sent[name], sent["stock"])


def loads_keep_their_plans(root: Path, mesh: Any) -> None:
    wanted = state(mesh, 3.0)
    for reader in (dcp.FileSystemReader, dcpx.DcpxReader):
        planner = dcpx.DcpxLoadPlanner()
        for _ in range(2):  # of one planner
            found = state(mesh, 0.0)
            with counted() as sent:
                dcp.load(found, storage_reader=reader(root / "both"), planner=planner)
            assert bits(found) == bits(wanted)
            assert sent["load"] < 2000, sent


class Counting(dcpx.DcpxLoadPlanner):
    """A planner that looks at the items of all ranks."""

    items = 0

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.items = sum(len(plan.items) for plan in global_plan)
        return super().create_global_plan(global_plan)


class Sorting(dcpx.DcpxReader):
    """A reader that does."""

    items = 0

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        self.items = sum(len(plan.items) for plan in plans)
        return super().prepare_global_plan(plans)


def who_looks_at_all_items_sees_them(root: Path, mesh: Any) -> None:
    expected = 2 * (LAYERS + 2) if dist.get_rank() == 0 else 0
    pairs = [(Counting(), dcpx.DcpxReader(root / "both"))]
    pairs.append((dcpx.DcpxLoadPlanner(), Sorting(root / "both")))
    for planner, reader in pairs:
        found = state(mesh, 0.0)
        dcp.load(found, storage_reader=reader, planner=planner)
        assert bits(found) == bits(state(mesh, 3.0))
        assert max(getattr(planner, "items", 0), getattr(reader, "items", 0)) == expected


def all_of_it(root: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    planners_and_writers_send_little_and_keep_every_bit(root, mesh)
    loads_keep_their_plans(root, mesh)
    who_looks_at_all_items_sees_them(root, mesh)


@pytest.mark.slow
def test_two_ranks_send_few_bytes_and_write_what_stock_writes(
    ranks: StartRanks, tmp_path: Path
) -> None:
    ranks(2)(all_of_it, tmp_path)
