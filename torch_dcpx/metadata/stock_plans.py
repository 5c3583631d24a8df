"""DCP's save plans in a metadata pickle: `all_local_plans`, which Megatron-Core keeps there.

They are plain data of DCP, rebuilt from fields of exact types as the rest of the metadata is.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_dcpx.metadata.stock_classes import METADATA, fields
from torch_dcpx.unpickle.settle import Settler, no_more_than, refuse
from torch_dcpx.unpickle.stand_ins import GlobalTable, StandIn, StateStandIn, brief, stand_in
from torch_dcpx.unpickle.torch_objects import dims

_T = TypeVar("_T")


def _of(cls: type[_T], value: Any, what: str) -> _T:
    """Returns `value`, if it is exactly of a class."""
    if type(value) is not cls:
        refuse(f"has a {what} of type {type(value).__name__}")
    made: _T = value
    return made


def _save_plan(raw: StateStandIn, settle: Settler) -> SavePlan:
    state = fields(raw)
    items = _of(list, settle(state.get("items")), "plan's list of items")
    key = "plan's list of items", id(items)
    if key not in settle.cache:  # a million plans may share one list
        for item in items:
            _of(WriteItem, item, "plan's item")
        settle.cache[key] = True
    usable = _of(bool, state.get("usable", True), "plan's usable")
    parts = settle(state.get("storage_data")), settle(state.get("planner_data"))
    if "usable" not in state:  # of a torch before 2.7
        return SavePlan(items, *parts)
    return SavePlan(items, *parts, usable)


def _write_item(raw: StateStandIn, settle: Settler) -> WriteItem:
    state = {name: settle(value) for name, value in fields(raw).items() if name in _ITEM_FIELDS}
    nbytes, tensor = state.get("bytes_io_data"), state.get("tensor_data")
    return WriteItem(
        _of(MetadataIndex, state.get("index"), "plan item's index"),
        _of(WriteItemType, state.get("type"), "plan item's type"),
        None if nbytes is None else _of(BytesIOWriteData, nbytes, "plan item's size"),
        None if tensor is None else _of(TensorWriteData, tensor, "plan item's tensor"),
    )


_ITEM_FIELDS = frozenset(("index", "type", "bytes_io_data", "tensor_data"))


def _bytes_data(raw: StateStandIn, _settle: Settler) -> BytesIOWriteData:
    return BytesIOWriteData(*dims((fields(raw).get("nbytes"),), "plan item's size"))


def _tensor_data(raw: StateStandIn, settle: Settler) -> TensorWriteData:
    state = fields(raw)
    size = state.get("size")
    return TensorWriteData(
        _of(ChunkStorageMetadata, settle(state.get("chunk")), "plan item's chunk"),
        _of(TensorProperties, settle(state.get("properties")), "plan item's properties"),
        torch.Size(dims(_of(torch.Size, size, "plan item's size"), "plan item's size")),
    )


def _write_type(raw: StandIn, _settle: Settler) -> WriteItemType:
    no_more_than(raw)
    code = raw.args[0] if len(raw.args) == 1 else None
    if type(code) is not int or code not in {kind.value for kind in WriteItemType}:
        refuse(f"has the item type {brief(code)}")
    return WriteItemType(code)


def _getattr(raw: StandIn, settle: Settler) -> Any:
    """Builds a member of an enum, as CPython 3.11.0 to 3.11.3 pickle it."""
    cls, name = raw.args if len(raw.args) == 2 else (None, None)
    if cls is _WRITE_TYPE and type(name) is str and name in WriteItemType.__members__:
        no_more_than(raw)
        return WriteItemType.__members__[name]
    return METADATA["builtins", "getattr"].build(raw, settle)


_PLANNER = "torch.distributed.checkpoint.planner"
_WRITE_TYPE = stand_in(f"{_PLANNER}.WriteItemType", _write_type)
_GETATTR = stand_in("builtins.getattr", _getattr)

PLANS: GlobalTable = {
    **{
        (_PLANNER, cls.__name__): stand_in(f"{_PLANNER}.{cls.__name__}", build, base=StateStandIn)
        for cls, build in {
            SavePlan: _save_plan,
            WriteItem: _write_item,
            BytesIOWriteData: _bytes_data,
            TensorWriteData: _tensor_data,
        }.items()
    },
    (_PLANNER, "WriteItemType"): _WRITE_TYPE,
    ("builtins", "getattr"): _GETATTR,
    ("__builtin__", "getattr"): _GETATTR,
}


def all_local_plans(raw: Any, settle: Settler) -> list[SavePlan]:
    """Returns the plans of all ranks."""
    plans: list[SavePlan] = _of(list, settle(raw), "all_local_plans")
    for plan in plans:
        _of(SavePlan, plan, "plan")
    return plans
