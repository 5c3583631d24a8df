"""Hides how torch's versions differ, and keeps the private names of torch that we need.

No other module asks which torch runs, or what it has (`tests/house/test_house.py` reads them):
    2.9    the oldest: DCP's hooks take **kwargs, `Metadata.version`, rank-local metadata
    2.15   TensorProperties.strides, a sixth field: older ones fail at a pickle that holds it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from itertools import repeat
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import default_planner, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem
from torch.distributed.checkpoint.planner_helpers import (
    _create_chunk_list,
    _create_write_items,
    create_read_items_for_chunk_list,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

_T = TypeVar("_T")

TORCH_VERSION = str(torch.__version__)


def torch_lacks(module_name: str, global_name: str) -> bool:
    """Returns whether this is a name that another torch has (a new dtype) and this one has not."""
    return module_name == "torch" and global_name.isidentifier() and global_name not in vars(torch)


# ---- dtypes and layouts: every torch has a few more ---------------------------------------------


def _named(kind: type[_T]) -> dict[str, _T]:
    """torch's constants of one type by their names, aliases (torch.half) left out."""
    found = [value for value in vars(torch).values() if isinstance(value, kind)]
    return {str(value).removeprefix("torch."): value for value in found}


DTYPES = _named(torch.dtype)
LAYOUTS = _named(torch.layout)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the canonical name without `torch.`, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_by_name(name: str) -> torch.dtype | None:
    """Returns the dtype of this canonical name, or None where this torch has none."""
    return DTYPES.get(name)


@cache
def _storage_names() -> dict[torch.dtype, str]:
    # torch.save writes these as typed storages (`_rebuild_tensor_v2`), all others as an untyped
    # storage with a dtype (`_rebuild_tensor_v3`). The map is closed: new dtypes are untyped.
    return dict(torch.storage._dtype_to_storage_type_map())


@cache
def framing_of(dtype: torch.dtype) -> tuple[str, str, str]:
    """Returns (storage module, storage, dtype name), as torch.save names a tensor of this dtype.

    Source: torch.Tensor._reduce_ex_internal.
    """
    storage = _storage_names().get(dtype)
    if storage is not None:
        return ("torch", storage, "")
    return ("torch.storage", "UntypedStorage", dtype_name(dtype))


@cache
def is_saved_dtype(dtype: torch.dtype) -> bool:
    """Returns whether torch.save takes this dtype (not int1) and DCP's planner does (not bits8)."""
    new_dtypes: Any = torch.storage._new_dtypes
    element_size: Any = torch._utils._element_size  # of DCP's planner
    try:
        element_size(dtype)
    except TypeError:
        return False
    return dtype in _storage_names() or dtype in new_dtypes()


@cache
def storage_dtypes() -> dict[tuple[str, str], torch.dtype]:
    """Returns the dtype for each (storage name, dtype name) that a zip item may name."""
    return {framing_of(dtype)[1:]: dtype for dtype in DTYPES.values()}


@cache
def dlpack_dtypes() -> dict[torch.dtype, bool]:
    """Returns the dtypes that DLPack carries both ways, and whether each may have a conj bit."""
    found = {}
    for dtype in DTYPES.values():
        try:
            # Not `empty(dtype=...)`, which warns of some dtypes.
            sample = torch.empty(16, dtype=torch.uint8, device="cpu").view(dtype)
            back = from_dlpack(to_dlpack(sample))
        except (BufferError, NotImplementedError, RuntimeError, TypeError):
            continue
        if back.dtype == dtype:
            found[dtype] = dtype.is_complex
    return found


# Those of torch.utils.dlpack, without its checks in Python, which cost as much as the rest.
to_dlpack: Callable[[torch.Tensor], object] = torch._C._to_dlpack
from_dlpack: Callable[[object], torch.Tensor] = torch._C._from_dlpack


def increment_version(tensors: Iterable[torch.Tensor]) -> None:
    """Tells autograd that the tensors' memory was written behind its back."""
    bump: Any = torch.autograd.graph.increment_version
    bump([tensor for tensor in tensors if not tensor.is_inference()])


# ---- TensorProperties ---------------------------------------------------------------------------

HAS_STRIDES = "strides" in TensorProperties.__dataclass_fields__

_COMMON = 5  # fields that every torch reads; the sixth is 2.15's
PROPERTIES_COUNTS = (_COMMON, _COMMON + 1)  # fields of a pickled one, whichever torch wrote it


def all_strides(properties: Iterable[TensorProperties]) -> list[Any]:
    """Returns the sixth field of each, which is not checked here; None where torch has none."""
    return list(map(getattr, properties, repeat("strides"), repeat(None)))


def set_strides(properties: TensorProperties, strides: tuple[int, ...] | None) -> None:
    """Sets the sixth field where this torch has it."""
    if HAS_STRIDES:
        vars(properties)["strides"] = strides


def common_properties(properties: TensorProperties) -> tuple[Any, ...]:
    """Returns the state to pickle: the five fields that every torch reads."""
    state: tuple[Any, ...] = properties.__getstate__()  # type: ignore[no-untyped-call]
    return state[:_COMMON]


class AnyProperties(TensorProperties):
    """`TensorProperties` whose pickle of torch 2.15 loads in an older torch."""

    def __setstate__(self, state: Any) -> None:
        keep = state if HAS_STRIDES else state[:_COMMON]
        super().__setstate__(keep)  # type: ignore[no-untyped-call]
        self.__class__ = TensorProperties  # type: ignore[assignment]


# ---- DCP ----------------------------------------------------------------------------------------


_LOADS = (state_dict_loader.__name__, "torch_dcpx.checkpoint.load_plan")
_SAVE_CODE = state_dict_saver._save_state_dict.__code__


def planned_entries(frame: FrameType | None) -> int:
    """Returns how many entries a planner has when DCP's `frame` calls a writer; 0 where unknown."""
    if frame is None or frame.f_globals.get("__name__") != state_dict_saver.__name__:
        return 0
    entries = getattr(frame.f_locals.get("planner"), "state_dict", None)
    return len(entries) if isinstance(entries, dict) else 0


def is_load(frame: FrameType | None) -> bool:
    """Returns whether a frame is of DCP's load, or of ours."""
    return frame is not None and frame.f_globals.get("__name__") in _LOADS


def loaded_through(frame: FrameType) -> object | None:
    """Returns the storage reader for which a frame of DCP's load plans; None for all others."""
    if frame.f_globals.get("__name__") != state_dict_loader.__name__:
        return None
    return frame.f_locals.get("storage_reader")


def is_in_stock_load(frame: FrameType | None) -> bool:
    """Returns whether the load that a frame is in, if any, is DCP's."""
    while frame is not None and not is_load(frame):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == state_dict_loader.__name__


def reader_above(frame: FrameType | None) -> object | None:
    """Returns the storage reader of the load, DCP's or ours, that a frame is in; else None."""
    while frame is not None:
        if is_load(frame):
            local = frame.f_locals
            reader: object = local.get("storage_reader", getattr(local.get("self"), "reader", None))
            if reader is not None:
                return reader
        frame = frame.f_back
    return None


def saved_through(frame: FrameType) -> object | None:
    """Returns the storage writer of a frame of DCP's save; None for all other frames."""
    return frame.f_locals.get("storage_writer") if frame.f_code is _SAVE_CODE else None


# What torch 2.14's CheckpointableTensor finds on a plain tensor.
CHUNK_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def with_local_tensor(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Returns a DTensor as `tensor` over another local tensor, which requires no gradient."""
    make: Any = DTensor
    return make(local, tensor._spec, requires_grad=False)  # type: ignore[no-any-return]


def wanted_chunks(target: Any) -> list[ChunkStorageMetadata]:
    """Returns the chunks that stock's load planner wants for a state's tensor."""
    if isinstance(target, DTensor) and target.device_mesh.get_coordinate() is None:
        return []  # this rank is no part of its mesh
    return _create_chunk_list(target)


# ---- Process groups: torch keeps their stores to itself ------------------------------------------


def process_groups() -> list[Any]:
    """Returns the process groups that this process is in; none where torch has no distributed."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


def group_store(group: Any) -> Any:
    """Returns the store of a process group. All its users share it: only clone it."""
    from torch.distributed.distributed_c10d import _world

    return _world.pg_map[group][1]


_is_sharded_by_fields: Any = getattr(default_planner, "_is_checkpointable_tensor", None)  # 2.15


def wanted_sizes(target: Any) -> tuple[int, ...] | None:
    """Returns the global sizes of a state's tensor; None for what does not say.

    Source: create_default_local_load_plan.
    """
    if getattr(target, "size", None) is None:
        return None
    if _is_sharded_by_fields is not None and _is_sharded_by_fields(target):
        return tuple(target.global_shape)
    return tuple(target.size())


def flatten_before_2_4(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a nested state's entries by the names of torch before 2.4, and the path of each.

    Stock sets `_version._derived_version` for it: that is for all threads, and what another thread
    saves meanwhile would get such names. Raises ValueError: two values have one name (torch's
    text).

    Source: DefaultLoadPlanner.create_local_plan, which loads such checkpoints.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Any] = {}

    def keep(path: tuple[str | int, ...], value: Any) -> None:
        name = ".".join(map(str, path))
        if name in flat:
            raise ValueError(f"duplicated flatten key {name}")
        flat[name], paths[name] = value, path

    traverse_state_dict_v_2_3(state, keep)
    return flat, paths


def is_rocm() -> bool:
    """Returns whether this torch's CUDA tensors lie on AMD's devices, where is no CUDA driver."""
    return torch.version.hip is not None


# ---- Plan items: C++ makes them without their constructors ---------------------------------------

# All fields that it sets, of each class.
_ITEM_FIELDS: dict[Any, str] = {
    MetadataIndex: "fqn offset index",
    ReadItem: "type dest_index dest_offsets storage_index storage_offsets lengths",
    WriteItem: "index type bytes_io_data tensor_data",
    TensorWriteData: "chunk properties size",
    TensorProperties: "dtype layout requires_grad memory_format pin_memory"
    + (" strides" if HAS_STRIDES else ""),
    ChunkStorageMetadata: "offsets sizes",
    TensorStorageMetadata: "properties size chunks",
    BytesStorageMetadata: "",
    WriteResult: "index size_in_bytes storage_data",
    _StorageInfo: "relative_path offset length transform_descriptors",
}

# Whether the classes of the torch that runs have these fields and no others.
HAS_KNOWN_ITEMS = all(
    set(kind.__dataclass_fields__) == set(fields.split()) for kind, fields in _ITEM_FIELDS.items()
)

# Whether stock's load planner sweeps (2.13) or compares every pair (2.9): it decides on the order
# of the items.
_SWEEP_NAMES = create_read_items_for_chunk_list.__code__
IS_SWEPT = "sweep_dim" in (*_SWEEP_NAMES.co_varnames, *_SWEEP_NAMES.co_cellvars)

stock_chunks: Callable[[Any], list[ChunkStorageMetadata]] = _create_chunk_list
stock_write_items: Callable[[str, Any], list[WriteItem]] = _create_write_items


# ---- Profilers ----------------------------------------------------------------------------------


def profiled(name: str) -> AbstractContextManager[Any] | None:
    """Returns a block that torch's profiler shows under a name; None while no profiler runs."""
    profiler: Any = torch.autograd.profiler
    # In any thread; also under `emit_nvtx`, `emit_itt`. A torch without it has no ranges of ours.
    if not getattr(profiler, "_is_profiler_enabled", False):
        return None
    return profiler.record_function(name)  # type: ignore[no-any-return]
