"""Reads tensors, parts of tensors and objects by their stored names.

The metadata is read once, and managers' retention leaves the checkpoint alone. Each read plans for
itself, so threads and forked children may read at once. It opens files by name: if a save has
replaced them, the read is an error, never a mix of two saves.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torch_dcpx._answered_os import os
from torch_dcpx._answers import or_at_most
from torch_dcpx._compat import dtype_name
from torch_dcpx.artifacts.layout import is_quantized
from torch_dcpx.artifacts.slices import Box, boxes_of, cut_of
from torch_dcpx.errors import (
    DcpxError,
    StagingError,
    StorageError,
    UnsupportedError,
)
from torch_dcpx.keys.mapped_state import MappedTarget
from torch_dcpx.keys.mapped_tensor import StoredPart
from torch_dcpx.metadata.lazy import outline_of
from torch_dcpx.options import ReadOptions
from torch_dcpx.planners.load_planner import DcpxLoadPlanner
from torch_dcpx.reader.claimed import check_claims
from torch_dcpx.reader.generation import check_not_replaced, file_states
from torch_dcpx.reader.pretrained_reader import PretrainedReader
from torch_dcpx.storage.object_url import Location, location_of
from torch_dcpx.storage.place import FileState
from torch_dcpx.storage.reader_lock import ReadersHold


class NamedReads:
    """A checkpoint whose metadata was read. Thread-safe.

    Attributes:
        path: its directory.
        name: the path as errors show it: the directory, or the file that was named.
        tensors: entries of the metadata without chunks, by name.
        objects: names of what is no tensor, those of a file of torch.save included.
    """

    def __init__(
        self, path: str | os.PathLike[str], options: ReadOptions, rank: int | None
    ) -> None:
        """Reads the metadata. Args, Raises: as `open_checkpoint`."""
        self._reader = PretrainedReader(path, options=options)
        self.path = os.fsdecode(self._reader.path)
        given = os.fsdecode(path)
        self.name = given if os.path.isfile(given) else self.path
        self._hold = ReadersHold()
        self._hold.take(self.path)
        self._of_rank: dict[str, Any] = {} if rank is None else {"rank": rank}
        states: dict[str, FileState] = {}
        try:
            with contextlib.suppress(StorageError):  # the next step says it better
                states = file_states(self._location())  # as they were before the metadata
            self._metadata = self._reader.read_metadata(**self._of_rank)
        except BaseException:
            self._hold.release()
            raise
        self._states = {} if self._reader.is_of_ours else states
        stored = self._metadata.state_dict_metadata
        entries = {name: outline_of(stored)(name) for name in stored}
        self.tensors = {
            name: one for name, one in entries.items() if isinstance(one, TensorStorageMetadata)
        }
        self._checked: set[str] = set()  # names of tensors that claim no more than there is
        self.objects = [name for name in entries if name not in self.tensors]
        self.objects += self._reader.objects

    @property
    def is_of_ours(self) -> bool:
        """Whether torch-dcpx wrote it: reads check its bytes."""
        return self._reader.is_of_ours

    @property
    def has_checksums(self) -> bool:
        """Whether its bytes have checksums, whoever compares them: safetensors have none."""
        return self._reader.has_checksums

    def close(self) -> None:
        """Lets managers delete the checkpoint; safe to call twice."""
        with self._bounded():
            self._hold.release()

    def read_tensors(self, names: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
        """Returns whole tensors, read at once."""
        names = list(names)
        self.check_claims(names)
        tensors = {name: self._memory(name, self.tensors[name].size, device) for name in names}
        self._read({name: tensor for name, tensor in tensors.items() if tensor.numel()})
        return tensors

    def read_objects(self, names: Sequence[str]) -> list[Any]:
        """Returns objects, read at once.

        Raises: UnsafePickleError: one may not be decoded; UnsupportedError: one of a file of
        torch.save has tensors in it, which are not read.
        """
        held = self._reader.objects
        state: dict[str, Any] = {name: None for name in names if name not in held}
        self._read(state)
        return [
            _copied(held[name], name, self.name) if name in held else state[name] for name in names
        ]

    def object_bytes(self, name: str) -> int:
        """Returns the stored bytes of an object; 0 of one that is held."""
        place = (self._metadata.storage_data or {}).get(MetadataIndex(name))
        return 0 if place is None else int(place.length)

    def read_part(self, name: str, index: Any) -> torch.Tensor:
        """Returns what `index` takes of a tensor. Raises: as `LazyTensor.__getitem__`."""
        self.check_claims([name])
        sizes = tuple(self.tensors[name].size)
        cut = cut_of(index, sizes, name)
        memory = self._memory(name, cut.counts, torch.device("cpu"))
        most = self._reader.options.host_memory_bytes
        boxes: list[Box] = []
        used = 0
        for box in boxes_of(cut, sizes, memory, most):
            cost = math.prod(box.lengths) * memory.itemsize if box.has_gaps else 0
            if used and used + cost > most:
                self._read_boxes(name, boxes)
                boxes, used = [], 0
            boxes.append(box)
            used += cost
        self._read_boxes(name, boxes)
        return cut.result(memory)

    def check_claims(self, names: Iterable[str]) -> None:
        """Raises CorruptionError where tensors claim far more than the files hold."""
        names = [name for name in names if name not in self._checked]
        stored = self._metadata.storage_data or {}
        with self._bounded():
            check_claims(self._location(), self._metadata.state_dict_metadata, stored, names)
        self._checked.update(names)

    def _read_boxes(self, name: str, boxes: Sequence[Box]) -> None:
        """Reads regions of one tensor to their places."""
        if not boxes:
            return
        target = _Regions(self.tensors[name].size)
        held = [box.place.new_empty(box.lengths) if box.has_gaps else box.place for box in boxes]
        for box, memory in zip(boxes, held, strict=True):
            target.add(StoredPart(name, box.offsets, box.lengths, memory))
        self._read({name: target})
        for box, memory in zip(boxes, held, strict=True):
            if box.has_gaps:
                box.place.copy_(memory[tuple(slice(None, None, step) for step in box.steps)])

    def _read(self, state: dict[str, Any]) -> None:
        """Reads into a state by stored names; objects replace what is there."""
        if not state:
            return
        with self._bounded():
            self._read_now(state)

    def _read_now(self, state: dict[str, Any]) -> None:
        reader = copy.copy(self._reader)  # a reader has one load at a time
        self._set_up(reader)
        planner = DcpxLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({}, self._metadata, is_coordinator=True)
        planner.state_dict = state
        plan = planner.create_local_plan()
        seen: dict[str, FileState] = {}
        if self._states:
            places = (reader.storage_data[item.storage_index] for item in plan.items)
            files = {place.relative_path for place in places}
            seen = {name: self._states[name] for name in files & self._states.keys()}
        try:
            plan = planner.finish_plan(reader.prepare_local_plan(plan))
            reader.read_data(plan, planner).wait()
        except DcpxError:
            self._check_same(seen)
            raise
        self._check_same(seen)

    def _bounded(self) -> AbstractContextManager[None]:
        return or_at_most(self._reader.options.load_timeout_s, "load_timeout_s")

    def _set_up(self, reader: PretrainedReader) -> None:
        extra = {**self._of_rank, "use_collectives": False} if self._of_rank else {}
        reader.set_up_storage_reader(self._metadata, is_coordinator=False, **extra)

    def _check_same(self, states: Mapping[str, FileState]) -> None:
        """Raises StorageError if files without checksums are no longer those of the metadata."""
        if states:  # else a directory is opened for nothing
            check_not_replaced(self._location(), states, "open it again")

    def _location(self) -> Location:
        return location_of(self.path, self._reader.options.endpoint)

    def _memory(self, name: str, sizes: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns memory for values of a tensor. Raises: UnsupportedError, StagingError."""
        dtype, layout = self.tensors[name].properties.dtype, self.tensors[name].properties.layout
        if layout is not torch.strided or is_quantized(dtype_name(dtype)):
            raise UnsupportedError(
                f"'{name}' is stored as {dtype} of layout {layout}, which is not read without a "
                "tensor to fill: give `load` one"
            )
        try:
            return torch.empty(tuple(sizes), dtype=dtype, device=device)
        except RuntimeError as error:  # more than there is, or than a size can be
            raise StagingError(
                f"make '{name}' of {math.prod(sizes) * dtype.itemsize} B on {device}: {error}",
                fqn=name,
            ) from error


def _copied(value: Any, name: str, path: str) -> Any:
    """Returns a copy of an object. Raises UnsupportedError for one with a tensor in it."""
    with contextlib.suppress(_NotPlainError, RecursionError):
        return _plain_copy(value)
    seen: set[int] = set()  # a list may hold itself
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, torch.Tensor):
            raise UnsupportedError(
                f"'{name}' of '{path}' is a {type(value).__name__} with a tensor in it: tensors "
                "are read from dicts and lists alone; save it anew as such"
            )
        if id(one) not in seen and isinstance(one, (dict, list, tuple, set, frozenset)):
            seen.add(id(one))
            left += [*one, *one.values()] if isinstance(one, dict) else one
    try:
        return copy.deepcopy(value)
    except RecursionError as error:
        raise UnsupportedError(f"'{name}' of '{path}' is nested too deeply to be read") from error


class _NotPlainError(Exception):
    """Says that an object is not made of Python's own values alone."""


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Refuses all that is no plain value, of which alone this is not asked."""
        raise _NotPlainError(type(obj))


def _plain_copy(value: Any) -> Any:
    """Returns a copy of plain values, ten times as fast as `copy.deepcopy` makes it."""
    stream = io.BytesIO()
    _PlainPickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return pickle.loads(stream.getvalue())  # noqa: S301 - our own bytes


class _Regions(MappedTarget):
    """The memory of many regions of one stored tensor."""

    def __init__(self, sizes: torch.Size) -> None:
        super().__init__(sizes)
        self._views: dict[tuple[int, ...], torch.Tensor] = {}

    def add(self, part: StoredPart) -> None:
        """Adds a region."""
        self.parts.append(part)
        self._views[part.offsets] = part.view

    def view(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the memory of the region that a read item names."""
        return self._views[tuple(index.offset or ())]
