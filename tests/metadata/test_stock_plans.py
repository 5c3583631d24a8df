"""`all_local_plans` in the metadata, as Megatron-Core keeps them there."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.rows import check_rows
from support.states import assert_same, blank_like, mixed_state
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torch_dcpx import CorruptionError, DcpxReader
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.metadata.stock import load_stock_metadata


class PlanKeepingPlanner(dcp.DefaultSavePlanner):
    """Keeps the plans of all ranks."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.kept = all_plans
        return super().create_global_plan(all_plans)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    writer, planner = dcp.FileSystemWriter(tmp_path), PlanKeepingPlanner()
    dcp.save(mixed_state(), storage_writer=writer, planner=planner, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.all_local_plans = planner.kept
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    return tmp_path


def test_checkpoint_with_plans_loads_by_default(saved: Path) -> None:
    target = blank_like(mixed_state())
    dcp.load(target, storage_reader=DcpxReader(saved), no_dist=True)
    assert_same(mixed_state(), target)


def test_plans_are_as_stock_reads_them(saved: Path) -> None:
    expected: Any = pickle.loads((saved / ".metadata").read_bytes())
    plans = expected.all_local_plans
    assert plans[0].items
    prefix = dcp.filesystem._StoragePrefix("__3_")
    item = WriteItem(plans[0].items[0].index, WriteItemType.SHARD)
    for expected.all_local_plans in (plans, [SavePlan([item], prefix, {"a.b": ("a", "b")}, False)]):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            found: Any = load_stock_metadata(pickle.dumps(expected, protocol), "p")
            assert found.all_local_plans == expected.all_local_plans
            kinds = {type(item.type) for plan in found.all_local_plans for item in plan.items}
            assert kinds == {WriteItemType}


def test_plans_come_through_our_own_file(saved: Path) -> None:
    expected: Any = pickle.loads((saved / ".metadata").read_bytes())
    ours = encode_metadata(expected, [], "0" * 32)
    read: list[Any] = [decode_metadata(ours, "p").metadata, pickle.loads(ours)]
    for found in read:
        assert found.all_local_plans == expected.all_local_plans
        assert found.state_dict_metadata == expected.state_dict_metadata
    del expected.all_local_plans
    without = decode_metadata(encode_metadata(expected, [], "0" * 32), "p").metadata
    assert not hasattr(without, "all_local_plans")


WRONG: dict[str, Any] = {
    "no list": {"a": 1},
    "no plan": [3],
    "items that are no list": [SavePlan(())],  # type: ignore[arg-type]
    "no item": [SavePlan([7])],  # type: ignore[list-item]
    "an item without an index": [SavePlan([WriteItem(None, WriteItemType.SHARD)])],  # type: ignore[arg-type]
    "usable that is no bool": [SavePlan([], usable=1)],  # type: ignore[arg-type]
    "a size of a list": [torch.Size([1])],
}


def test_plans_of_other_types_are_refused(saved: Path) -> None:
    metadata: Any = pickle.loads((saved / ".metadata").read_bytes())

    def check(plans: Any) -> None:
        metadata.all_local_plans = plans
        with pytest.raises(CorruptionError, match="'p'"):
            load_stock_metadata(pickle.dumps(metadata), "p")

    check_rows(WRONG, check)


def test_item_type_that_does_not_exist_is_refused(saved: Path) -> None:
    metadata: Any = pickle.loads((saved / ".metadata").read_bytes())
    item = WriteItem(metadata.all_local_plans[0].items[0].index, WriteItemType.SHARD)
    metadata.all_local_plans = [SavePlan([item])]
    good = pickle.dumps(metadata, 4)
    at = good.rindex(b"WriteItemType")
    at = good.index(b"K\x02", at)  # BININT1 2: SHARD
    with pytest.raises(CorruptionError, match="item type 9"):
        load_stock_metadata(good[:at] + b"K\x09" + good[at + 2 :], "p")


def test_very_many_plans_may_share_their_items() -> None:
    """Each list is looked at once: this took minutes."""
    index = dcp.metadata.MetadataIndex("a")
    items = [WriteItem(index, WriteItemType.BYTE_IO)] * 20_000
    metadata: Any = Metadata({}, storage_data={})
    metadata.all_local_plans = [SavePlan(items) for _ in range(20_000)]
    found: Any = load_stock_metadata(pickle.dumps(metadata), "p")
    assert len(found.all_local_plans) == 20_000
    assert found.all_local_plans[7].items == items
