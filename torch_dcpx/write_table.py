"""From a SavePlan to the rows that the C++ side writes.

What `resolve_data` gives is turned into one row per item: an address and strides for plain CPU
tensors, bytes for everything else. Nothing is copied here that lies in host memory already.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_dcpx._compat import dtype_name, framing_of, is_saved_dtype
from torch_dcpx.errors import PlanError, UnsupportedError

__all__ = ["Resolved", "Transform", "WriteRow", "WriteTable", "check_plan", "transform_by"]

TENSOR, BYTES, TORCH_TENSOR = 0, 1, 2  # ItemKind of csrc/format/file_footer.h

_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.channels_last: 1,
    torch.preserve_format: 2,
}


class Transform(NamedTuple):
    """The writer's stream extensions: applied to an item's bytes, and what readers must undo."""

    apply: Callable[[WriteItem, memoryview], io.BytesIO]
    descriptors: list[str]


def transform_by(transforms: Any) -> Transform:
    """Returns the extensions of stock's `_StorageWriterTransforms`. REQUIRES: it has some."""

    def apply(item: WriteItem, data: memoryview) -> io.BytesIO:
        raw = io.BytesIO()
        stream, _ = transforms.transform_save_stream(item, raw)
        stream.write(data)
        stream.close()
        return raw

    descriptors = [extension.get_descriptor() for extension in reversed(transforms.extensions)]
    return Transform(apply, descriptors)


class WriteRow(NamedTuple):
    """One item as `WriteJob.write` takes it. Sizes, strides, offsets in elements."""

    file: int
    kind: int
    source: Any  # address of host memory, or an object with a buffer
    payload_bytes: int
    framing: int  # index into WriteTable.framings, -1 for bytes
    elem_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # of the source
    is_dense: bool  # the source's memory is the payload as it is
    fqn: str
    global_sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    flags: int
    memory_format: int
    dtype: str
    properties: tuple[str, str]  # dtype and layout, as the metadata says
    path: str  # JSON


class Resolved(NamedTuple):
    """A row and what it costs."""

    row: WriteRow
    owner: Any  # keeps the source alive until it is written
    temporary_bytes: int  # host memory that exists for this row alone


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill one run of memory, in any order, without overlap."""
    if tensor.is_contiguous():
        return True
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def has_strides(tensor: torch.Tensor) -> bool:
    """Returns whether the elements lie in a storage as strides say, in one way or another."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether addresses and strides say all about the tensor's values."""
    return has_strides(tensor) and not tensor.is_conj() and not tensor.is_neg()


def check_storage(tensor: torch.Tensor, fqn: str) -> None:
    """Raises UnsupportedError when a tensor's view reaches behind its storage.

    FSDP and others free a parameter's memory by resizing its storage under it.
    """
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in dims)
    needed, held = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if needed > held:
        raise UnsupportedError(
            f"'{fqn}' needs {needed} B of a storage that holds {held} B: its memory was freed or "
            "resized"
        )


def _vetted(item: WriteItem, data: Any) -> tuple[torch.Tensor, TensorWriteData]:
    """Returns the tensor to write, detached and waited for, and what the plan says of it.

    Raises:
        AssertionError: it is no tensor (stock's texts).
        UnsupportedError: it has no data, or not any more.
    """
    if not isinstance(data, torch.Tensor):
        raise AssertionError("Data must be torch.Tensor for non-BYTE_IO write items")
    if item.tensor_data is None:
        raise AssertionError("WriteItem tensor_data must not be None")
    fqn = item.index.fqn
    if isinstance(data, AsyncCollectiveTensor):
        # Stock pickles the wrapper, which no load takes.
        data = data.trigger_wait()  # type: ignore[no-untyped-call]
    tensor = data.detach()
    if tensor.device.type == "meta":
        raise UnsupportedError(
            f"'{fqn}' is a meta tensor and has no data to save; materialise it or leave it out"
        )
    if tensor.device.type in ("cpu", "cuda") and has_strides(tensor) and tensor.numel():
        check_storage(tensor, fqn)
    return tensor, item.tensor_data


def _saved(tensor: torch.Tensor) -> io.BytesIO:
    """Returns what torch.save writes, of no more than the tensor's own elements."""
    if tensor.layout == torch.strided and not tensor.is_nested:
        try:
            storage_bytes = tensor.untyped_storage().nbytes()
        except NotImplementedError:  # a wrapper subclass: torch.save asks its inner tensors
            storage_bytes = tensor.nbytes
        if storage_bytes != tensor.nbytes:
            tensor = tensor.clone()
    data = io.BytesIO()
    torch.save(tensor, data)
    return data


class WriteTable:
    """Makes rows. One per save; collects the framings (dtypes) that its rows refer to."""

    def __init__(
        self, planner: SavePlanner, paths: Any, transform: Transform | None = None
    ) -> None:
        """Args:
        planner: gives the data.
        paths: flatten's mapping of this rank, fqn -> path, or anything else for none.
        transform: the writer's stream extensions, or None.
        """
        self.framings: list[tuple[str, str, str]] = []
        self.planner = planner
        self._paths = paths if isinstance(paths, dict) else {}
        self._transform = transform
        self.descriptors = transform.descriptors if transform is not None else None
        self._by_dtype: dict[torch.dtype, tuple[int, str]] = {}

    def resolve(self, item: WriteItem, file: int) -> Resolved:
        """Asks the planner for an item's data and describes it.

        Raises:
            AssertionError: the planner gave a wrong type (stock's texts).
            UnsupportedError: data that cannot be kept, by name.
        """
        data = self.planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise AssertionError("Data must be io.BytesIO for BYTE_IO write items")
            return self._bytes(item, file, data)
        return self._tensor(item, file, data)

    def _bytes(self, item: WriteItem, file: int, data: io.BytesIO) -> Resolved:
        if self._transform is not None:
            data = self._transform.apply(item, data.getbuffer())
        buffer = data.getbuffer()
        row = WriteRow(
            file, BYTES, buffer, len(buffer), -1, 1, (), (), True, item.index.fqn, (), (), 0, 0,
            "", ("", ""), self._path(item.index.fqn),
        )  # fmt: skip
        return Resolved(row, data, len(buffer))

    def resolve_in_place(self, item: WriteItem, file: int) -> Resolved | None:
        """Describes an item that lies in host memory as it is written; None for all others.

        Makes no temporary, so that all items can be asked before the first byte is written.

        Raises:
            AssertionError: the planner gave a wrong type (stock's texts).
            UnsupportedError: data that cannot be kept, by name.
        """
        if item.type == WriteItemType.BYTE_IO:
            return None
        tensor, about = _vetted(item, self.planner.resolve_data(item))
        if tensor.device.type != "cpu":
            return None
        row = self._row_in_place(item, file, tensor, about)
        return None if row is None else Resolved(row, tensor, 0)

    def _tensor(self, item: WriteItem, file: int, data: Any) -> Resolved:
        tensor, about = _vetted(item, data)
        is_copy = tensor.device.type != "cpu"
        if is_copy:
            tensor = tensor.cpu()
        row = self._row_in_place(item, file, tensor, about)
        if row is None:
            return self._serialised(item, file, tensor, about)
        return Resolved(row, tensor, row.payload_bytes if is_copy else 0)

    def _row_in_place(
        self, item: WriteItem, file: int, tensor: torch.Tensor, about: TensorWriteData
    ) -> WriteRow | None:
        """Returns the row of a host tensor, None where address and strides do not say it all."""
        fqn, offsets = item.index.fqn, tuple(about.chunk.offsets)
        if self._transform is not None or not is_plain(tensor) or len(offsets) != tensor.dim():
            return None
        nbytes = tensor.numel() * tensor.element_size()
        address = tensor.data_ptr() if nbytes else 0
        if nbytes and not address:  # torch.func's wrappers and zero tensors look plain
            raise UnsupportedError(
                f"'{fqn}' is of {nbytes} B but lies nowhere: torch has no memory for a tensor that "
                "torch.func tracks or that is known to be zero; save `tensor.clone()`"
            )
        framing, name = self._dtype(tensor.dtype)
        return WriteRow(
            file,
            TENSOR,
            address,
            nbytes,
            framing,
            tensor.element_size(),
            tuple(tensor.shape),
            tensor.stride(),
            nbytes == 0 or is_dense(tensor),
            fqn,
            tuple(about.size),
            offsets,
            *self._properties(about.properties),
            name,
            self._property_names(about.properties),
            self._path(fqn),
        )

    def _serialised(
        self, item: WriteItem, file: int, tensor: torch.Tensor, about: TensorWriteData
    ) -> Resolved:
        """Stores in torch's own serialisation what addresses and strides cannot say."""
        fqn = item.index.fqn
        try:
            stream = _saved(tensor)
        except Exception as error:
            raise UnsupportedError(
                f"'{fqn}' cannot be saved: torch.save of its {type(tensor).__name__} "
                f"({dtype_name(tensor.dtype)}) raised {type(error).__name__}: {error}"
            ) from error
        if self._transform is not None:
            stream = self._transform.apply(item, stream.getbuffer())
        buffer = stream.getbuffer()
        row = WriteRow(
            file, TORCH_TENSOR, buffer, len(buffer), -1, 1, (), (), True, fqn, (), (),
            *self._properties(about.properties), dtype_name(tensor.dtype),
            self._property_names(about.properties), self._path(fqn),
        )  # fmt: skip
        return Resolved(row, stream, len(buffer))

    def _dtype(self, dtype: torch.dtype) -> tuple[int, str]:
        known = self._by_dtype.get(dtype)
        if known is None:
            known = self._by_dtype[dtype] = len(self.framings), dtype_name(dtype)
            self.framings.append(framing_of(dtype))
        return known

    @staticmethod
    def _properties(properties: TensorProperties) -> tuple[int, int]:
        flags = int(properties.requires_grad) | 2 * int(properties.pin_memory)
        return flags, _MEMORY_FORMATS.get(properties.memory_format, 0)

    @staticmethod
    def _property_names(properties: TensorProperties) -> tuple[str, str]:
        return dtype_name(properties.dtype), str(properties.layout).removeprefix("torch.")

    def _path(self, fqn: str) -> str:
        path = self._paths.get(fqn)
        if not isinstance(path, tuple) or not all(type(key) in (str, int) for key in path):
            return ""
        return json.dumps(path, ensure_ascii=False)


def check_plan(items: Sequence[WriteItem]) -> None:
    """Vets what a plan says of its items, before any rank writes.

    Raises:
        PlanError: it names one chunk twice: two writers of one thing.
        UnsupportedError: an item's dtype or layout cannot be kept.
    """
    seen = set()
    for item in items:
        fqn = item.index.fqn
        if item.index in seen:
            raise PlanError(f"the plan writes '{fqn}' at offset {item.index.offset} twice", fqn=fqn)
        seen.add(item.index)
        if item.tensor_data is None:
            continue
        dtype, layout = item.tensor_data.properties.dtype, item.tensor_data.properties.layout
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
