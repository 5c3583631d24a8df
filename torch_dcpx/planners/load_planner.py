"""DcpxLoadPlanner: the drop-in for `torch.distributed.checkpoint.DefaultLoadPlanner`.

C++ makes a rank's plan in one call: it finds the stored chunks that overlap each wanted one, by a
sweep along the dimension that separates them best, and checks that they fill it exactly once. Whole
plain tensors, nearly all of a state, it compares with the metadata's columns, without an entry; any
other value goes through Python.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import is_
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from torch_dcpx._compat import (
    HAS_KNOWN_ITEMS,
    IS_SWEPT,
    flatten_before_2_4,
    loaded_through,
    reader_above,
    stock_chunks,
    wanted_sizes,
)
from torch_dcpx._gc import bounded_pause
from torch_dcpx._hooks import check_switches, has_stock_hooks, plans_as_stock
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.errors import CorruptionError
from torch_dcpx.keys.mapped_state import MappedState, MappedTarget
from torch_dcpx.metadata.lazy import StoredEntries, chunks_in, outline_of
from torch_dcpx.planners.cache import STATE_READER
from torch_dcpx.planners.kept_load_plan import KeptPlan, is_kept
from torch_dcpx.planners.state_errors import naming_state_errors
from torch_dcpx.reader.elements import StateKeys
from torch_dcpx.reader.reader import DcpxReader
from torch_dcpx.tensors.memory import ChunkFinder, is_plain_dtensor, is_plain_tensor
from torch_dcpx.tensors.tiling import box_text, way_out

# (name, wanted: its sizes for a whole tensor, else its chunks; stored chunks, or the entry's number
# in the columns of the metadata; sizes of the tensor)
_Row = tuple[str, torch.Size | list[ChunkStorageMetadata], Any, torch.Size]


def flattened_target(
    state: Mapping[str, Any], *, has_flat_shards: bool
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns a state as `DefaultLoadPlanner.set_up_planner` flattens it, and the path of each
    name; None where torch itself has to, as its `flatten_sharded_tensors` makes every list anew:
    elements without a value of their own become None, and of two keys with one text the last stays.

    Source: torch.distributed.checkpoint._nested_dict.flatten_state_dict, and its caller.
    """
    try:
        flat, paths, has_sharded, is_odd = STATE_READER.flatten(state)
    except ValueError:  # two values of one name
        return None
    return None if has_flat_shards and (has_sharded or is_odd) else (flat, paths)


def unlike_names(
    state: Mapping[str, Any], stored: Mapping[str, Any], *, has_dtypes: bool
) -> Iterable[str]:
    """Returns the names of a flat state's values, without those that C++ finds to be whole tensors
    of the stored sizes and, with `has_dtypes`, the stored dtype; all names where it cannot look.
    """
    if type(state) is dict and isinstance(stored, StoredEntries):
        columns = stored.columns  # once: another thread may fill the entries meanwhile
        if columns is not None:
            with suppress(RuntimeError):  # torch knows no sizes of a tensor: later checks name it
                return STATE_READER.unlike(state, stored, columns, has_dtypes)
    return state


def whole_rows(
    state: Mapping[str, Any], stored: Mapping[str, Any]
) -> tuple[list[Any], Iterable[tuple[int, str]]]:
    """Returns a row (name, sizes, number in the columns, sizes) for each whole plain tensor of the
    stored sizes in a flat state, None for all else; the place and the name of these others.
    """
    if type(state) is dict and isinstance(stored, StoredEntries):
        columns = stored.columns
        if columns is not None:
            return STATE_READER.whole_rows(state, stored, columns)
    return [None] * len(state), enumerate(state)


@plans_as_stock
class DcpxLoadPlanner(DefaultLoadPlanner):
    """Plans a load as `DefaultLoadPlanner` does, with the same items in the same order.

    Arguments, hooks and errors are those of `DefaultLoadPlanner`; a subclass may override any hook.
    Works with any storage reader; `DcpxReader` reads straight into the state's tensors. Before a
    byte is read, it also refuses checkpoints whose chunks leave a hole in a wanted tensor or hold
    an element twice; stock does not notice these.

    Args:
        flatten_state_dict: plan nested dicts and lists by names joined with dots. Default True.
        flatten_sharded_tensors: take a ShardedTensor of ShardedTensors for one. Default True.
        allow_partial_load: leave names that the checkpoint does not hold as they are. Default
            False: they are an error.

    Raises:
        OptionError: an argument that is no switch.
    """

    _kept: KeptPlan | None = None  # the plan at hand, if other ranks do not see its items
    # The planned state, and its items, which fill it once.
    _covered: tuple[Any, tuple[ReadItem, ...]] | None = None
    dcpx_is_odd = False  # torch has taken the state apart, see `flattened_target`
    dcpx_is_mapped = False  # the state goes by stored names, which a KeyMap has found

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        check_switches(self)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the state and the metadata. Source: DefaultLoadPlanner.set_up_planner.

        Raises:
            OptionError: the state contains itself.
            PlanError: two values have one name (torch's text).
        """
        self._keys = StateKeys()
        with naming_state_errors(state_dict):
            if self.flatten_state_dict:
                with _unflattened(self):
                    super().set_up_planner(state_dict, metadata, is_coordinator)
                state, has_flat_shards = self.state_dict, self.flatten_sharded_tensors
                flat = flattened_target(state, has_flat_shards=has_flat_shards)
                self.dcpx_is_odd = flat is None
                if flat is not None:
                    self.state_dict, self.mappings = flat
                    return
            super().set_up_planner(state_dict, metadata, is_coordinator)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the state's tensor, or shard, that a read item names."""
        own = self.state_dict.get(index.fqn)
        return own.view(index) if isinstance(own, MappedTarget) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts an object into the state, under the state's own key of its name."""
        if not self.flatten_state_dict:
            super().load_bytes(read_item, value)
            return
        fqn, state, paths = read_item.dest_index.fqn, self.original_state_dict, self.mappings
        self.original_state_dict, self.mappings = {}, {fqn: (fqn,)}  # torch decodes it
        try:
            super().load_bytes(read_item, value)
            loaded = self.original_state_dict[fqn]
        finally:
            self.original_state_dict, self.mappings = state, paths
        self._keys.put(state, paths[fqn], loaded)

    def dcpx_use_mapped(self, mapped: MappedState) -> None:
        """Plans a state by stored names. REQUIRES: `set_up_planner`, with a flat state."""
        self.dcpx_is_mapped = True
        self.state_dict = mapped.state
        self.mappings = {stored: self.mappings[name] for stored, name in mapped.names.items()}

    def create_local_plan(self) -> LoadPlan:
        """Plans what this rank reads.

        Raises:
            RuntimeError: a name is not in the checkpoint (stock's text), without
                `allow_partial_load`.
            ValueError: a tensor's size is not the stored one (stock's texts), or a tensor is stored
                where something else is wanted.
            PlanError: a DTensor's shard has another shape than its placement says.
            CorruptionError: the stored chunks do not hold each wanted element exactly once; `fqn`
                is the first such tensor. `DefaultLoadPlanner` with torch's reader loads what
                there is.
        """
        if self.metadata is None:
            raise AssertionError("self.metadata is not None")
        if self.flatten_state_dict:
            self._use_names_before_2_4()
        if not HAS_KNOWN_ITEMS:
            return create_default_local_load_plan(
                self.state_dict, self.metadata, not self.allow_partial_load
            )
        self._covered = None
        uneven: list[_Row] = []  # tensors whose coverage nobody checks

        def fallback(row: _Row) -> list[ReadItem]:
            uneven.append(row)
            return self._fallback(row)

        with bounded_pause(len(self.state_dict)):
            stored = self.metadata.state_dict_metadata
            columns = stored.columns if isinstance(stored, StoredEntries) else None
            rows = self._rows()
            items, offences = MAKER.read_items(rows, fallback, IS_SWEPT, columns)
        if offences:
            first = offences[0]
            raise _error(reader_above(sys._getframe(1)), rows[first[0]], stored, *first[1:])
        if not uneven:
            self._covered = (self.state_dict, tuple(items))
        is_sent = not is_kept(self, loaded_through(sys._getframe(1)))
        self._kept = None if is_sent else KeptPlan(items)
        return self._kept or LoadPlan(items)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Takes this rank's plan. PlanError: the coordinator gave this rank that of another."""
        new_plan = super().finish_plan(new_plan)
        kept, self._kept = self._kept, None
        return new_plan.whole(kept) if isinstance(new_plan, KeptPlan) else new_plan

    def _take_covered(self, items: Sequence[ReadItem]) -> bool:
        """Returns, once a plan, whether these are its items, which fill the state once."""
        covered, self._covered = self._covered, None
        return (
            covered is not None
            and covered[0] is self.state_dict
            and len(covered[1]) == len(items)
            and all(map(is_, covered[1], items))
        )

    def _use_names_before_2_4(self) -> None:
        """Takes names of torch before 2.4, as `DefaultLoadPlanner.create_local_plan` does."""
        stored = self.metadata.state_dict_metadata.keys()  # type: ignore[union-attr]
        if not self.dcpx_is_mapped and not stored <= self.state_dict.keys():
            state, mappings = flatten_before_2_4(self.original_state_dict)
            if not (stored - self.state_dict.keys()).isdisjoint(state):
                self.state_dict, self.mappings = state, mappings

    def _rows(self) -> list[Any]:
        """Returns what C++ makes items of: a row for a tensor, the name of an object (in a tuple
        where it is no str), or items. Source: create_default_local_load_plan.
        """
        stored = self.metadata.state_dict_metadata  # type: ignore[union-attr]
        outline, chunks_of = outline_of(stored), chunks_in(stored)
        rows, others = whole_rows(self.state_dict, stored)
        chunks = ChunkFinder()
        fills_state = has_stock_hooks(self)  # else hooks may fill another tensor
        for at, fqn in others:
            target, entry = self.state_dict[fqn], outline(fqn)
            row: Any = []  # nothing to read
            if entry is None:
                if not self.allow_partial_load:
                    raise RuntimeError(f"Missing key in checkpoint state_dict: {fqn}.")
            elif type(entry) is TensorStorageMetadata and is_plain_tensor(target):
                _check_size(entry, target.shape, fqn)
                row = (fqn, target.shape, chunks_of(fqn), target.shape)
            elif type(entry) is TensorStorageMetadata and is_plain_dtensor(target):
                _check_size(entry, target.shape, fqn)
                part = chunks.target_part_of(fqn, target) if fills_state else chunks.part_of(target)
                if part is not None:
                    row = (fqn, [ChunkStorageMetadata(*part)], chunks_of(fqn), entry.size)
            else:
                row = _other_row(fqn, entry, target, chunks_of)
            rows[at] = row
        return rows

    def _fallback(self, row: _Row) -> list[ReadItem]:
        """Returns the items of a tensor whose chunks differ in their number of dimensions."""
        fqn, wanted, stored, size = row
        if type(stored) is int:  # of the entry, in the columns
            entries: dict[str, Any] = self.metadata.state_dict_metadata  # type: ignore[union-attr]
            stored = entries[fqn].chunks
        if isinstance(wanted, torch.Size):
            wanted = [ChunkStorageMetadata(torch.Size([0] * len(wanted)), wanted)]
        properties: Any = None
        entry = TensorStorageMetadata(properties, size, stored)
        return create_read_items_for_chunk_list(fqn, entry, wanted)


@contextmanager
def _unflattened(planner: DefaultLoadPlanner) -> Iterator[None]:
    """Lets torch set a planner up without its own loops over all values."""
    flags = planner.flatten_state_dict, planner.flatten_sharded_tensors
    planner.flatten_state_dict = planner.flatten_sharded_tensors = False
    try:
        yield
    finally:
        planner.flatten_state_dict, planner.flatten_sharded_tensors = flags


def _other_row(fqn: str, entry: Any, target: Any, chunks_of: Callable[[str], Any]) -> Any:
    """Returns the row of a value that is no plain tensor, or is not stored as one."""
    if isinstance(entry, TensorStorageMetadata):
        sizes = wanted_sizes(target)
        if sizes is not None:
            _check_size(entry, torch.Size(sizes), fqn)
    if isinstance(target, DTensor) and target.device_mesh.get_coordinate() is None:
        return []  # this rank is no part of its mesh
    if isinstance(entry, BytesStorageMetadata):
        return fqn if type(fqn) is str else (fqn,)
    try:
        wanted = list(stock_chunks(target))
    except ValueError as error:
        raise ValueError(
            f"Invalid checkpoint metadata for {fqn}, expected BytesStorageMetadata but found "
            f"{type(entry)}"
        ) from error
    return (fqn, wanted, chunks_of(fqn), entry.size)


def _check_size(entry: TensorStorageMetadata, wanted: torch.Size, fqn: str) -> None:
    if entry.size != wanted:
        raise ValueError(
            f"Size mismatch between saved {entry.size} and current: {wanted} for {fqn}"
        )


def _error(
    reader: object | None,
    row: _Row,
    entries: Any,
    wanted: int,
    offence: str,
    box: int,
    other: int,
    point: Sequence[int],
) -> CorruptionError:
    """Returns the error of a tensor's stored chunks; it makes only those that it names."""
    fqn, chunks, stored, size = row
    if offence == "numbers":
        what = "its sizes" if box < 0 else f"the offsets and sizes of its chunk {box}"
        message = f"in the metadata of '{fqn}', {what} are no numbers below 2^63"
        return CorruptionError(f"{message}; nothing was read", fqn=fqn, touched=())
    if isinstance(chunks, torch.Size):
        offsets, sizes = [0] * len(chunks), chunks
    else:
        offsets, sizes = list(chunks[wanted].offsets), chunks[wanted].sizes
    where = f"'{fqn}' of sizes {list(size)}, of which {box_text(offsets, sizes)} is wanted"
    if offence == "hole":
        at = [begin + place for begin, place in zip(offsets, point, strict=True)]
        message = f"no chunk of the checkpoint holds element {at} of {where}"
    elif offence == "overlap":
        named = [entries.chunk(fqn, i) if type(stored) is int else stored[i] for i in (box, other)]
        both = " and ".join(box_text(one.offsets, one.sizes) for one in named)
        message = f"chunks {both} of the checkpoint hold the same elements of {where}"
    else:
        message = f"the metadata gives {where} sizes that no tensor has"
        return CorruptionError(f"{message}; nothing was read", fqn=fqn, touched=())
    is_ours = reader is None or isinstance(reader, DcpxReader)
    hint = way_out(offence, type(reader).__name__ if reader is not None else "", is_ours=is_ours)
    return CorruptionError(f"{message}; nothing was read; {hint}", fqn=fqn, touched=())


def state_of(planner: LoadPlanner) -> Mapping[str, Any]:
    state = getattr(planner, "state_dict", None)
    return state if isinstance(state, Mapping) else {}


def planned_state(planner: LoadPlanner, stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the state as `DefaultLoadPlanner.create_local_plan` will see it: by the names of
    torch before 2.4 if the checkpoint has such.
    """
    state = state_of(planner)
    if getattr(planner, "dcpx_is_mapped", False):
        return state
    if getattr(planner, "flatten_state_dict", False) and not stored.keys() <= state.keys():
        before = flatten_before_2_4(getattr(planner, "original_state_dict", {}))[0]
        return before if any(one in stored and one not in state for one in before) else state
    return state
