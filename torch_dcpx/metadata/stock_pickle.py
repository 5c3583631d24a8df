"""The pickle of a Metadata whose planner_data is a user's own, as stock DCP reads it.

`csrc/format/metadata_pickle` writes all others from the columns. Objects of any class need Python's
pickler; what would depend on who writes is evened out here: torch 2.15 adds a sixth field to
TensorProperties, on which older ones fail; Python 3.11.2 pickles an enum as a call of
builtins.getattr; Python 3.13 pickles a Path as `pathlib._local.PosixPath`.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx._compat import common_properties

# By the codes of stock's _MEM_FORMAT_ENCODING.
MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    newobj: Any = copyreg.__newobj__  # type: ignore[attr-defined]
    return newobj, (TensorProperties,), common_properties(properties)


def _reduce_memory_format(code: _MEM_FORMAT_ENCODING) -> tuple[Any, ...]:
    return _MEM_FORMAT_ENCODING, (code.value,)


def _with_stock_properties(
    entry: TensorStorageMetadata | BytesStorageMetadata,
) -> TensorStorageMetadata | BytesStorageMetadata:
    """`entry`, or a copy with stock's TensorProperties where it has ShardedTensor's."""
    if not isinstance(entry, TensorStorageMetadata):
        return entry
    given: Any = entry.properties
    if type(given) is not ShardProperties:
        return entry
    stock = TensorProperties(
        given.dtype, given.layout, given.requires_grad, given.memory_format, given.pin_memory
    )
    return dataclasses.replace(entry, properties=stock)


def pickle_any(metadata: Metadata) -> bytes:
    """Pickles a Metadata with any planner_data, whose classes are up to its planner.

    Raises:
        Exception: whatever the objects in planner_data raise when they cannot be pickled.
    """
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=4)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        TensorProperties: _reduce_properties,
        _MEM_FORMAT_ENCODING: _reduce_memory_format,
    }
    entries = metadata.state_dict_metadata
    entries = {fqn: _with_stock_properties(entry) for fqn, entry in entries.items()}
    pickler.dump(dataclasses.replace(metadata, state_dict_metadata=entries))
    return out.getvalue()
