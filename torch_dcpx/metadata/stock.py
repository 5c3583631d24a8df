"""Stock's pickle of a Metadata: read without executing it, and written where C++ does not.

`load_stock_metadata` decodes the pickle into stand-ins, and makes a fresh `Metadata` of the objects
that `stock_classes` builds of them.

`csrc/format/metadata_pickle` writes the pickle from the columns. But if planner_data is a user's
own, of any class, `pickle_any` does, and evens out where writers differ: torch 2.15 adds a sixth
field to TensorProperties, on which older ones fail; Python 3.11.2 pickles an enum as a call of
builtins.getattr; Python 3.13 pickles a Path as `pathlib._local.PosixPath`.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
from collections.abc import Collection, Container, Iterable
from typing import Any, NoReturn

from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx._compat import AnyProperties, common_properties
from torch_dcpx._gc import paused_gc
from torch_dcpx.errors import CorruptionError
from torch_dcpx.metadata.lazy import have_full_lists
from torch_dcpx.metadata.stock_classes import (
    BYTES,
    INDEX,
    METADATA,
    METADATA_ROOT,
    STORAGE_INFO,
    STORAGE_META,
    TENSOR,
    build_index,
    build_storage_info,
    build_storage_meta,
    fields,
    optional_text,
    text,
)
from torch_dcpx.metadata.stock_plans import PLANS, all_local_plans
from torch_dcpx.unpickle.hashed_keys import check_keys
from torch_dcpx.unpickle.settle import Settler, build_user_object, no_more_than, refuse
from torch_dcpx.unpickle.stand_ins import StandIn
from torch_dcpx.unpickle.unpickler import RestrictedUnpickler, malformed_is_corruption, user_globals

_DICT = METADATA["builtins", "dict"]


class _Rebuild:
    """Makes the `Metadata` of one file; every refusal names the file and the entry."""

    def __init__(self, path: str, pickle_bytes: int) -> None:
        self._path = path
        self._settle = Settler(pickle_bytes=pickle_bytes)

    def _refuse(self, key: Any, cause: object) -> NoReturn:
        name = key if type(key) is str else None
        where = f"entry {key!r:.200}" if name is not None else "the metadata"
        message = f"read {where} of {self._path!r}: {cause}"
        raise CorruptionError(message, path=self._path, fqn=name)

    def _pairs(self, value: Any, what: str) -> Collection[tuple[Any, Any]]:
        """Returns the items of a dict, or of a filled `dict()`: `lazy` dicts are pickled as such.

        The caller checks its keys before they are hashed.
        """
        if type(value) is dict:
            return value.items()
        if type(value) is not _DICT or value.args:
            self._refuse(None, f"{what} is a {_kind(value)}, not a dict")
        try:
            no_more_than(value, pairs=True)
        except pickle.UnpicklingError as error:
            self._refuse(None, f"{what}: {error}")
        return value.pairs or ()

    def entries(self, raw: Any) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, entry in self._pairs(raw, "state_dict_metadata"):
            try:
                name = text(key, "key")
                if type(entry) not in (TENSOR, BYTES):
                    refuse(f"is a {_kind(entry)}, neither tensor nor bytes")
                made[name] = entry.build(entry, self._settle)
            except pickle.UnpicklingError as error:
                self._refuse(key, error)
        return made

    def storage(self, raw: Any) -> dict[MetadataIndex, _StorageInfo]:
        indices: list[MetadataIndex] = []
        places: list[_StorageInfo] = []
        storage = self._pairs(raw, "storage_data")
        for key, entry in storage:
            name = None
            try:
                if type(key) is not INDEX or type(entry) is not STORAGE_INFO:
                    refuse(f"storage_data maps a {_kind(key)} to a {_kind(entry)}")
                index = build_index(key, self._settle)
                name = index.fqn
                places.append(build_storage_info(entry, self._settle))
                indices.append(index)
            except pickle.UnpicklingError as error:
                self._refuse(name, error)
        try:
            check_keys(indices)  # offsets can be chosen so that all have one hash
        except pickle.UnpicklingError as error:
            self._refuse(None, f"storage_data {error}")
        made = dict(zip(indices, places, strict=True))
        if len(made) != len(storage):
            self._refuse(None, f"{len(storage) - len(made)} items have two places in storage_data")
        return made

    def planner_data(self, raw: Any, names: Container[str]) -> Any:
        is_flat = type(raw) is dict and all(  # what stock's flatten writes
            type(key) is str and type(path) is tuple and {*map(type, path)} <= {str, int}
            for key, path in raw.items()
        )
        made: Any = raw if is_flat else self._settle(raw)
        if isinstance(made, dict) and not have_full_lists(made, names):
            self._refuse(None, "planner_data has a list index that its names cannot fill")
        return made

    def metadata(self, state: dict[str, Any]) -> Metadata:
        meta = state.get("storage_meta")
        if meta is not None and type(meta) is not STORAGE_META:
            self._refuse(None, f"storage_meta is a {_kind(meta)}")
        entries = self.entries(state.get("state_dict_metadata"))
        planner = self.planner_data(state.get("planner_data"), entries)
        storage = self.storage(state.get("storage_data"))
        made_meta = None if meta is None else build_storage_meta(meta, self._settle)
        version = optional_text(state.get("version"), "version")  # not in files before torch 2.9
        made = Metadata(entries, planner, storage, storage_meta=made_meta, version=version)
        if "all_local_plans" in state:
            plans = all_local_plans(state["all_local_plans"], self._settle)
            made.all_local_plans = plans  # type: ignore[attr-defined]
        return made


def _kind(value: Any) -> str:
    return str(getattr(type(value), "global_name", type(value).__name__))


class _TrustingUnpickler(pickle.Unpickler):
    """Executes the calls that the file makes; only for `trusted=True`."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        return AnyProperties if found is TensorProperties else found


def load_stock_metadata(
    data: bytes | memoryview,
    path: str,
    safe_globals: Iterable[Any] = (),
    *,
    trusted: bool = False,
    compound_keys: int | None = None,
) -> Metadata:
    """Returns a fresh `Metadata` of exact types from stock's pickle, executing nothing of it.

    Its `checkpoint_id` is a str, its `TensorProperties` are as the running torch has them.

    Args:
        data, path, compound_keys: as `RestrictedUnpickler`.
        safe_globals: classes and functions that `planner_data` may use, and subclasses of
            `Metadata` (without their own fields). For this call only.
        trusted: unpickle as stock does instead, which executes the calls that the file makes.

    Raises:
        UnsafePickleError, CorruptionError, OptionError: as `decode_byte_item`.
    """
    if trusted:
        with malformed_is_corruption("unpickle", path=path, fqn=None), paused_gc():
            made: Metadata = _TrustingUnpickler(io.BytesIO(data)).load()
        return made
    table = {**METADATA, **PLANS, **user_globals(safe_globals, build_user_object)}
    with malformed_is_corruption("read", path=path, fqn=None), paused_gc():
        return _rebuilt(
            RestrictedUnpickler(data, table, path=path, compound_keys=compound_keys).load(),
            _Rebuild(path, len(data)),
        )


def _rebuilt(raw: Any, rebuild: _Rebuild) -> Metadata:
    cls = type(raw)
    if cls is METADATA_ROOT:
        return rebuild.metadata(fields(raw))
    made_of = cls.value if isinstance(raw, StandIn) and not raw.is_called else None
    if isinstance(made_of, type) and issubclass(made_of, Metadata):
        return rebuild.metadata(raw.state if type(raw.state) is dict else {})
    return refuse(f"holds a {_kind(raw)}, not a Metadata")


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    newobj: Any = copyreg.__newobj__  # type: ignore[attr-defined]
    return newobj, (TensorProperties,), common_properties(properties)


def _reduce_memory_format(code: _MEM_FORMAT_ENCODING) -> tuple[Any, ...]:
    return _MEM_FORMAT_ENCODING, (code.value,)


def _with_stock_properties(entry: Any) -> Any:
    """Returns `entry`, or a copy with stock's TensorProperties where it has ShardedTensor's."""
    given = getattr(entry, "properties", None)
    if not isinstance(entry, TensorStorageMetadata) or type(given) is not ShardProperties:
        return entry
    stock = TensorProperties(
        given.dtype, given.layout, given.requires_grad, given.memory_format, given.pin_memory
    )
    return dataclasses.replace(entry, properties=stock)


def pickle_any(metadata: Metadata, local_plans: list[SavePlan] | None = None) -> bytes:
    """Pickles a Metadata with any planner_data, and with `all_local_plans` where given; an object
    in it may raise an error of its own.
    """
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=4)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        TensorProperties: _reduce_properties,
        _MEM_FORMAT_ENCODING: _reduce_memory_format,
    }
    entries = {fqn: _with_stock_properties(e) for fqn, e in metadata.state_dict_metadata.items()}
    made = dataclasses.replace(metadata, state_dict_metadata=entries)
    if local_plans is not None:
        made.all_local_plans = local_plans  # type: ignore[attr-defined]
    pickler.dump(made)
    return out.getvalue()
