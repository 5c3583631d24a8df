"""The stored source of an export: a checkpoint, ours or stock's, or safetensors.

Each rank reads and writes the boxes that begin in its share of the bytes. It reads one window while
it writes the one before, into memory that it uses again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from operator import add
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torch_dcpx._compat import dtype_name
from torch_dcpx._hooks import takes_in_any_order
from torch_dcpx.artifacts.files import slots_within
from torch_dcpx.artifacts.layout import ExportTensor, file_view
from torch_dcpx.artifacts.rows import BackgroundRows, ExportRows, Target, narrowed, slabs
from torch_dcpx.artifacts.sources import Box, Change, Entry, Offer, Piece
from torch_dcpx.checkpoint.load import load_for_another_call
from torch_dcpx.errors import PlanError
from torch_dcpx.keys.mapped_state import model_part
from torch_dcpx.keys.mapped_tensor import MappedTensor, Sizes
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.reader.claimed import check_claims
from torch_dcpx.reader.pretrained_reader import PretrainedReader
from torch_dcpx.reader.reader import DcpxReader
from torch_dcpx.storage.object_url import location_of
from torch_dcpx.storage.paths import absolute

_LEAST_SLOT_BYTES = 256 << 10  # of ReadOptions
_MOST_PIECE_BYTES = 8 << 20
# Fifteen parts of an export's budget are used: slots for reads and for writes, two windows, and a
# piece that is taken before its window begins.
_PARTS = 16
_SLOT_PARTS = 3
_WINDOW_PARTS = 4


def _read_options(options: WriteOptions) -> ReadOptions:
    """Returns options for reads within an export's budget."""
    part = options.resolved_memory_bytes() // _PARTS
    workers, slot_bytes = slots_within(options, _SLOT_PARTS * part, _LEAST_SLOT_BYTES)
    return ReadOptions(
        host_memory_bytes=max(slot_bytes, _WINDOW_PARTS * part),
        workers=workers,
        slot_bytes=slot_bytes,
        direct_io=options.direct_io,
        endpoint=options.endpoint,
    )


class StoredSource:
    """A checkpoint, ours or stock's, or safetensors."""

    is_shared = True  # any rank can write any box
    plain: Mapping[str, str] = MappingProxyType({})  # no module is at hand
    slot_parts = _SLOT_PARTS

    def __init__(self, path: str | os.PathLike[str], options: WriteOptions) -> None:
        self._path = path
        part_bytes = options.resolved_memory_bytes() // _PARTS
        self.piece_bytes = max(1, min(_MOST_PIECE_BYTES, part_bytes))
        self.reader = PretrainedReader(path, options=_read_options(options))
        self.metadata = self.reader.read_metadata()
        self.generation = self.reader.generation  # the save whose metadata this rank has read
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        self.name = absolute(path)  # as ranks compare it
        self._tensors: Sequence[ExportTensor] = ()
        self._mapped: Mapping[str, MappedTensor] = {}
        self.changes: Mapping[str, Sequence[Change]] = {}  # of stored tensors, by name

    def entries(self) -> tuple[dict[str, Entry], str]:
        """Returns the stored names, and the prefix of the model's."""
        found = {}
        for name, entry in self.metadata.state_dict_metadata.items():
            found[name] = Entry()
            if isinstance(entry, TensorStorageMetadata):
                found[name] = Entry(dtype_name(entry.properties.dtype), tuple(entry.size))
        return found, model_part(self.metadata)

    def objects(self, names: Mapping[str, str], *, is_first: bool) -> dict[str, Any]:
        """As `LiveSource.objects`, on rank 0 alone. Raises: UnsafePickleError."""
        if not names or not is_first:
            return {}
        loaded: dict[str, Any] = dict.fromkeys(names.values())
        load_for_another_call(loaded, DcpxReader(self._path, options=self.reader.options))
        return {new: loaded[name] for new, name in names.items()}

    def offers(
        self, tensors: Sequence[ExportTensor], mapped: Mapping[str, MappedTensor]
    ) -> list[Offer]:
        """Returns the stored boxes of each tensor."""
        self._tensors, self._mapped = tensors, mapped
        sources = dict.fromkeys(name for one in tensors for name in mapped[one.name].sources)
        where = location_of(os.fsdecode(self.reader.path), self.reader.options.endpoint)
        entries, stored = self.metadata.state_dict_metadata, self.metadata.storage_data or {}
        check_claims(where, entries, stored, sources)
        offers = []
        for tensor in tensors:
            boxes: list[Box] = []
            for source in mapped[tensor.name].sources:
                for chunk in self.metadata.state_dict_metadata[source].chunks:  # type: ignore[union-attr]
                    local = torch.empty(chunk.sizes, device="meta")
                    found = mapped[tensor.name].boxes_of(source, tuple(chunk.offsets), local)
                    boxes += [(at, tuple(view.shape)) for at, view in found if view.numel()]
            offers.append(Offer(tensor.name, tuple(boxes), tensor.name))
        return offers

    def shares(self, rank: int, ranks: int, piece_bytes: int) -> list[tuple[int, Box]]:
        """Returns the boxes that begin in this rank's share of all bytes.

        All ranks must give one `piece_bytes`, the bound of a box, so that each box is one rank's.
        """
        total, begin = sum(tensor.nbytes for tensor in self._tensors), 0
        own = []
        for number, tensor in enumerate(self._tensors):
            for offsets, lengths in slabs(tensor.sizes, tensor.itemsize, piece_bytes):
                if begin * ranks // total == rank:
                    own.append((number, (offsets, lengths)))
                begin += tensor.itemsize * math.prod(lengths)
        return own

    def write(
        self, own: Sequence[tuple[int, Box]], targets: Mapping[int, Target], rows: ExportRows
    ) -> None:
        """Writes boxes: (number of the tensor, box)."""
        with BackgroundRows(rows, self.piece_bytes) as written:
            planner = _ExportPlanner(written, self.metadata, self.changes)
            for number, (offsets, lengths) in own:
                place = narrowed(file_view(self._tensors[number]), offsets, lengths)
                self._add(planner, number, offsets, place, targets[number])
            self._read(planner)
            written.finish()

    def fill(self, pieces: Sequence[Piece], views: Sequence[torch.Tensor]) -> None:
        """Reads pieces into plain host memory."""
        planner = _FillPlanner(self.metadata, self.changes)
        for piece, view in zip(pieces, views, strict=True):
            self._add(planner, piece.number, piece.offsets, view, None)
        self._read(planner)

    def _add(
        self,
        planner: _PlacingPlanner,
        number: int,
        offsets: Sizes,
        place: torch.Tensor,
        target: Target | None,
    ) -> None:
        """Adds the read items that fill a box."""
        for part in self._mapped[self._tensors[number].name].parts_of(offsets, place):
            stored: Any = self.metadata.state_dict_metadata[part.fqn]
            wanted = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.lengths))
            for item in create_read_items_for_chunk_list(part.fqn, stored, [wanted]):
                there = narrowed(part.view, item.dest_offsets, item.lengths)
                planner.add(item, there, target)

    def _read(self, planner: _PlacingPlanner) -> None:
        plan = self.reader.prepare_local_plan(LoadPlan(planner.items))
        self.reader.read_data(plan, planner).wait()


class _PlacingPlanner(DefaultLoadPlanner):
    """Knows where each read item goes."""

    def __init__(self, metadata: Metadata, changes: Mapping[str, Sequence[Change]]) -> None:
        # Not stock's: a read calls none of its hooks but those of the subclasses.
        self.items: list[ReadItem] = []
        self._places: list[tuple[torch.Tensor, Any]] = []
        self._metadata, self._changes = metadata, changes

    def add(self, item: ReadItem, place: torch.Tensor, target: Target | None) -> None:
        """Adds an item to the plan, and notes the place of its bytes."""
        zeros = torch.Size([0] * len(item.lengths))
        index = MetadataIndex(str(len(self._places)), zeros)
        self._places.append((place, target))
        stored = item.storage_index, item.storage_offsets
        self.items.append(ReadItem(item.type, index, zeros, *stored, item.lengths))

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise PlanError(f"'{read_item.storage_index.fqn}' is an object, not a tensor")

    def read_as(self, read_item: ReadItem) -> torch.dtype | None:
        """Returns the stored dtype of what is changed before it is cast; None: nothing changes."""
        fqn = read_item.storage_index.fqn
        stored: Any = self._metadata.state_dict_metadata[fqn]
        return stored.properties.dtype if fqn in self._changes else None

    def changed(self, read_item: ReadItem, tensor: torch.Tensor) -> bool:
        """Changes what was read of a stored tensor; returns whether there was a change."""
        index = read_item.storage_index
        changes = self._changes.get(index.fqn, ())
        begins = index.offset or (0,) * tensor.dim()
        for change in changes:
            change.apply(tensor, tuple(map(add, begins, read_item.storage_offsets)))
        return bool(changes)


@takes_in_any_order
class _FillPlanner(_PlacingPlanner):
    """Has each read item filled in its place, but those that are changed before they are cast."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place = self._places[int(read_item.dest_index.fqn)][0]
        dtype = self.read_as(read_item)
        return place if dtype is None else torch.empty(place.shape, dtype=dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if self.changed(read_item, tensor):
            self._places[int(read_item.dest_index.fqn)][0].copy_(tensor)


@takes_in_any_order
class _ExportPlanner(_PlacingPlanner):
    """Gives each read item memory of its own, and passes it on to the files once it is filled."""

    def __init__(
        self, rows: BackgroundRows, metadata: Metadata, changes: Mapping[str, Sequence[Change]]
    ) -> None:
        super().__init__(metadata, changes)
        self._rows = rows

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place, _ = self._places[int(read_item.dest_index.fqn)]
        return self._rows.memory(read_item.lengths, self.read_as(read_item) or place.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        place, target = self._places[int(read_item.dest_index.fqn)]
        self.changed(read_item, tensor)
        self._rows.add_copy(tensor, place, target)
