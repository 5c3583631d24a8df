"""What differs between the supported versions of torch, and torch's private names that we need."""

from __future__ import annotations

from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver

__all__ = ["dtype_by_name", "dtype_name", "framing_of", "is_save_frame", "storage_dtypes"]


@cache
def _dtypes() -> dict[str, torch.dtype]:
    # Every dtype also has aliases (torch.half is torch.float16): the canonical name wins.
    found = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    return {str(dtype).removeprefix("torch."): dtype for dtype in found}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the canonical name without `torch.`, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_by_name(name: str) -> torch.dtype | None:
    """Returns the dtype of this canonical name, or None where this torch has none."""
    return _dtypes().get(name)


@cache
def _storage_names() -> dict[torch.dtype, str]:
    # torch.save writes these as typed storages (`_rebuild_tensor_v2`), all others as an untyped
    # storage with a dtype (`_rebuild_tensor_v3`). The map is closed: new dtypes are untyped.
    return dict(torch.storage._dtype_to_storage_type_map())


@cache
def framing_of(dtype: torch.dtype) -> tuple[str, str, str]:
    """Returns how torch.save names a tensor of this dtype: storage module, storage, dtype name.

    Source: torch.Tensor._reduce_ex_internal.
    """
    storage = _storage_names().get(dtype)
    if storage is not None:
        return ("torch", storage, "")
    return ("torch.storage", "UntypedStorage", dtype_name(dtype))


@cache
def storage_dtypes() -> dict[tuple[str, str], torch.dtype]:
    """Returns the dtype for each (storage name, dtype name) that a zip item may name."""
    table: dict[tuple[str, str], torch.dtype] = {}
    for dtype in _dtypes().values():
        _, storage, name = framing_of(dtype)
        table[storage, name] = dtype
    return table


def increment_version(tensor: torch.Tensor) -> None:
    """Tells autograd that the tensor's memory was written behind its back."""
    if not tensor.is_inference():
        bump: Any = torch.autograd.graph.increment_version
        bump(tensor)


def is_save_frame(frame: FrameType, writer: object) -> bool:
    """Returns whether a frame is that of DCP's save through `writer`."""
    if frame.f_code is not state_dict_saver._save_state_dict.__code__:
        return False
    return frame.f_locals.get("storage_writer") is writer
