"""One rank's reads: windows of regions through one ReadJob.

Where every target exists already (stock's planner hooks, tensors of the stored dtype on the host or
a CUDA device) there is one window, and one call to C++. A target that is staged or decoded, or that
a user's planner makes on the fly, counts against a budget: once that is used up, the window is
read, handed over and dropped.

A planner that overrides both the hooks that find targets and those that take values may count on
stock's order, one item after the other: it may give the same buffer for every item, or remember the
item whose commit it expects. For such a planner every window holds one item.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torch_dcpx._compat import increment_version
from torch_dcpx._gc import bounded_pause
from torch_dcpx._hooks import TAKING_HOOKS, has_plain_state, has_stock_hooks, is_any_order
from torch_dcpx._native import _C
from torch_dcpx._text import counted
from torch_dcpx.errors import CorruptionError, StagingError, StorageError
from torch_dcpx.metadata.lazy import outline_of, raw_entries
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.bytes import BytesFinisher, BytesRead
from torch_dcpx.reader.claims import Claim, disjoint_groups
from torch_dcpx.reader.hints import add_verify, listed
from torch_dcpx.reader.locate import Found, Located
from torch_dcpx.reader.rows import (
    ON_HOST,
    ReadRow,
    TensorRead,
    finish_tensor_read,
    place_of,
    plan_tensor_read,
    span_elems,
    stored_dtype,
)
from torch_dcpx.reports import ReadReport
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.memory import has_strides
from torch_dcpx.timelines import Timeline

_DEVICE_STAGING_BYTES = 64 << 20  # of a device's memory, for all conversions there at one time


class ReadCounts(NamedTuple):
    """Counters of `read_items`, beside those of the job."""

    items: int
    torch_items: int  # tensor items that went through torch's own loader
    engine_s: float  # inside of ReadJob.read
    finish_s: float  # decoding, copies of what was staged, the planner's hooks

    def report(
        self, counters: Mapping[str, int], *, metadata_s: float, total_s: float, timeline: Timeline
    ) -> ReadReport:
        """Returns the report of a load that is done.

        Args:
            counters: of `ReadJob.report`: `*_bytes`, which have the report's names; `read_ns`,
                `verify_ns` and `copy_ns`, sums over the workers that share out `engine_s`.
            metadata_s: in `read_metadata`.
            total_s: in all hooks of the reader.
            timeline: of the load.
        """
        busy_ns = max(1, counters["read_ns"] + counters["verify_ns"] + counters["copy_ns"])
        verify_s = self.engine_s * counters["verify_ns"] / busy_ns
        copy_s = self.engine_s * counters["copy_ns"] / busy_ns
        return ReadReport(
            items=self.items,
            torch_items=self.torch_items,
            through_slot_bytes=counters["needed_bytes"] - counters["in_place_bytes"],
            **{name: counters[name] for name in counters if name.endswith("_bytes")},
            metadata_s=metadata_s,
            prepare_s=total_s - metadata_s - self.engine_s - self.finish_s,
            read_s=self.engine_s - verify_s - copy_s,
            verify_s=verify_s,
            copy_s=copy_s,
            finish_s=self.finish_s,
            total_s=total_s,
            timeline=timeline,
        )


class _Read(NamedTuple):
    """One item under way."""

    row: ReadRow | tuple[Any, ...] | None  # None: no byte to read
    claim: Claim | None  # the target's memory, where it is known
    direct: torch.Tensor | None  # the target, where the bytes go straight into it
    rest: TensorRead | BytesRead | None  # the work afterwards, if any


# Nearly all items of a plan are whole tensors, stored and wanted in C order: C++ makes their reads.
_READ_ROWS = _C.ReadRows(
    {
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "strided": torch.strided,
        "BYTE_IO": LoadItemType.BYTE_IO,
        "Read": _Read,
        "Claim": Claim,
    }
)


class _Window:
    """Reads that are prepared together, read in one call, and then handed over in their order."""

    def __init__(
        self,
        found: Found,
        planner: LoadPlanner,
        transforms: Any,
        options: ReadOptions,
        meeting: Container[MetadataIndex],
        stored: Mapping[str, Any],
    ) -> None:
        self._found = found
        self._stored = stored
        self._meeting = meeting
        self._planner = planner
        self._budget_bytes = options.host_memory_bytes
        self._makes_targets = not has_stock_hooks(planner)
        self._is_single = (
            self._makes_targets
            and not has_stock_hooks(planner, TAKING_HOOKS)
            and not is_any_order(planner)
        )
        self._wants_commits = not has_stock_hooks(planner, ("commit_tensor",))
        # A user's own hooks may convert what is stored as another dtype than it is said to be.
        may_convert = (self._makes_targets or self._wants_commits) and not is_any_order(planner)
        # Not a method: it would keep this window, and the state, until the garbage is collected.
        self._check_dtype = partial(_check_dtype, None if may_convert else outline_of(stored))
        self._bytes = BytesFinisher(planner, transforms, options, self._check_dtype)
        # Whether targets are the state's own tensors, which no hook waits for.
        has_state = has_plain_state(planner) and not meeting
        self.is_lean = has_state and not (self._makes_targets or self._wants_commits)
        self._reads: list[_Read] = []
        self._used_bytes = 0
        self._device_bytes = 0  # staged in the memory of devices
        self._devices: set[int] = set()  # of the reads prepared in Python
        self._plain_devices: set[int] = set()  # of those that C++ prepared, in all windows
        self._touched: list[str] = []  # over all windows
        self.torch_items = 0
        self.engine_s = self.finish_s = 0.0

    @property
    def touched(self) -> tuple[str, ...]:
        """Names of the items whose targets may hold new bytes."""
        return tuple(dict.fromkeys(self._touched))

    def prepare(self) -> None:
        """Prepares and reads all items, file by file as stock does."""
        found = self._found
        # Files are numbered in the order in which the plan names them first.
        order: Sequence[int] = range(len(found.items))
        if len(found.names) > 1:
            order = sorted(order, key=found.files.__getitem__)
        reads: list[_Read | None] = [None] * len(found.items)
        # Before the first byte: a planner that takes objects may give tensors other memory then.
        if self.is_lean and has_stock_hooks(self._planner, ("load_bytes",)):
            state: dict[str, Any] = self._planner.state_dict  # type: ignore[attr-defined]
            columns = found.items, found.files, found.places, found.entries, found.forms
            memory_of = device_memory.is_host, device_memory.ordinal_of
            reads, self._plain_devices = _READ_ROWS.plain_reads(
                *columns, state, *raw_entries(self._stored), *memory_of
            )
        for number in order:
            read = reads[number]
            if read is not None:
                self._reads.append(read)
            else:
                self._add_item(number, found.items[number])
        self.flush()

    def _add_item(self, number: int, item: ReadItem) -> None:
        located = self._found.located(number)
        descriptors = self._found.entries[number].transform_descriptors or ()
        if item.type == LoadItemType.BYTE_IO or descriptors or located.form.kind != "plain":
            self.torch_items += item.type != LoadItemType.BYTE_IO
            self._add_bytes(item, located, descriptors)
        else:
            self._add_tensor(item, located)

    def _claim(self, item: ReadItem, target: torch.Tensor) -> Claim | None:
        """Returns the memory of a target; None where it has none, or no strides."""
        if not has_strides(target) or not target.numel():
            return None
        begin = target.data_ptr()
        nbytes = span_elems(target.shape, target.stride()) * target.element_size()
        owner = item.dest_index if item.dest_index not in self._meeting else object()
        return Claim(begin, begin + nbytes, owner)

    def _make_room(self, nbytes: int, device_bytes: int = 0) -> None:
        """Reads the window if so much more host or device memory would exceed a budget."""
        exceeds = (nbytes and self._used_bytes + nbytes > self._budget_bytes) or (
            device_bytes and self._device_bytes + device_bytes > _DEVICE_STAGING_BYTES
        )
        if self._reads and exceeds:
            self.flush()

    def _add_tensor(self, item: ReadItem, located: Located) -> None:
        """Prepares the read of a plain tensor's region."""
        dtype = stored_dtype(located.form, item.storage_index.fqn)
        if not located.form.named_dtype:
            self._check_dtype(item, dtype, located.path)
        target = self._planner.resolve_tensor(item)
        place = place_of(target.detach(), dtype, located.form.is_big_endian)
        staged_bytes = 0 if place.is_direct else math.prod(item.lengths) * dtype.itemsize
        if place.device >= 0 and staged_bytes > _DEVICE_STAGING_BYTES:
            place = ON_HOST  # a device that is nearly full has no room for one more such tensor
        cost, device_bytes = (0, staged_bytes) if place.device >= 0 else (staged_bytes, 0)
        if self._makes_targets:
            cost += target.numel() * target.element_size()
        self._make_room(cost, device_bytes)
        claim = self._claim(item, target.detach())
        read = plan_tensor_read(item, located, target, dtype, place)
        if read.row is not None and place.device >= 0:
            self._devices.add(place.device)
        self._device_bytes += device_bytes
        self._add(_Read(read.row, claim, read.target if place.is_direct else None, read), cost)

    def _add_bytes(self, item: ReadItem, located: Located, descriptors: Sequence[str]) -> None:
        """Prepares the read of a whole item, whose bytes torch or the planner must understand."""
        file, nbytes = located.file, located.payload_bytes
        self._make_room(nbytes)
        claim = row = None
        if item.type != LoadItemType.BYTE_IO and not self._makes_targets:
            claim = self._claim(item, self._planner.resolve_tensor(item).detach())
        data, fqn = bytearray(nbytes), item.storage_index.fqn
        if nbytes:
            row = ReadRow(file, located.payload_offset, nbytes, (), (), (), data, nbytes, fqn)
        read = BytesRead(item, data, located.path, descriptors, self._found.is_foreign[file])
        self._add(_Read(row, claim, None, read), nbytes)

    def _add(self, read: _Read, cost: int) -> None:
        self._reads.append(read)
        self._used_bytes += cost
        if self._is_single:
            self.flush()

    def flush(self) -> None:
        """Reads everything prepared and hands it to the planner."""
        reads, self._reads, self._used_bytes = self._reads, [], 0
        devices, self._devices, self._device_bytes = self._devices, set(), 0
        begin = 0
        for end in disjoint_groups([read.claim for read in reads]):
            self._read(reads[begin:end], devices | self._plain_devices)
            begin = end
        reads.clear()  # prepare() has the list until it asks for the new one

    def _note(self, filled: Sequence[_Read]) -> None:
        """Notes which reads brought bytes, and tells autograd, even if what follows fails."""
        self._touched += [read.row[8] for read in filled if read.row is not None]
        increment_version([read.direct for read in filled if read.direct is not None])

    def _read(self, reads: list[_Read], devices: set[int]) -> None:
        filled = [read for read in reads if read.row is not None]
        rows = [read.row for read in filled if read.row is not None]
        began = time.perf_counter()
        # Marked at each call: what is queued may still use the targets, or memory staged for them.
        after = device_memory.source_events(devices)
        try:
            self._found.job.read(rows, after)
        except BaseException:
            self._note(list(itertools.compress(filled, self._found.job.touched())))
            if after is not None:  # the caller may free targets that a device still writes to
                device_memory.keep_while_copied(list(map(_memory_of, filled)))
            raise
        if after is not None:
            device_memory.log_warning()
        self._note(filled)
        read_at = time.perf_counter()
        rests = [read.rest for read in reads if read.rest is not None]
        whole = [rest for rest in rests if isinstance(rest, BytesRead)]
        plain = iter(self._bytes.plain_values(whole) if whole else ())
        for rest in rests:
            if isinstance(rest, BytesRead):
                self._bytes.finish(rest, next(plain))
            else:
                finish_tensor_read(rest)
                if self._wants_commits:
                    self._planner.commit_tensor(rest.item, rest.target)
        self.engine_s += read_at - began
        self.finish_s += time.perf_counter() - read_at


def _memory_of(read: _Read) -> object:
    """Returns the tensor of the memory that the read goes to; None for bytes."""
    into = read.rest.staged if isinstance(read.rest, TensorRead) else None
    into = read.direct if into is None else into
    return None if into is None else into.detach()


def _note_touched(error: BaseException, touched: Sequence[str]) -> None:
    """Notes on an error without such a field which targets may hold new bytes."""
    vars(error)["touched"] = tuple(touched)
    if touched and hasattr(error, "add_note"):  # Python 3.11
        shown = ", ".join(map(repr, touched[:5])) + (", ..." if len(touched) > 5 else "")
        error.add_note(f"{counted(len(touched), 'tensor')} may hold new bytes: {shown}")


def name_items(error: CorruptionError, found: Found) -> None:
    """Adds to the error of damaged bytes which of the wanted items they belong to."""
    if error.offset is None or error.path is None or error.path not in found.names:
        return
    names = found.names_in(error.path, error.offset, error.offset + (error.nbytes or 0))
    if names and f"'{names[0]}'" not in error.message:
        error.fqn = error.fqn if error.fqn in names else names[0]
        error.message += f"; these hold {listed(names)}"
        if not all(found.is_foreign):  # else there is nothing to check against
            add_verify(error, found.directory)


def read_items(
    found: Found,
    planner: LoadPlanner,
    transforms: Any,
    options: ReadOptions,
    *,
    stored: Mapping[str, Any],
    meeting: Container[MetadataIndex],
) -> ReadCounts:
    """Reads the items of a plan into the planner's tensors and objects, file by file as stock does.

    Args:
        transforms: stock's `_StorageReaderTransforms`.
        stored: the entries of the metadata.
        meeting: targets in which two items may fill the same element.

    Raises:
        CorruptionError, StagingError, StorageError: `touched` names the items whose targets may
            hold new bytes.
    """
    window = _Window(found, planner, transforms, options, meeting, stored)
    try:
        # A user's planner may make garbage of any size, which must not wait for the end.
        runs_own_code = not (window.is_lean and has_stock_hooks(planner, TAKING_HOOKS))
        with nullcontext() if runs_own_code else bounded_pause(len(found.items)):
            window.prepare()
    except (CorruptionError, StagingError, StorageError) as error:
        error.touched = window.touched
        if isinstance(error, CorruptionError):
            name_items(error, found)
        raise
    except BaseException as error:  # an interruption, or a planner's own error
        _note_touched(error, window.touched)
        raise
    return ReadCounts(len(found.items), window.torch_items, window.engine_s, window.finish_s)


def _check_dtype(outline: Any, item: ReadItem, dtype: torch.dtype, path: str) -> None:
    """Raises CorruptionError where a tensor in a file of stock's has another dtype than the
    metadata says. Our own files were checked, and a planner may have converted what they hold.
    """
    fqn = item.storage_index.fqn
    entry = outline(fqn) if outline is not None else None
    if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype != dtype:
        raise CorruptionError(
            f"'{fqn}' is stored in '{path}' as {dtype}, the metadata says "
            f"{entry.properties.dtype}; where the save's planner converted it, torch's "
            "FileSystemReader loads it, or a planner with a commit_tensor of its own",
            fqn=fqn,
            path=path,
        )
