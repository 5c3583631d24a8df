"""From a SavePlan to the rows that the C++ side writes.

A row of an item holds an address and strides for plain tensors on the host or on a device that C++
copies from, without a copy, and bytes for everything else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_dcpx._compat import dtype_name
from torch_dcpx._hooks import has_hooks, has_plain_state
from torch_dcpx.errors import PlanError, UnsupportedError
from torch_dcpx.ranks.plan_wire import RankPlan
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.memory import (
    PLAIN_CLASSES,
    check_storage,
    has_strides,
    is_dense,
    is_plain,
    is_plain_tensor,
)
from torch_dcpx.tensors.offences import check_shape, is_folded
from torch_dcpx.unpickle.byte_items import tell_refused
from torch_dcpx.writer.items import StagedItems
from torch_dcpx.writer.rows import (
    BYTES,
    BYTES_TYPE,
    PICKLE,
    SAVE_ROWS,
    TENSOR,
    TORCH_TENSOR,
    ItemType,
    Resolved,
    WriteRow,
    item_type,
    stored_bytes,
)


class Transform(NamedTuple):
    """The writer's stream extensions."""

    apply: Callable[[WriteItem, memoryview], io.BytesIO]  # to an item's bytes
    descriptors: list[str]  # for readers, which undo them


def transform_by(transforms: Any) -> Transform:
    """Returns the extensions of stock's `_StorageWriterTransforms`. REQUIRES: it has some."""

    def apply(item: WriteItem, data: memoryview) -> io.BytesIO:
        raw = io.BytesIO()
        stream, _ = transforms.transform_save_stream(item, raw)
        stream.write(data)
        stream.close()
        return raw

    return Transform(apply, [one.get_descriptor() for one in reversed(transforms.extensions)])


_SCALARS = frozenset((int, float, bool, type(None)))  # exact types: no class is named
_MAX_CHARS = 1 << 20  # of a string that is pickled in one piece
_STOCK_HOOKS = {
    name: getattr(DefaultSavePlanner, name)
    for name in ("resolve_data", "lookup_object", "transform_object")
}


def is_kept_as_it_is(value: object) -> bool:
    """Returns whether a bytes item's value is pickled by itself, not by torch.save."""
    return type(value) in _SCALARS or (type(value) is str and len(value) <= _MAX_CHARS)


def note_item(error: Exception, item: WriteItem) -> None:
    """Notes on an error of pickle, which is stock's own through DCP, whose value it refused."""
    vars(error).setdefault("dcpx_fqn", item.index.fqn)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"of item '{item.index.fqn}'")


def gives_state_as_it_is(planner: SavePlanner | StagedItems) -> bool:
    """Returns whether the planner hands out the tensors of its state, never temporaries."""
    return isinstance(planner, StagedItems) or (
        isinstance(planner, DefaultSavePlanner)
        and has_plain_state(planner)  # which makes nothing on the fly, either
        and has_hooks(planner, _STOCK_HOOKS)
    )


def vetted(
    item: WriteItem, data: Any, *, gives_state: bool = False
) -> tuple[torch.Tensor, TensorWriteData]:
    """Returns the tensor to write, waited for, and the plan's data of it.

    Args:
        gives_state: the planner has stock's hooks, so that only a tensor's own hooks may have
            changed its shape.

    Raises:
        AssertionError: it is no tensor (stock's texts).
        PlanError: its shape is not that of the chunk, as which every load would read it.
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
    if type(data) not in PLAIN_CLASSES:
        data = data.detach()  # of a class derived from Parameter a plain tensor
    if data.is_meta:
        raise UnsupportedError(
            f"'{fqn}' is a meta tensor and has no data to save; materialise it or leave it out"
        )
    if data.shape != item.tensor_data.chunk.sizes and not (gives_state and is_folded(item, data)):
        check_shape(fqn, data.shape, item.tensor_data.chunk)
    if (data.is_cpu or data.is_cuda) and has_strides(data) and data.numel():
        check_storage(data, fqn)
    return data, item.tensor_data


def _saved(tensor: torch.Tensor) -> io.BytesIO:
    """Returns what torch.save writes of the tensor's own elements alone."""
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


def check_shapes(items: Sequence[WriteItem], planner: SavePlanner | StagedItems) -> None:
    """Checks that a planner with stock's hooks has plain tensors and DTensors of the shapes of
    `items`; resolves only those that C++ finds to differ. Raises as `vetted`.
    """
    if gives_state_as_it_is(planner):
        for number in SAVE_ROWS.strangers(items, planner.state_dict):  # type: ignore[union-attr]
            if items[number].type is not WriteItemType.BYTE_IO:
                vetted(items[number], planner.resolve_data(items[number]), gives_state=True)


class WriteTable:
    """Makes rows. One per save; collects the types that its rows refer to."""

    def __init__(
        self, planner: SavePlanner, plan: SavePlan, transform: Transform | None = None
    ) -> None:
        """Takes this rank's final plan; its `planner_data` counts if it is a dict, fqn -> path."""
        paths = plan.planner_data
        cut_names = plan.cut_names if isinstance(plan, RankPlan) else frozenset()
        if cut_names is None and plan.can_split:  # type: ignore[attr-defined]
            # Nobody called `finish_plan` of the planner that would give the rows: any may be cut.
            cut_names = frozenset(item.index.fqn for item in plan.items)
        self._cut_names = cut_names or frozenset()
        self.types: list[ItemType] = [BYTES_TYPE]
        self.gives_state_as_it_is = gives_state_as_it_is(planner)
        self._gives_state = self.gives_state_as_it_is or getattr(planner, "dcpx_gives_state", False)
        self.descriptors = transform.descriptors if transform is not None else None
        self._planner = planner
        self._state = planner.state_dict if self.gives_state_as_it_is else {}  # type: ignore[attr-defined]
        self._paths = paths if isinstance(paths, dict) else {}
        self._transform = transform
        self._known: dict[tuple[Any, ...], int] = {}  # index of a type by the fields that make it

    def resolve(self, item: WriteItem, file: int) -> Resolved:
        """Asks the planner for an item's data and makes its row.

        Raises:
            AssertionError: the planner gave a wrong type (stock's texts).
            UnsupportedError: data that cannot be kept, by name.
            PlanError: it gave a tensor of another shape than planned.
        """
        if item.type is WriteItemType.BYTE_IO and self._transform is None:
            value = self._state.get(item.index.fqn, self)
            if is_kept_as_it_is(value):  # torch.save needs 50 us for it, and a pickle 1 us
                pickled = pickle.dumps(value, protocol=torch.serialization.DEFAULT_PROTOCOL)
                return self._serialised(item, file, PICKLE, 0, pickled)
        try:
            data = self._planner.resolve_data(item)
        except Exception as error:
            if self.gives_state_as_it_is:
                note_item(error, item)
            raise
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise AssertionError("Data must be io.BytesIO for BYTE_IO write items")
            tell_refused(data.getvalue(), item.index.fqn)
            if self._transform is not None:
                data = self._transform.apply(item, memoryview(data.getvalue()))
            return self._serialised(item, file, BYTES, 0, data.getvalue())
        return self._tensor(item, file, data)

    def resolve_in_place(
        self, items: Iterable[WriteItem], files: Iterable[int]
    ) -> tuple[list[WriteRow | None], list[torch.Tensor]]:
        """Returns the rows of the items that lie in memory, of the host or a device, as they are
        written, None for all others; and these rows' tensors.

        Makes no temporary, so that all items are checked before the first byte is written.
        REQUIRES: gives_state_as_it_is. Raises as `resolve`.
        """
        items, files = list(items), list(files)
        if self._transform is None:
            known, is_host = self._known, device_memory.is_host
            rows, owners, others = SAVE_ROWS.plain_rows(
                items, files, self._state, self._paths, known, self._type, is_host
            )
        else:
            rows, owners = [None] * len(items), []
            others = [i for i, item in enumerate(items) if item.type is not WriteItemType.BYTE_IO]
        for number in others:
            tensor, about = self._vetted(items[number], self._lookup(items[number]))
            rows[number] = self._row_in_place(items[number], files[number], tensor, about)
            owners.append(tensor)
        return rows, owners

    def _vetted(self, item: WriteItem, data: Any) -> tuple[torch.Tensor, TensorWriteData]:
        try:
            return vetted(item, data, gives_state=self._gives_state)
        except PlanError as error:
            fqn = item.index.fqn
            if fqn not in self._cut_names or item.tensor_data is None:
                raise
            raise PlanError(
                f"'{fqn}': {type(self._planner).__name__} gave {list(data.shape)} for rows of "
                f"{list(item.tensor_data.chunk.sizes)}; a planner around a DcpxSavePlanner must "
                "give what its finish_plan and resolve_data give, or make it with "
                "split_replicas=False",
                fqn=fqn,
            ) from error

    def _lookup(self, item: WriteItem) -> Any:
        """As the planner's `resolve_data`; for a whole plain tensor without stock's five calls."""
        data = self._state.get(item.index.fqn)
        is_plain_whole = is_plain_tensor(data) and not any(item.index.offset or ())
        return data if is_plain_whole else self._planner.resolve_data(item)

    def _tensor(self, item: WriteItem, file: int, data: Any) -> Resolved:
        tensor, about = self._vetted(item, data)
        tensor = tensor.detach()
        row, is_copy = self._row_in_place(item, file, tensor, about), False
        if row is None and not device_memory.is_host(tensor):
            tensor, is_copy = tensor.cpu(), True
            row = self._row_in_place(item, file, tensor, about)
        if row is not None:
            return Resolved(row, tensor, row.payload_bytes if is_copy else 0)
        # Stored in torch's own serialisation: addresses and strides do not say it all.
        try:
            stream = _saved(tensor)
        except Exception as error:
            raise UnsupportedError(
                f"'{item.index.fqn}' cannot be saved: torch.save of its {type(tensor).__name__} "
                f"({dtype_name(tensor.dtype)}) raised {type(error).__name__}: {error}"
            ) from error
        if self._transform is not None:
            stream = self._transform.apply(item, memoryview(stream.getvalue()))
        kind = self._type(tensor.dtype, about.properties, is_plain=False)
        return self._serialised(item, file, TORCH_TENSOR, kind, stream.getvalue(), about)

    def _row_in_place(
        self, item: WriteItem, file: int, tensor: torch.Tensor, about: TensorWriteData
    ) -> WriteRow | None:
        """Returns the row of a tensor; None where address and strides do not say it all."""
        fqn, shape, offsets = item.index.fqn, tensor.shape, about.chunk.offsets
        if self._transform is not None or not is_plain(tensor) or len(offsets) != len(shape):
            return None
        is_host = device_memory.is_host(tensor)
        device = -1 if is_host else device_memory.ordinal_of(tensor)
        if not is_host and device < 0:
            return None
        nbytes = tensor.nbytes
        address = tensor.data_ptr() if nbytes else 0
        if nbytes and not address:  # torch.func's wrappers and zero tensors look plain
            raise UnsupportedError(
                f"'{fqn}' is of {nbytes} B but lies nowhere: torch has no memory for a tensor that "
                "torch.func tracks or that is known to be zero; save `tensor.clone()`"
            )
        return WriteRow(
            file,
            TENSOR,
            self._type(tensor.dtype, about.properties, is_plain=True),
            address,
            nbytes,
            shape,
            tensor.stride(),
            nbytes == 0 or is_dense(tensor),
            fqn,
            about.size,
            offsets,
            self._paths.get(fqn),
            device if nbytes else -1,
        )

    def _serialised(
        self,
        item: WriteItem,
        file: int,
        kind: int,
        type_index: int,
        data: bytes | memoryview,
        about: TensorWriteData | None = None,
    ) -> Resolved:
        """Returns the row of an item that is these bytes; `about` names a tensor's chunk."""
        fqn = item.index.fqn
        sizes = offsets = shape = torch.Size()
        if about is not None and len(about.size) == len(about.chunk.sizes):
            sizes, offsets, shape = about.chunk.sizes, about.chunk.offsets, about.size
        strides = (0,) * len(sizes)  # nothing of the stored bytes is addressed by them
        path, size = self._paths.get(fqn), len(data)
        row = WriteRow(
            file, kind, type_index, data, size, sizes, strides, True, fqn, shape, offsets, path
        )
        return Resolved(row, data, stored_bytes(row))

    def _type(
        self, dtype: torch.dtype, properties: TensorProperties, *, is_plain: bool = True
    ) -> int:
        """Returns the index of the type of items of this dtype and these properties."""
        own = properties
        fields = own.dtype, own.layout, own.requires_grad, own.memory_format, own.pin_memory
        key = dtype, *fields, is_plain
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = len(self.types)
            self.types.append(item_type(dtype, properties, is_plain=is_plain))
        return known
