"""Checks of a save's plan before any rank writes: its items, and one name on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torch_dcpx._compat import is_saved_dtype
from torch_dcpx.errors import PlanError, UnsupportedError
from torch_dcpx.tensors.memory import SHARD_SIZES, Part

_MAX_SHOWN = 5


def check_plan(items: Sequence[WriteItem]) -> None:
    """Raises PlanError if a plan writes one chunk twice, UnsupportedError if an item's dtype or
    layout cannot be kept.
    """
    # Plain tuples: a MetadataIndex is hashed and compared in Python.
    seen: set[tuple[str, Any]] = set()
    kept: set[tuple[torch.dtype, torch.layout]] = set()
    for item in items:
        index, about = item.index, item.tensor_data
        chunk = index.fqn, index.offset
        if chunk in seen:
            raise PlanError(
                f"the plan writes '{index.fqn}' at offset {index.offset} twice", fqn=index.fqn
            )
        seen.add(chunk)
        if about is None:
            continue
        kind = about.properties.dtype, about.properties.layout
        if kind not in kept:
            _refuse_kind(index.fqn, *kind)
            kept.add(kind)


def refuse_opaque(fqn: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedError for a nested tensor, and for one of a layout that hides its memory.

    Torch raises errors of its own as it plans these, which do not say of what.
    """
    if tensor.is_nested:
        raise UnsupportedError(
            f"'{fqn}' is a nested tensor, which has no sizes; give its parts (unbind()) names of "
            "their own, or leave it out"
        )
    if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
        raise UnsupportedError(
            f"'{fqn}' is of the layout torch._mkldnn, whose memory nobody may read; save its "
            "`to_dense()`"
        )


def check_shape(fqn: str, shape: torch.Size, chunk: ChunkStorageMetadata | Part) -> None:
    """Raises PlanError if a tensor to write has not the shape of its chunk, which loads rely on."""
    # A user's hook may give a list, which no Size equals.
    if tuple(shape) != tuple(chunk.sizes):
        raise PlanError(
            f"'{fqn}': the plan writes a chunk of shape {list(chunk.sizes)} at offsets "
            f"{list(chunk.offsets)}, but the tensor to write has shape {list(shape)}. "
            f"{SHARD_SIZES}, and a planner's hooks must keep the shape",
            fqn=fqn,
        )


def refuse_unlike(plans: Sequence[SavePlan], unlike: Sequence[tuple[str, int, int]]) -> None:
    """Raises PlanError if a name is not one tensor, or one object, on all ranks: if there are any
    `unlike` (fqn, rank, other rank) of `ItemMaker.unlike_items`.
    """
    if not unlike:
        return

    def text(fqn: str, rank: int) -> str:
        about = next(one.tensor_data for one in plans[rank].items if one.index.fqn == fqn)
        if about is None:
            return f"a Python value on rank {rank}"
        return f"{about.properties.dtype} of shape {list(about.size)} on rank {rank}"

    texts = [f"'{fqn}' is {text(fqn, a)} and {text(fqn, b)}" for fqn, a, b in unlike[:_MAX_SHOWN]]
    more = f"; and {len(unlike) - len(texts)} more names" if len(unlike) > len(texts) else ""
    raise PlanError(
        f"ranks of the group have different things under one name: {'; '.join(texts)}{more}. A "
        "checkpoint keeps one; give each rank a name of its own",
        fqn=unlike[0][0],
    )


def is_folded(item: WriteItem, tensor: torch.Tensor) -> bool:
    """Returns whether a hook of the tensor planned it whole in fewer dimensions, a matrix as a
    vector. Loads then take all of it, and narrow nothing.
    """
    about = item.tensor_data
    return (
        about is not None
        and item.type is WriteItemType.SHARD
        and tuple(about.chunk.sizes) == tuple(about.size)
        and len(about.size) < tensor.dim()
        and math.prod(about.size) == tensor.numel()
        and all(planned >= own for planned, own in zip(about.size, tensor.shape, strict=False))
    )


def _refuse_kind(fqn: str, dtype: torch.dtype, layout: torch.layout) -> None:
    if layout == torch.sparse_coo:
        raise UnsupportedError(
            f"'{fqn}' is a sparse COO tensor, into which stock's load puts nothing and says so "
            "to nobody; save its `indices()` and `values()`"
        )
    if not is_saved_dtype(dtype):
        raise UnsupportedError(
            f"'{fqn}' is of {dtype}, which torch {torch.__version__} cannot save; save a view "
            "of another dtype, such as `tensor.view(torch.uint8)`"
        )
