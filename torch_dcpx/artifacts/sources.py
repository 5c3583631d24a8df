"""The sources of an export: a live state, or a stored one (checkpoint or safetensors).

One rank writes each box of a live state, from its own shards. Of a stored state, each rank reads
and writes the boxes that begin in its share of the bytes. It reads one window while it writes the
one before, into memory that it uses again.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import add, sub
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object

from torch_dcpx._compat import dtype_name, wanted_chunks, wanted_sizes
from torch_dcpx._hooks import takes_in_any_order
from torch_dcpx._text import counted
from torch_dcpx.artifacts.files import slots_within
from torch_dcpx.artifacts.layout import ExportTensor, file_view
from torch_dcpx.artifacts.rows import BackgroundRows, ExportRows, Target, narrowed, slabs
from torch_dcpx.checkpoint.load import load_for_another_call
from torch_dcpx.checkpoint.stateful import with_state_dicts
from torch_dcpx.errors import PlanError, UnsupportedError
from torch_dcpx.keys.mapped_state import model_part
from torch_dcpx.keys.mapped_tensor import MappedTensor, Sizes
from torch_dcpx.keys.wrappers import plain_names
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.planners.state_errors import naming_state_errors
from torch_dcpx.reader.claimed import check_claims
from torch_dcpx.reader.pretrained_reader import PretrainedReader
from torch_dcpx.reader.reader import DcpxReader
from torch_dcpx.storage.object_url import location_of
from torch_dcpx.storage.paths import absolute
from torch_dcpx.tensors.memory import check_storage, has_strides, refuse_nested

Box = tuple[Sizes, Sizes]  # offsets and lengths, in elements


class Entry(NamedTuple):
    """A tensor of the source; an object has neither dtype nor sizes."""

    dtype: str | None = None
    sizes: Sizes | None = None


class Piece(NamedTuple):
    """A box of an offered tensor whose bytes follow each other in a file."""

    number: int
    offsets: Sizes
    lengths: Sizes


class Offer(NamedTuple):
    """The boxes of one tensor of the artifact that this rank holds."""

    name: str  # of that tensor
    boxes: tuple[Box, ...]
    twin: str | None  # the first name of the same memory, maybe its own; None: no bytes here


def selected(
    entries: Mapping[str, Entry], part: str, keys: Iterable[str] | None
) -> tuple[dict[str, Entry], str]:
    """Returns the chosen entries, and the prefix that their names lose. Raises: PlanError."""
    if keys is None:
        return {name: one for name, one in entries.items() if name.startswith(part)}, part
    chosen: dict[str, Entry] = {}
    for glob in keys:
        match = re.compile(fnmatch.translate(glob)).match
        found = {name: one for name, one in entries.items() if match(name)}
        if not found:
            near = difflib.get_close_matches(glob, list(entries)[:1000], 3) or list(entries)[:3]
            raise PlanError(
                f"keys: nothing is named {glob!r} among {counted(len(entries), 'name')}, such as "
                f"{', '.join(map(repr, near))}"
            )
        chosen |= found
    return {name: one for name, one in entries.items() if name in chosen}, ""


class LiveSource:
    """A module or state dict, sharded or not."""

    is_shared = False  # a rank can write only the boxes that it holds
    slot_parts = 8  # sixteenths of the budget for slots; the others: copies of memory not plain
    piece_bytes = 0  # nothing is stored
    generation = None
    name = "a module or state dict"  # as ranks compare it

    def __init__(self, source: nn.Module | Mapping[str, Any]) -> None:
        if isinstance(source, nn.Module):
            modules, state = {"": source}, source.state_dict()
        else:
            modules = {str(k): one for k, one in source.items() if isinstance(one, nn.Module)}
            state = with_state_dicts(source)
        with naming_state_errors(state):
            self.state, paths = flatten_state_dict(state)
        self.plain = plain_names(modules, self.state)
        is_part = any(len(path) > 1 and path[0] == "model" for path in paths.values())
        self._part = "model." if is_part else ""
        self._memory: dict[tuple[int, Sizes], torch.Tensor] = {}
        self._tensors: Sequence[ExportTensor] = ()

    def entries(self) -> tuple[dict[str, Entry], str]:
        """Returns this rank's names, and the prefix of the model's. Raises: UnsupportedError."""
        found = {}
        for name, value in self.state.items():
            refuse_nested(name, value)
            sizes = wanted_sizes(value) if isinstance(value, torch.Tensor) else None
            found[name] = Entry() if sizes is None else Entry(dtype_name(value.dtype), sizes)
        return found, self._part

    def objects(self, names: Mapping[str, str], *, is_first: bool) -> dict[str, Any]:
        """Returns this rank's objects by new name; `names` maps new names to its own."""
        return {new: self.state[name] for new, name in names.items() if name in self.state}

    def offers(
        self, tensors: Sequence[ExportTensor], mapped: Mapping[str, MappedTensor]
    ) -> list[Offer]:
        """Returns this rank's boxes of each tensor. Raises: UnsupportedError."""
        self._tensors = tensors
        first: dict[Any, str] = {}
        offers = []
        for number, tensor in enumerate(tensors):
            boxes, memory = [], []
            for source in mapped[tensor.name].sources:
                for offsets, local in self._chunks(source):
                    for at, view in mapped[tensor.name].boxes_of(source, offsets, local):
                        if view.numel() == 0:
                            continue
                        boxes.append((at, tuple(view.shape)))
                        self._memory[number, at] = view
                        bits = (view.is_conj(), view.is_neg(), str(view.device))
                        memory.append((at, view.data_ptr(), view.shape, view.stride(), bits))
            key = (tensor.dtype, tuple(memory))
            twin = tensor.name if memory else None
            if memory and memory[0][1]:
                twin = first.setdefault(key, tensor.name)
            offers.append(Offer(tensor.name, tuple(boxes), twin))
        return offers

    def write(
        self, own: Sequence[tuple[int, Box]], targets: Mapping[int, Target], rows: ExportRows
    ) -> None:
        """Writes boxes: (number of the tensor, box)."""
        for number, (offsets, lengths) in own:
            tensor = self._tensors[number]
            place = narrowed(file_view(tensor), offsets, lengths)
            rows.add(self._memory[number, offsets], place, targets[number])
        rows.flush()

    def fill(self, pieces: Sequence[Piece], views: Sequence[torch.Tensor]) -> None:
        """Copies pieces of tensors that this rank holds whole to plain host memory."""
        for piece, view in zip(pieces, views, strict=True):
            for at, local in self._boxes_of[piece.number]:
                box = _common(piece, at, local.shape)
                if box is not None:
                    begin, lengths = box
                    there = narrowed(view, map(sub, begin, piece.offsets), lengths)
                    there.copy_(narrowed(local, map(sub, begin, at), lengths))

    @cached_property
    def _boxes_of(self) -> dict[int, list[tuple[Sizes, torch.Tensor]]]:
        found: dict[int, list[tuple[Sizes, torch.Tensor]]] = {}
        for (number, at), local in self._memory.items():
            found.setdefault(number, []).append((at, local))
        return found

    def _chunks(self, name: str) -> Iterable[tuple[Sizes, torch.Tensor]]:
        target = self.state.get(name)
        if target is None:  # another rank's
            return
        for index, chunk in enumerate(wanted_chunks(target)):
            place = MetadataIndex(name, chunk.offsets, index)
            local = find_state_dict_object({name: target}, place).detach()
            if local.is_meta:
                raise UnsupportedError(f"'{name}' is on meta: it has no bytes to export")
            if not has_strides(local):
                raise UnsupportedError(
                    f"'{name}' is a {type(local).__name__} of layout {local.layout}, which an "
                    "export cannot lay out"
                )
            check_storage(local, name)
            yield tuple(chunk.offsets), local


def _common(piece: Piece, at: Sizes, sizes: Sizes) -> Box | None:
    """Returns offsets and lengths of what a piece has in common with a box; None: nothing."""
    begins = tuple(map(max, piece.offsets, at))
    ends = map(min, map(add, piece.offsets, piece.lengths), map(add, at, sizes))
    lengths = tuple(map(sub, ends, begins))
    return (begins, lengths) if all(length > 0 for length in lengths) else None


# ---- Stored sources ------------------------------------------------------------------------------


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
            planner = _ExportPlanner(written)
            for number, (offsets, lengths) in own:
                place = narrowed(file_view(self._tensors[number]), offsets, lengths)
                self._add(planner, number, offsets, place, targets[number])
            self._read(planner)
            written.finish()

    def fill(self, pieces: Sequence[Piece], views: Sequence[torch.Tensor]) -> None:
        """Reads pieces into plain host memory."""
        planner = _FillPlanner()
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

    def __init__(self) -> None:
        # Not stock's: a read calls none of its hooks but those of the subclasses.
        self.items: list[ReadItem] = []
        self._places: list[tuple[torch.Tensor, Any]] = []

    def add(self, item: ReadItem, place: torch.Tensor, target: Target | None) -> None:
        """Adds an item to the plan, and notes the place of its bytes."""
        zeros = torch.Size([0] * len(item.lengths))
        index = MetadataIndex(str(len(self._places)), zeros)
        self._places.append((place, target))
        stored = item.storage_index, item.storage_offsets
        self.items.append(ReadItem(item.type, index, zeros, *stored, item.lengths))

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise PlanError(f"'{read_item.storage_index.fqn}' is an object, not a tensor")


@takes_in_any_order
class _FillPlanner(_PlacingPlanner):
    """Has each read item filled in its place."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._places[int(read_item.dest_index.fqn)][0]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Does nothing: it lies there."""


@takes_in_any_order
class _ExportPlanner(_PlacingPlanner):
    """Gives each read item memory of its own, and passes it on to the files once it is filled."""

    def __init__(self, rows: BackgroundRows) -> None:
        super().__init__()
        self._rows = rows

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place, _ = self._places[int(read_item.dest_index.fqn)]
        return self._rows.memory(read_item.lengths, place.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        place, target = self._places[int(read_item.dest_index.fqn)]
        self._rows.add_copy(tensor, place, target)
