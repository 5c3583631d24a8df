"""The files of an export to a store: what `ArtifactFiles` is for a directory.

Nothing is renamed there, and nothing written to later. So one rank uploads each file whole.
1. Shards have names that no export has used. The last PUT, of the index, makes the artifact; a
   single file is one as soon as it is uploaded.
2. The files that the replaced artifact named go, and no others.
An error before the index is there leaves the old artifact, and removes the new files: each rank
those that it has uploaded, and once all have, the coordinator. Where nobody answers the PUT of the
index, it stays open which artifact is there, and all files stay.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Collection, Sequence

from torch_dcpx._replacing import taken
from torch_dcpx.artifacts.files import ArtifactFiles, check_destination, old_shards
from torch_dcpx.artifacts.layout import ExportTensor, Layout
from torch_dcpx.artifacts.sources import Offer
from torch_dcpx.errors import CorruptionError, OptionError, StorageError, UnsupportedError
from torch_dcpx.options import WriteOptions
from torch_dcpx.storage.names import is_data_file_name, is_metadata_name
from torch_dcpx.storage.object_place import ObjectPlace
from torch_dcpx.storage.object_uploads import upload
from torch_dcpx.storage.object_url import Location, ObjectUrl
from torch_dcpx.tensors.tiling import untiled

logger = logging.getLogger("torch_dcpx")


def files_of(
    directory: Location,
    file_name: str | None,
    stem: str,
    suffix: str,
    options: WriteOptions,
    may_replace: bool,
) -> ArtifactFiles | ObjectFiles:
    """Returns the files of an export; of a directory they are locked.

    Args:
        file_name: of the file that the path names; None: it names the directory.
        suffix: of safetensors; "": a torch archive.
        may_replace: whether an artifact of this kind may be there.

    Raises:
        OptionError: an export would not be found there, cannot be made, or replaces something.
        UnsupportedError: a torch archive in a store.
        ConcurrentSaveError, StorageError: as `ArtifactFiles`.
    """
    if isinstance(directory, ObjectUrl):
        place = ObjectPlace(directory.at(options.endpoint))
        return ObjectFiles(place, file_name, stem, suffix, may_replace)
    check_destination(directory, file_name, f"{stem}{suffix}")
    return ArtifactFiles(directory, stem, suffix, options, may_replace)


def _parts_of(tensors: Sequence[ExportTensor], offers: Sequence[Offer]) -> set[int]:
    """Returns the numbers of the tensors that a rank does not hold whole."""
    boxes = {offer.name: offer.boxes for offer in offers}
    return {offence[0] for offence in untiled([(one.sizes, boxes[one.name]) for one in tensors])}


class ObjectFiles:
    """The files of one export. Not thread-safe."""

    def __init__(
        self, place: ObjectPlace, file_name: str | None, stem: str, suffix: str, may_replace: bool
    ) -> None:
        """Looks at what is there. Raises: as `files_of`."""
        if not suffix:
            raise UnsupportedError(
                f"export to '{place.path}': a torch archive has checksums before the bytes that "
                "they cover, so that it cannot be uploaded as it is written: export to a "
                "directory and copy the file, or write safetensors"
            )
        there = place.names()
        if file_name is None and any(is_metadata_name(n) or is_data_file_name(n) for n in there):
            raise OptionError(
                f"export to '{place.path}': it holds a checkpoint, beside which loads would not "
                "find an export; name another place",
                option="path",
                value=str(place.path),
            )
        self._place = place
        self.export_id = uuid.uuid4().hex[:12]
        self._single_name = f"{stem}{suffix}"
        self._index_name = f"{stem}{suffix}.index.json"
        shard = re.escape(stem) + r"(-[0-9a-f]{12})?-\d{5,9}-of-\d{5,9}" + re.escape(suffix)
        self._has_index = self._index_name in there
        self._may_replace = may_replace
        self._refuse_taken(there)
        self._replaced: frozenset[str] = frozenset()
        if self._has_index:
            # Where the store does not answer, nobody knows what to remove later.
            found = old_shards(place, self._index_name, re.compile(shard), CorruptionError)
            self._replaced = found
        self._has_single = self._single_name in there
        self.is_replacing = self._has_index or self._has_single
        self._names: tuple[str, ...] = ()
        self._is_published = False

    def _refuse_taken(self, there: Collection[str]) -> None:
        """Raises OptionError where the export would replace an object unasked."""
        names = [name for name in (self._single_name, self._index_name) if name in there]
        if names and not self._may_replace:
            raise taken(self._place.path / names[0])

    def shard_stem(self, stem: str) -> str:
        """Returns the beginning of shards' names."""
        return f"{stem}-{self.export_id}"

    def make(self, layout: Layout) -> None:
        """Notes the names of the files."""
        self._names = tuple(file.name for file in layout.files)

    def assigned(
        self,
        layout: Layout,
        tensors: Sequence[ExportTensor],
        of_ranks: Sequence[Sequence[Offer]] | None,
        ranks: int,
    ) -> list[tuple[int, ...]]:
        """Returns the files that each rank uploads: the one with the least takes the next.

        Args:
            tensors: of the payloads.
            of_ranks: the boxes that each rank holds of each tensor; None: each rank reads any.

        Raises UnsupportedError: no rank has all of a file.
        """
        held: list[set[int]] = [set(range(ranks)) for _ in layout.files]
        lacking = [_parts_of(tensors, offers) for offers in of_ranks or ()]
        for number, (tensor, payload) in enumerate(zip(tensors, layout.payloads, strict=True)):
            able = {r for r in held[payload.file] if not lacking or number not in lacking[r]}
            if not able:
                raise UnsupportedError(
                    f"export to '{self._place.path}': one rank uploads a file, and none holds all "
                    f"of '{layout.files[payload.file].name}' up to '{tensor.name}', whose shards "
                    "lie on several: export to a directory, or save a checkpoint and export that"
                )
            held[payload.file] = able
        own: list[list[int]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        for file, able in enumerate(held):
            rank = min(sorted(able), key=loads.__getitem__)
            own[rank].append(file)
            loads[rank] += layout.files[file].nbytes
        return list(map(tuple, own))

    def publish(self, patches: Sequence[tuple[int, int, bytes]], index: bytes | None) -> None:
        """Makes the artifact of the files, which are there; removes the one that it replaces.

        Args:
            patches: of heads, which are there as well.
            index: of several files; None: there is one.

        Raises:
            OptionError: another one has come meanwhile, whose replacement nobody asked for.
            StorageError: the artifact is not there; or the single file before it still is, and
                loads take that.
            OutcomeUnknownError: the store does not say which artifact is there.
        """
        place = self._place
        if index is not None:
            if not self._may_replace:
                self._refuse_taken(place.names())  # by now
            self._put_index(index)
        self._is_published = True
        if index is not None and self._has_single:
            self._remove_single()
        old = set(self._replaced).difference(self._names)
        if index is None and self._has_index:
            old.add(self._index_name)
        place.remove_leftovers(sorted(old))

    def _remove_single(self) -> None:
        """Removes the single file, which loads would take. Raises StorageError: it is there."""
        try:
            self._place.unlink(self._single_name)
        except StorageError:
            if self._place.is_regular(self._single_name):
                raise

    def _put_index(self, index: bytes) -> None:
        """Puts the index, which names the shards of this export alone. Raises: as `publish`."""
        place = self._place
        self._is_published = True  # as far as anybody knows: the request may come through later
        try:
            upload(
                place.bucket,
                place.key(self._index_name),
                len(index),
                lambda: iter([index]),
                part_bytes=len(index),
                at_once=1,
                is_replacing=True,
                is_new=not self._may_replace,
            )
        except (OptionError, StorageError):
            self._is_published = False
            raise

    def close(self) -> None:
        """Removes shards that are no artifact, on no rank's part any more. Never raises."""
        if not self._is_published and len(self._names) > 1:
            self._place.remove_leftovers(self._names)
