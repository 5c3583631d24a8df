"""Makes the rows that C++ reads from the tensor items of a LoadPlan.

An item goes straight into its target where that is plain memory of the stored dtype, on the host or
on a device that C++ copies to. Else it is staged: read into a tensor of its own, on the target's
device where C++ copies there. Torch's `copy_` then converts it, moves it to other devices, and
refuses as stock does.
"""

from __future__ import annotations

from operator import mul
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem

from torch_dcpx.errors import CorruptionError, UnsupportedError
from torch_dcpx.reader.locate import Form, Located
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.memory import (
    byte_strides,
    check_storage,
    has_strides,
    is_disjoint,
    is_plain,
    refuse_expanded,
)


class ReadRow(NamedTuple):
    """One region as `ReadJob.read` takes it. Strides in bytes."""

    file: int
    src_offset: int  # byte of the file at which the region begins
    elem_bytes: int
    lengths: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]
    dest: Any  # address, or an object with a writable buffer
    dest_bytes: int  # from that address on
    fqn: str
    device: int = -1  # CUDA ordinal of `dest`; -1 for host memory


class Place(NamedTuple):
    """The memory that the bytes of a tensor read go to."""

    is_direct: bool  # to the target itself; else to a tensor that is made for them
    device: int  # CUDA ordinal; -1 for host memory


ON_HOST = Place(is_direct=False, device=-1)


class TensorRead(NamedTuple):
    """A tensor read under way: what to do when its bytes have arrived."""

    item: ReadItem
    target: torch.Tensor
    staged: torch.Tensor | None  # None: the bytes go straight into `target`
    is_big_endian: bool  # as stored
    row: ReadRow | None  # None: no byte to read


def stored_dtype(form: Form, fqn: str) -> torch.dtype:
    """Returns the dtype of a plain payload. Raises UnsupportedError: this torch lacks it."""
    if form.dtype is None:
        name = form.named_dtype or form.dtype_name or form.storage_name
        raise UnsupportedError(
            f"'{fqn}' is stored as {name}, which torch {torch.__version__} lacks"
        )
    return form.dtype


def place_of(target: torch.Tensor, dtype: torch.dtype, is_big_endian: bool) -> Place:
    """Returns where bytes of `dtype` for the target go: straight into it where they may stay as
    they are. Bytes to convert go to memory of the same device, unless only the host can swap them
    or take the target apart.
    """
    is_host = device_memory.is_host(target)
    device = -1 if is_host else device_memory.ordinal_of(target)
    if is_big_endian or not (is_host or device >= 0):
        return ON_HOST
    is_direct = (
        target.dtype == dtype
        and is_plain(target)
        and is_disjoint(target)  # else checksums would be taken of bytes that others overwrite
        and target.data_ptr() != 0  # torch.func's wrappers and zero tensors look plain
    )
    return Place(is_direct, device if is_direct or has_strides(target) else -1)


def _region(item: ReadItem, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (offsets, lengths) of the item in a stored tensor of `sizes`.

    A planner may describe a tensor as a chunk of fewer dimensions: stock then narrows the first
    ones where the chunk is shorter.

    Source: torch.distributed._shard._utils.narrow_tensor_by_index.
    """
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if len(lengths) >= len(sizes):
        return offsets, lengths
    begins = [
        offset if length < size else 0
        for offset, length, size in zip(offsets, lengths, sizes, strict=False)
    ]
    counts = [min(length, size) for length, size in zip(lengths, sizes, strict=False)]
    missing = sizes[len(lengths) :]
    return (*begins, *[0] * len(missing)), (*counts, *missing)


def _first_element(
    located: Located, fqn: str, offsets: tuple[int, ...], lengths: tuple[int, ...], elem_bytes: int
) -> int:
    """Returns the number of the payload's element at which a region begins.

    Raises: CorruptionError: the stored tensor does not hold the region.
    """
    form, path = located.form, located.path
    is_inside = len(form.sizes) == len(lengths) == len(offsets) and all(
        offset >= 0 and length >= 0 and offset + length <= size
        for offset, length, size in zip(offsets, lengths, form.sizes, strict=True)
    )
    if not is_inside:
        raise CorruptionError(
            f"'{fqn}' in '{path}' has sizes {form.sizes}, which do not hold the region at "
            f"{offsets} of {lengths} that the metadata promises",
            fqn=fqn,
            path=path,
        )
    first: int = located.storage_offset + sum(map(mul, offsets, form.strides))
    end_bytes = (first + span_elems(lengths, form.strides)) * elem_bytes
    if 0 not in lengths and end_bytes > located.payload_bytes:
        raise CorruptionError(
            f"'{fqn}' in '{path}': the tensor reaches byte {end_bytes} of a payload of "
            f"{located.payload_bytes} B",
            fqn=fqn,
            path=path,
        )
    return first


def span_elems(lengths: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Returns the elements from the first to the last of a region, both included."""
    return 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))


def plan_tensor_read(
    item: ReadItem, located: Located, target: torch.Tensor, dtype: torch.dtype, place: Place
) -> TensorRead:
    """Returns the read of an item's region from its payload to `place`, that of `target`.

    Raises:
        AssertionError: the target's size is not the region's (stock's text).
        CorruptionError: the stored tensor does not hold the region.
        UnsupportedError: several elements of the target have one memory.
    """
    form, fqn = located.form, item.storage_index.fqn
    offsets, lengths = _region(item, form.sizes)
    target = target.detach()
    if tuple(target.shape) != lengths:
        raise AssertionError(
            f"req {item.storage_index} mismatch sizes {target.size()} vs {torch.Size(lengths)}"
        )
    elem_bytes = dtype.itemsize
    first = _first_element(located, fqn, offsets, lengths, elem_bytes)
    if 0 in lengths:
        return TensorRead(item, target, None, form.is_big_endian, None)
    if (place.device >= 0 or device_memory.is_host(target)) and is_plain(target):
        check_storage(target, fqn)
    staged = None
    if not place.is_direct:
        refuse_expanded(fqn, target)
        if place.device >= 0:
            staged = device_memory.empty(lengths, dtype, target)
        else:
            staged = torch.empty(lengths, dtype=dtype, device="cpu")
    into = target if staged is None else staged
    row = ReadRow(
        located.file,
        located.payload_offset + first * elem_bytes,
        elem_bytes,
        lengths,
        byte_strides(lengths, form.strides, elem_bytes),
        byte_strides(lengths, into.stride(), elem_bytes),
        into.data_ptr(),
        span_elems(lengths, into.stride()) * elem_bytes,
        fqn,
        place.device,
    )
    return TensorRead(item, target, staged, form.is_big_endian, row)


def finish_tensor_read(read: TensorRead) -> None:
    """Hands the bytes that arrived to the target, as stock does."""
    staged = read.staged
    if staged is not None:
        if read.is_big_endian:
            staged.untyped_storage().byteswap(staged.dtype)  # type: ignore[no-untyped-call]
        read.target.copy_(staged)
