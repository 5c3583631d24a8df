"""`dcpx.inspect`: the names, dtypes, shapes, parts and files of a checkpoint, as an object.

Reads metadata, and the small record of a manager; executes nothing.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from torch_dcpx._gc import paused_gc
from torch_dcpx._text import counted, human_bytes
from torch_dcpx.integrity.contents import (
    Contents,
    brief_from,
    commits_among,
    least_sizes,
    location,
    open_checkpoint,
    open_contents,
    read_commit,
    refuse_several,
    wanted_sizes,
)
from torch_dcpx.integrity.facts import Facts, facts_of, facts_of_export, seen_whole
from torch_dcpx.integrity.states import Kind, ranks_without_metadata, state_of
from torch_dcpx.metadata.file import CheckpointMetadata
from torch_dcpx.reader.hints import not_committed
from torch_dcpx.reader.pretrained_reader import PretrainedReader
from torch_dcpx.storage.names import METADATA_NAME, TORCH_SUFFIXES, Look
from torch_dcpx.storage.object_url import Location, location_of
from torch_dcpx.storage.place import Place
from torch_dcpx.storage.reader_lock import being_read
from torch_dcpx.views.chosen import chosen, globs_of
from torch_dcpx.views.items import FileSize, Item, Items, Rows, name_of
from torch_dcpx.views.tables import Shown, Table

_MAX_DTYPES = 4  # in a head
_OPTIMIZERS = ("optim", "optimizer", "optimizers", "optimizer_state")  # first modules of names


@dataclass(frozen=True, repr=False)
class Described(Shown[Item]):
    """One `.metadata`, or one export, with its names and files.

    Attributes:
        path: of the directory.
        metadata_file: `.metadata`, or that of a rank; of an export its file or index.
        written_by: "torch-dcpx" or "stock"; of an export its format.
        step: of the training, by its manager's record or its name; None: unknown.
        saved_at: "2026-01-31T23:59:59Z"; None: unknown.
        ranks: how many saved it; None: unknown.
        pinned: retention leaves it alone.
        state: "committed", also where `faults` are; "saving": each rank saves its own, and some
            have not ended.
        save_id: of an export "".
        fqns: names that were asked for.
        held: how many names are stored.
        files: by name.
        writer: with versions, where the metadata says them; else as `written_by`.
        alone: files of ranks whose own metadata is not there; nobody saves them now.
    """

    path: str
    metadata_file: str
    written_by: str
    step: int | None
    saved_at: str | None
    ranks: int | None
    pinned: bool
    state: Kind
    save_id: str
    fqns: Sequence[str]
    held: int
    files: dict[str, FileSize]
    writer: str
    metadata: Metadata = field(compare=False)
    alone: Sequence[str] = ()

    @property
    def items(self) -> Sequence[Item]:
        """The items that were asked for, in the order in which they are stored."""
        return Items(self.metadata, self.fqns)

    @cached_property
    def dtypes(self) -> dict[str, int]:
        """How many of the tensors have which dtype, the most frequent first."""
        found = Counter(entry.properties.dtype for entry in self._tensors.values())
        return {name_of(dtype): count for dtype, count in found.most_common()}

    @property
    def tensors(self) -> int:
        """How many of the items are tensors."""
        return len(self._tensors)

    @cached_property
    def parameters(self) -> int:
        """The elements of all tensors that were asked for, but of those of optimizers."""
        return sum(
            math.prod(entry.size)
            for fqn, entry in self._tensors.items()
            if fqn.partition(".")[0] not in _OPTIMIZERS
        )

    @cached_property
    def stored_nbytes(self) -> int:
        """The bytes of the items that were asked for, as stored: framing included."""
        chosen = set(self.fqns)
        places = (self.metadata.storage_data or {}).items()
        return sum(place.length for index, place in places if index.fqn in chosen)

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(size.found or 0 for size in self.files.values())

    @property
    def faults(self) -> list[str]:
        """The missing files, those of wrong sizes, and those of ranks without metadata."""
        sizes = [
            f"'{name}' is missing"
            if size.found is None
            else f"'{name}' has {size.found} B, {size.wanted} B were written"
            for name, size in self.files.items()
            if not size.is_right
        ]
        return sizes + [f"'{name}' is of a rank whose metadata is not there" for name in self.alone]

    def origin(self) -> str:
        """Returns who wrote it, of which step and when, in one line."""
        is_save = bool(self.save_id)
        by = f"written by {self.written_by}, save {self.save_id[:12]}" if is_save else ""
        said = [by or f"a file of {self.written_by}"]
        said += [] if self.step is None else [f"step {self.step}"]
        said += [] if self.saved_at is None else [f"saved {self.saved_at}"]
        return f"{location_of(self.path) / self.metadata_file}: {', '.join(said)}"

    def sums(self) -> str:
        """Returns what the items that were asked for come to, in one line."""
        count, tensors = len(self.fqns), self.tensors
        of = "" if count == self.held else f" of {self.held}"
        kinds = f"{counted(tensors, 'tensor')}, {counted(count - tensors, 'object')}"
        dtypes = list(self.dtypes)
        more = ", ..." if len(dtypes) > _MAX_DTYPES else ""
        form = f" ({', '.join(dtypes[:_MAX_DTYPES])}{more})" if dtypes else ""
        noun = "parameter" if self.parameters == 1 else "parameters"
        return (
            f"{count:,}{of} {'item' if count == 1 and not of else 'items'} ({kinds}), "
            f"{self.parameters:,} {noun}{form}, {human_bytes(self.stored_nbytes)} stored; "
            f"{counted(len(self.files), 'file')} of {human_bytes(self.nbytes)}"
        )

    def each(self) -> Sequence[Item]:
        return self.items

    def head(self) -> str:
        faults = "".join(f"; {fault}" for fault in self.faults)
        return f"{self.origin()}; {self.sums()}{faults}"

    def table(self) -> Table:
        columns = ["dtype", "shape", "#parts", "#stored", "name"]
        return Table(columns, Rows(Items(self.metadata, self.fqns)))

    @cached_property
    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        entries = self.metadata.state_dict_metadata
        found = ((fqn, entries[fqn]) for fqn in self.fqns)
        return {fqn: one for fqn, one in found if isinstance(one, TensorStorageMetadata)}


@dataclass(frozen=True, repr=False)
class Inspection(Shown[Item]):
    """A checkpoint or an export, as its metadata describe it. Iterates over the items.

    Attributes:
        path: as given.
        saves: what each file of metadata describes: one, or one for each rank that saved its own.
    """

    path: str
    saves: tuple[Described, ...]

    @property
    def step(self) -> int | None:
        """The step of the training; None: unknown."""
        return self.saves[0].step

    @property
    def saved_at(self) -> str | None:
        """When it was saved, as "2026-01-31T23:59:59Z"; None: unknown."""
        return self.saves[0].saved_at

    @property
    def ranks(self) -> int | None:
        """How many ranks saved it; None: unknown."""
        return self.saves[0].ranks

    @property
    def pinned(self) -> bool:
        """Whether retention leaves it alone."""
        return self.saves[0].pinned

    @cached_property  # of a property of this type notebooks complete no name
    def state(self) -> Kind:
        """The state, as a `Described` has it."""
        return self.saves[0].state

    @property
    def save_id(self) -> str:
        """The save's, of several the first rank's; of an export ""."""
        return self.saves[0].save_id

    @property
    def items(self) -> list[Item]:
        """The items that were asked for, of all ranks."""
        return [item for each in self.saves for item in each.items]

    @property
    def parameters(self) -> int:
        """The elements of all tensors that were asked for, but of those of optimizers."""
        return sum(each.parameters for each in self.saves)

    @property
    def dtypes(self) -> dict[str, int]:
        """How many of the tensors have which dtype, the most frequent first."""
        found: Counter[str] = sum((Counter(each.dtypes) for each in self.saves), Counter())
        return dict(found.most_common())

    @property
    def stored_nbytes(self) -> int:
        """The bytes of the items that were asked for, as stored: framing included."""
        return sum(each.stored_nbytes for each in self.saves)

    @property
    def faults(self) -> list[str]:
        """The missing files, and those of wrong sizes."""
        return [fault for each in self.saves for fault in each.faults]

    def each(self) -> Sequence[Item]:
        return self.items

    def head(self) -> str:
        if len(self.saves) == 1:
            return self.saves[0].head()
        heads = "; ".join(each.head() for each in self.saves)
        return f"{self.path}: each of {len(self.saves)} ranks saved its own: {heads}"

    def table(self) -> Table:
        first = self.saves[0].table()
        if len(self.saves) == 1:
            return first
        found = ((each.metadata_file, each.table().rows) for each in self.saves)
        rows = [(name, *row) for name, own in found for row in own]
        return Table(["metadata", *first.columns], rows)


@paused_gc()
def inspect(path: str | os.PathLike[str], keys: str | Iterable[str] | None = None) -> Inspection:
    """Looks at the metadata of a checkpoint of torch-dcpx or of stock DCP, or at an export.

        print(dcpx.inspect("ckpt/step-100", "model.*"))

    Reads no tensor and executes nothing.

    Args:
        path: of a directory, a URL of a store, or what `export` wrote.
        keys: names, or globs (`fnmatch`, case matters) of names: one, or several. None: all.

    Returns:
        An `Inspection`: `found.items`, `found.parameters`, `found.dtypes`, `found.faults`.

    Raises:
        UnknownNameError: a name is not stored, and a glob matches nothing.
        NotCommittedError: there is no checkpoint.
        CorruptionError, UnsafePickleError: the metadata is damaged, or asks for a class.
        StorageError, UnsupportedError, OptionError: it cannot be read; an argument cannot work.
    """
    globs = globs_of(keys)
    where = location(path)
    with being_read(where), open_contents(where) as contents:
        if contents.artifact is not None:
            found = [_described_artifact(contents, contents.artifact)]
        else:
            refuse_several(contents.path, contents.look.names)
            found = described_in(contents.place, contents.look)
    if globs:
        stored = dict.fromkeys(fqn for each in found for fqn in each.fqns)
        wanted = frozenset(chosen(stored, globs, str(where)))
        found = [replace(each, fqns=list(filter(wanted.__contains__, each.fqns))) for each in found]
    return Inspection(str(where), tuple(found))


def described(path: Location) -> list[Described]:
    """Returns what `described_in` does of the checkpoint at `path`. Raises as it does."""
    with being_read(path), open_checkpoint(path) as place:
        return described_in(place, place.look())


def described_in(place: Place, look: Look) -> list[Described]:
    """Returns the global metadata of a place, else each rank's own.

    Raises:
        NotCommittedError: there is no metadata.
        CorruptionError, UnsafePickleError, UnsupportedError, StorageError: it cannot be read.
    """
    if not commits_among(look.names):
        raise not_committed(place.path, look.names, (METADATA_NAME,))
    state, look = state_of(place, look)
    look = seen_whole(place, look)
    commits = {name: read_commit(place, name) for name in commits_among(look.names)}
    facts = facts_of(place, look, state, list(map(brief_from, commits.values())))
    found = [_described(place, look, facts, *one) for one in commits.items()]
    alone = ranks_without_metadata(look.names)
    if alone and not state.saving:
        found[-1] = replace(found[-1], alone=alone)
    return found


def _described(
    place: Place, look: Look, facts: Facts, name: str, found: CheckpointMetadata
) -> Described:
    is_exact = found.files is not None
    by = "torch-dcpx" if is_exact else "stock"
    files = {
        name: FileSize(look.size(name), nbytes, is_exact)
        for name, nbytes in sorted(wanted_sizes(found).items())
    }
    facts, writer = facts._replace(save_id=found.save_id), found.writer or by
    return _made(place, name, by, facts, found.metadata, files=files, writer=writer)


def _described_artifact(contents: Contents, name: str) -> Described:
    """Returns what lies in the files of an export, whose file or index has this name."""
    reader = PretrainedReader(contents.path)
    metadata = reader.read_metadata()
    entries = metadata.state_dict_metadata
    entries |= {object_name: BytesStorageMetadata() for object_name in reader.objects}
    ends = least_sizes(metadata) or {name: 0}
    files = {one: FileSize(contents.look.size(one), end, False) for one, end in ends.items()}
    form = "torch.save" if name.endswith(TORCH_SUFFIXES) else "safetensors"
    facts = facts_of_export(contents.path, contents.look, name)
    return _made(contents.place, name, form, facts, metadata, files=files, writer=form)


def _made(
    place: Place, name: str, by: str, facts: Facts, metadata: Metadata, **more: Any
) -> Described:
    fqns = list(metadata.state_dict_metadata)
    more |= {"fqns": fqns, "held": len(fqns), "metadata": metadata}
    return Described(str(place.path), name, by, **facts._asdict(), **more)
