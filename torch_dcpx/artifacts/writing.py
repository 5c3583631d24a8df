"""A rank's part of an export: its boxes into files of a directory, or whole files into a store."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_dcpx._compat import dtype_by_name
from torch_dcpx.artifacts.files import open_job, temporary_name
from torch_dcpx.artifacts.layout import ExportTensor, Layout
from torch_dcpx.artifacts.rows import ExportRows, Target, slabs
from torch_dcpx.artifacts.sources import Box, LiveSource, Piece
from torch_dcpx.artifacts.stored_source import StoredSource
from torch_dcpx.errors import must_be
from torch_dcpx.options import WriteOptions
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.object_place import ObjectPlace
from torch_dcpx.storage.object_uploads import upload
from torch_dcpx.storage.object_url import Location, ObjectUrl

_MIB = 1 << 20
_PART_BYTES = 8 * _MIB
_LEAST_PART_BYTES = 5 * _MIB  # that a store takes
_MAX_PARTS = 9_000  # a store takes 10,000
_PARTS_AT_ONCE = 16


class Order(NamedTuple):
    """The boxes that a rank writes, and their places."""

    export_id: str
    layout: Layout
    tensors: tuple[ExportTensor, ...]  # of the artifact, in the order of the layout's payloads
    numbers: tuple[int, ...]  # of the payload of each offered tensor; -1: an alias
    own: tuple[tuple[int, Box], ...]  # of a live source; a rank finds its share of a stored one
    piece_bytes: int  # at most, of a box in a share
    own_files: tuple[int, ...]  # of a store, where one rank writes a file


class Done(NamedTuple):
    """Counts what a rank has written, and has its shares of the payloads' checksums."""

    written_bytes: int
    in_place_bytes: int
    crc_shares: list[int]


def write_own(
    source: LiveSource | StoredSource,
    order: Order,
    directory: Location,
    options: WriteOptions,
    *,
    rank: int,
    ranks: int,
    is_torch: bool,
    may_replace: bool,
) -> Done:
    """Writes a rank's part. Raises: StorageError, as a read of `source`, as `upload`."""
    if isinstance(directory, ObjectUrl):
        return _Streams(source, order, directory, options).write(may_replace=may_replace)
    own: Iterable[tuple[int, Box]] = order.own
    if isinstance(source, StoredSource):
        own = source.shares(rank, ranks, order.piece_bytes)
    boxes = [box for box in own if order.numbers[box[0]] >= 0]
    if not boxes:
        return Done(0, 0, [])
    memory_bytes = options.resolved_memory_bytes()
    with Directory(directory) as opened:
        job = open_job(opened, options, memory_bytes * source.slot_parts // 16)
        try:
            targets = _targets(job, order, {box[0] for box in boxes}, is_torch=is_torch)
            source.write(boxes, targets, ExportRows(job, memory_bytes))
            job.finish(is_whole=False)
        finally:
            job.abandon()
        report = job.report()
        return Done(report["written_bytes"], report["in_place_bytes"], job.crc_shares())


def _targets(job: Any, order: Order, used: set[int], *, is_torch: bool) -> dict[int, Target]:
    """Opens the files of the tensors `used`. Returns their places by number."""
    opened: dict[int, int] = {}
    targets = {}
    for number in sorted(used):
        place = order.numbers[number]
        payload = order.layout.payloads[place]
        tag = place if is_torch else -1
        if payload.file not in opened:
            file = order.layout.files[payload.file]
            name = temporary_name(file.name, order.export_id)
            opened[payload.file] = job.add_file(name, file.nbytes, is_new=False)
        targets[number] = Target(opened[payload.file], payload.offset, payload.nbytes, tag)
    return targets


def remove_own(order: Order, directory: Location, options: WriteOptions) -> None:
    """Removes shards that this rank has uploaded. Never raises.

    REQUIRES: nobody publishes them. The coordinator removes the files of a directory.
    """
    if isinstance(directory, ObjectUrl) and len(order.layout.files) > 1:
        names = [order.layout.files[file].name for file in order.own_files]
        ObjectPlace(directory.at(options.endpoint)).remove_leftovers(names)


# ---- Into a store --------------------------------------------------------------------------------


class _Streams:
    """Uploads whole files, each by one rank, piece by piece in the order of its bytes.

    Of the budget half is for parts under way, of which a store holds one more than it was told, and
    a quarter for reads. A window is a sixteenth: one is being filled, and of two others a part may
    hold the end and the begin.
    """

    def __init__(
        self,
        source: LiveSource | StoredSource,
        order: Order,
        directory: ObjectUrl,
        options: WriteOptions,
    ) -> None:
        """Raises OptionError: parts that a store takes do not fit the memory."""
        files = [order.layout.files[file] for file in order.own_files]
        largest_bytes = max((file.nbytes for file in files), default=0)
        needed_bytes = max(_LEAST_PART_BYTES, -(-largest_bytes // _MAX_PARTS))
        memory_bytes = options.resolved_memory_bytes()
        if files and memory_bytes < 4 * needed_bytes:
            least = f"{4 * needed_bytes} or more for an export to a store"
            raise must_be("host_memory_bytes", memory_bytes, least)
        self._source, self._order = source, order
        self._place = ObjectPlace(directory.at(options.endpoint))
        self._offered = {place: n for n, place in enumerate(order.numbers) if place >= 0}
        self._part_bytes = max(needed_bytes, min(_PART_BYTES, memory_bytes // 4))
        self._window_bytes = memory_bytes // 16
        at_once = memory_bytes // 2 // self._part_bytes - 1
        self._at_once = max(1, min(_PARTS_AT_ONCE, at_once))

    def write(self, *, may_replace: bool) -> Done:
        written, is_single = 0, len(self._order.layout.files) == 1
        for file in self._order.own_files:
            plan = self._order.layout.files[file]
            upload(
                self._place.bucket,
                self._place.key(plan.name),
                plan.nbytes,
                partial(self._pieces, file),
                part_bytes=self._part_bytes,
                at_once=self._at_once,
                is_replacing=is_single,
                is_new=is_single and not may_replace,
            )
            written += plan.nbytes
        return Done(written, 0, [])

    def _pieces(self, file: int) -> Iterator[bytes | mmap.mmap]:
        """Yields the bytes of a file."""
        yield self._order.layout.files[file].head
        window: list[Piece] = []
        held = 0
        for piece, nbytes in self._boxes(file):
            if window and held + nbytes > self._window_bytes:
                yield self._filled(window, held)
                window, held = [], 0
            window.append(piece)
            held += nbytes
        if window:
            yield self._filled(window, held)

    def _boxes(self, file: int) -> Iterator[tuple[Piece, int]]:
        """Yields the boxes of a file's tensors, and the bytes of each, in the order of the file."""
        payloads, tensors = self._order.layout.payloads, self._order.tensors
        places = [place for place, payload in enumerate(payloads) if payload.file == file]
        for place in sorted(places, key=lambda one: payloads[one].offset):
            tensor = tensors[place]
            for offsets, lengths in slabs(tensor.sizes, tensor.itemsize, self._window_bytes):
                nbytes = torch.Size(lengths).numel() * tensor.itemsize
                yield Piece(self._offered[place], offsets, lengths), nbytes

    def _filled(self, window: Sequence[Piece], nbytes: int) -> mmap.mmap:
        """Returns the bytes of boxes. Once they are uploaded, their memory is the system's."""
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        views, at = [], 0
        for piece in window:
            tensor = self._order.tensors[self._order.numbers[piece.number]]
            end = at + torch.Size(piece.lengths).numel() * tensor.itemsize
            dtype = dtype_by_name(tensor.dtype) or torch.uint8
            views.append(whole[at:end].view(dtype).view(piece.lengths))
            at = end
        self._source.fill(window, views)
        return memory
