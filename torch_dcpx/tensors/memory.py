"""Describes how a tensor lies in memory, and finds this rank's part of a tensor.

Torch makes an index of every row of a shard to find where it begins: 60 us a DTensor. For plain
shards `ChunkFinder` needs one division a mesh dimension, and keeps the answer for tensors of one
shape and placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from torch_dcpx._compat import CHUNK_ATTRIBUTES, stock_chunks
from torch_dcpx._text import counted, some
from torch_dcpx.errors import PlanError, UnsupportedError

PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)  # exact types; others may keep more than values

SHARD_SIZES = (
    "A DTensor's shards must have the sizes that torch cuts its shape into, as those of "
    "`distribute_tensor` have"
)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill one run of memory, in any order, without overlap."""
    return tensor.is_contiguous() or _span(tensor) == tensor.numel()


def is_disjoint(tensor: torch.Tensor) -> bool:
    """Returns whether strides show at once that no two elements share memory."""
    return tensor.is_contiguous() or _span(tensor) > 0


def _span(tensor: torch.Tensor) -> int:
    """Returns how many elements lie from the first to the last; 0 if two may share memory."""
    span = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride < span:
            return 0
        span += (size - 1) * stride
    return span


def has_strides(tensor: torch.Tensor) -> bool:
    """Returns whether strides place the elements in a storage."""
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def refuse_nested(fqn: str, value: Any) -> None:
    """Raises UnsupportedError for a nested tensor of strided layout, which has no sizes."""
    if type(value) in PLAIN_CLASSES and value.is_nested and value.layout == torch.strided:
        raise UnsupportedError(
            f"'{fqn}' is a nested tensor, which has no sizes; give its parts (unbind()) names of "
            "their own, or leave it out"
        )


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Returns dimensions by falling strides; None if they fall from the first to the last."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return None if order == tuple(range(tensor.ndim)) else order


def is_expanded(tensor: torch.Tensor) -> bool:
    """Returns whether several elements have one memory, by strides of 0."""
    if not has_strides(tensor) or 0 not in (strides := tensor.stride()) or not tensor.numel():
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, strides, strict=True))


def refuse_meta(names: Sequence[str], whose: str, way_out: str) -> None:
    """Raises UnsupportedError if there are `names`, of tensors on meta that a load would fill."""
    if names:
        are = "is" if len(names) == 1 else "are"
        raise UnsupportedError(
            f"{counted(len(names), 'tensor')} of {whose} {are} on meta, which has no memory to "
            f"fill: {some(names)}; {way_out}"
        )


def names_on_meta(state: Any, prefix: str = "") -> Iterator[str]:
    """Yields the names of tensors on meta in nested dicts, lists and tuples."""
    if isinstance(state, torch.Tensor):
        if state.is_meta:
            yield prefix
        return
    pairs = enumerate(state) if isinstance(state, (list, tuple)) else ()
    for key, value in state.items() if isinstance(state, Mapping) else pairs:
        is_there = type(value) is torch.Tensor and not value.is_meta  # nearly all, without a call
        if not is_there and isinstance(value, (torch.Tensor, Mapping, list, tuple)):
            yield from names_on_meta(value, f"{prefix}.{key}" if prefix else str(key))


def refuse_expanded(fqn: str, target: torch.Tensor) -> None:
    """Raises UnsupportedError for an expanded target, into which torch copies nothing."""
    if is_expanded(target):
        raise UnsupportedError(
            f"'{fqn}' of sizes {list(target.shape)} and strides {list(target.stride())} has one "
            "memory for several elements, which no load can fill; give it its own by contiguous()"
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether memory and strides alone give the tensor's values."""
    return has_strides(tensor) and not tensor.is_conj() and not tensor.is_neg()


def byte_strides(
    lengths: Sequence[int], strides: Sequence[int], elem_bytes: int
) -> tuple[int, ...]:
    """Returns strides in bytes; 0, whatever torch keeps there, in dimensions of one element."""
    return tuple(
        stride * elem_bytes if length > 1 else 0
        for length, stride in zip(lengths, strides, strict=True)
    )


def check_storage(tensor: torch.Tensor, fqn: str) -> None:
    """Raises UnsupportedError if the tensor reaches beyond its storage.

    FSDP and others free a parameter's memory by resizing its storage under it.
    """
    if tensor.is_contiguous():
        reach = tensor.numel()
    else:
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in dims)
    needed = (tensor.storage_offset() + reach) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if needed > held:
        raise UnsupportedError(
            f"'{fqn}' needs {needed} B of a storage that holds {held} B: its memory was freed or "
            "resized"
        )


# DCP takes a tensor without these attributes for a whole one.
HOOKS = frozenset(
    ("__create_chunk_list__", "__create_write_items__", "__get_tensor_shard__", *CHUNK_ATTRIBUTES)
)


def is_plain_tensor(value: Any) -> bool:
    """Returns whether a value is a whole tensor, without hooks of DCP."""
    return type(value) in PLAIN_CLASSES and HOOKS.isdisjoint(value.__dict__)


def is_plain_dtensor(value: Any) -> bool:
    """Returns whether a value is a DTensor over a plain tensor, without hooks of DCP."""
    return (
        type(value) is DTensor
        and HOOKS.isdisjoint(value.__dict__)
        and is_plain_tensor(value._local_tensor)
    )


class Part(NamedTuple):
    """A box of a tensor, in elements."""

    offsets: torch.Size
    sizes: torch.Size


def plain_part(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Part | None:
    """Returns the part at `coordinate` of a mesh; None if a placement is not Shard or Replicate.

    Source: torch.distributed.tensor._utils._compute_local_shape_and_global_offset.
    """
    sizes, offsets = list(shape), [0] * len(shape)
    for placement, count, at in zip(placements, mesh_shape, coordinate, strict=True):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard or not 0 <= placement.dim < len(sizes):
            return None
        dim = placement.dim
        size = sizes[dim]
        full = -(-size // count)
        begin = min(full * at, size)
        sizes[dim] = min(size, begin + full) - begin
        # An empty part begins at the tensor's end, wherever its neighbours are.
        offsets[dim] = offsets[dim] + begin if sizes[dim] else shape[dim]
    return Part(torch.Size(offsets), torch.Size(sizes))


class ChunkFinder:
    """Finds the parts of DTensors, and remembers them. One a plan: it keeps their meshes alive."""

    def __init__(self) -> None:
        self._coordinates: dict[int, tuple[Any, Sequence[int] | None]] = {}
        self._known: dict[Any, Part] = {}

    def part_of(self, tensor: DTensor) -> Part | None:
        """Returns this rank's part of a plain DTensor; None if it is not in the mesh.
        Raises ValueError: a Partial placement, if torch refuses it (torch's text).
        """
        spec = tensor._spec
        mesh = spec.mesh
        known = self._coordinates.get(id(mesh))
        if known is None:
            known = self._coordinates[id(mesh)] = (mesh, mesh.get_coordinate())
        coordinate = known[1]
        if coordinate is None:
            return None
        key = (id(mesh), spec.placements, tensor.shape)
        part = self._known.get(key)
        if part is None:
            part = plain_part(tensor.shape, mesh.shape, coordinate, spec.placements)
            if part is None:
                (chunk,) = stock_chunks(tensor)
                part = Part(chunk.offsets, chunk.sizes)
            self._known[key] = part
        return part

    def target_part_of(self, fqn: str, tensor: DTensor) -> Part | None:
        """Returns `part_of` a DTensor that a load is to fill.

        Raises:
            PlanError: its shard has another shape: the load would not fill it, or has no room.
            ValueError: as `part_of`.
        """
        part = self.part_of(tensor)
        local = tensor._local_tensor.shape
        if part is not None and local != part.sizes:
            raise PlanError(
                f"'{fqn}': the load reads a chunk of shape {list(part.sizes)} at offsets "
                f"{list(part.offsets)} into this rank's shard, which has shape {list(local)}; "
                f"nothing was read. {SHARD_SIZES}",
                fqn=fqn,
            )
        return part

    def found(self) -> Iterator[tuple[Any, Sequence[Placement], Part]]:
        """Yields (mesh, placements, part) of all parts so far, each once."""
        for (mesh, placements, _), part in self._known.items():
            yield self._coordinates[mesh][0], placements, part
