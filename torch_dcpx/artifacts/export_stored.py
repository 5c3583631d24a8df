"""Export of what is stored: a checkpoint, ours or stock's, or safetensors.

Each rank reads and writes the boxes that begin in its share of the bytes. Reads come in windows:
one is read while the one before it is written, into memory that is used again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torch_dcpx._compat import dtype_name
from torch_dcpx._hooks import takes_in_any_order
from torch_dcpx.artifacts.layout import ExportTensor, file_view
from torch_dcpx.artifacts.rows import BackgroundRows, ExportRows, Target, share_of, slabs
from torch_dcpx.artifacts.sources import Box, Entry, Offer, narrowed
from torch_dcpx.checkpoint.load import load
from torch_dcpx.errors import PlanError
from torch_dcpx.keys.mapped_state import model_part
from torch_dcpx.keys.mapped_tensor import MappedTensor
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.reader.generation import Generation
from torch_dcpx.reader.pretrained_reader import PretrainedReader

_LEAST_SLOT_BYTES = 256 << 10
_SLOT_UNIT = 64 << 10
_MOST_PIECE_BYTES = 8 << 20
# An export's budget: slots of those who read and of those who write, two windows, and a piece that
# is asked for before its window begins, are fifteen.
_PARTS = 16
_SLOT_PARTS = 3
_WINDOW_PARTS = 4


def _read_options(options: WriteOptions) -> ReadOptions:
    """Returns how to read within an export's budget."""
    part = options.resolved_memory_bytes() // _PARTS
    slots_bytes = _SLOT_PARTS * part
    slot_bytes = min(options.slot_bytes, slots_bytes) // _SLOT_UNIT * _SLOT_UNIT
    slot_bytes = max(_LEAST_SLOT_BYTES, slot_bytes)
    return ReadOptions(
        host_memory_bytes=max(slot_bytes, _WINDOW_PARTS * part),
        workers=max(1, min(options.resolved_workers(), slots_bytes // slot_bytes)),
        slot_bytes=slot_bytes,
        direct_io=options.direct_io,
    )


class StoredSource:
    """A checkpoint, ours or stock's, or safetensors."""

    is_shared = True
    slot_parts = _SLOT_PARTS

    def __init__(self, path: str | os.PathLike[str], options: WriteOptions) -> None:
        self._path = path
        part_bytes = options.resolved_memory_bytes() // _PARTS
        self.piece_bytes = max(1, min(_MOST_PIECE_BYTES, part_bytes))
        self.reader = PretrainedReader(path, options=_read_options(options))
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        self._tensors: Sequence[ExportTensor] = ()
        self._mapped: Mapping[str, MappedTensor] = {}

    def entries(self) -> tuple[dict[str, Entry], str]:
        """Returns all names that this rank sees, and what begins those of the model."""
        found = {}
        for name, entry in self.metadata.state_dict_metadata.items():
            is_tensor = isinstance(entry, TensorStorageMetadata)
            found[name] = (
                Entry(dtype_name(entry.properties.dtype), tuple(entry.size))  # type: ignore[union-attr]
                if is_tensor
                else Entry(None, None)
            )
        return found, model_part(self.metadata)

    def generation(self) -> Generation | None:
        """Returns which save this rank has read the metadata of."""
        return self.reader.generation

    def objects(self, names: Mapping[str, str], *, is_first: bool) -> dict[str, Any]:
        """Returns objects by new name, where `names` gives their own; on rank 0 alone.

        Raises:
            UnsafePickleError: one is of no plain class.
        """
        if not names or not is_first:
            return {}
        loaded: dict[str, Any] = dict.fromkeys(names.values())
        load(loaded, self._path, no_dist=True)
        return {new: loaded[name] for new, name in names.items()}

    def offers(
        self, tensors: Sequence[ExportTensor], mapped: Mapping[str, MappedTensor]
    ) -> list[Offer]:
        """Returns the boxes that are stored, of each tensor."""
        self._tensors, self._mapped = tensors, mapped
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
        """Returns the boxes that this rank reads and writes.

        Args:
            rank, ranks: this one, of how many.
            piece_bytes: the most of a box; the same on all ranks, so that each box is one rank's.
        """
        total, begin = sum(tensor.nbytes for tensor in self._tensors), 0
        own = []
        for number, tensor in enumerate(self._tensors):
            for offsets, lengths in slabs(tensor.sizes, tensor.itemsize, piece_bytes):
                if share_of(begin, total, ranks) == rank:
                    own.append((number, (offsets, lengths)))
                nbytes = tensor.itemsize
                for length in lengths:
                    nbytes *= length
                begin += nbytes
        return own

    def write(
        self, own: Sequence[tuple[int, Box]], targets: Sequence[Target], rows: ExportRows
    ) -> None:
        """Writes boxes: (number of the tensor, box)."""
        with BackgroundRows(rows, self.piece_bytes) as written:
            planner = _ExportPlanner(written)
            items = self._items(own, targets, planner)
            plan = self.reader.prepare_local_plan(LoadPlan(items))
            self.reader.read_data(plan, planner).wait()
            written.finish()

    def _items(
        self, own: Sequence[tuple[int, Box]], targets: Sequence[Target], planner: _ExportPlanner
    ) -> list[ReadItem]:
        """Returns what is to be read for the boxes."""
        items: list[ReadItem] = []
        for number, (offsets, lengths) in own:
            tensor = self._tensors[number]
            place = narrowed(file_view(tensor), offsets, lengths)
            for part in self._mapped[tensor.name].parts_of(offsets, place):
                stored: Any = self.metadata.state_dict_metadata[part.fqn]
                wanted = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.lengths))
                for item in create_read_items_for_chunk_list(part.fqn, stored, [wanted]):
                    there = narrowed(part.view, item.dest_offsets, item.lengths)
                    items.append(planner.placed(item, there, targets[number]))
        return items


@takes_in_any_order
class _ExportPlanner(LoadPlanner):  # type: ignore[misc, unused-ignore]
    """Gives each read item memory of its own, and hands it to the files when it is filled."""

    def __init__(self, rows: BackgroundRows) -> None:
        self._rows = rows
        self._places: list[tuple[torch.Tensor, Target]] = []

    def placed(self, item: ReadItem, place: torch.Tensor, target: Target) -> ReadItem:
        """Returns an item of the plan whose bytes belong to a place of a payload."""
        zeros = torch.Size([0] * len(item.lengths))
        index = MetadataIndex(str(len(self._places)), zeros)
        self._places.append((place, target))
        return ReadItem(
            item.type, index, zeros, item.storage_index, item.storage_offsets, item.lengths
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place, _ = self._places[int(read_item.dest_index.fqn)]
        return self._rows.memory(read_item.lengths, place.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        place, target = self._places[int(read_item.dest_index.fqn)]
        self._rows.add_copy(tensor, place, target)

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to set up."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise PlanError(f"'{read_item.storage_index.fqn}' is an object, not a tensor")
