"""`dcpx.export`: one artifact for inference, written by all ranks at once.

1. Each rank sends its names. All ranks get the union, and apply the key map to it.
2. Each rank sends its boxes. The coordinator assigns them, makes the layout and empty files.
3. Each rank writes its boxes to their places, and syncs. No rank sends another one bytes.
4. The coordinator writes heads, checks sizes, and does the last rename (`files`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from torch_dcpx._arguments import check_options
from torch_dcpx.artifacts.agreement import (
    Names,
    RankPart,
    agreed_names,
    assigned,
    check_same_tensors,
    renamed_digest,
    tell_kept,
    tensors_of,
    tied,
)
from torch_dcpx.artifacts.arguments import ExportArguments, checked_arguments, source_of
from torch_dcpx.artifacts.companions import put_beside, refuse_others
from torch_dcpx.artifacts.files import ArtifactFiles
from torch_dcpx.artifacts.layout import ExportTensor, index_of, safetensors_layout
from torch_dcpx.artifacts.object_files import ObjectFiles, files_of
from torch_dcpx.artifacts.sources import LiveSource, selected
from torch_dcpx.artifacts.stored_source import StoredSource
from torch_dcpx.artifacts.torch_archive import check_objects, torch_layout, torch_patches
from torch_dcpx.artifacts.writing import Done, Order, remove_own, write_own
from torch_dcpx.checkpoint.same_call import Call, has_functions
from torch_dcpx.keys.key_map import KeyMap
from torch_dcpx.keys.mapped_tensor import MappedTensor
from torch_dcpx.options import WriteOptions
from torch_dcpx.ranks.call_id import CallId, last_component
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.storage.reader_lock import being_read

logger = logging.getLogger("torch_dcpx")


@dataclass(frozen=True)
class ExportReport:
    """The report of one `dcpx.export`.

    Attributes:
        path: directory of the artifact.
        files: names of its files, without the index.
        tensors: number of tensors in it.
        objects: number of objects in it, of a torch archive.
        nbytes: size of all files.
        aliases: (name, name that has its bytes): tied weights, kept once.
        skipped: names that a call without `keys` left out: those outside of the model's part, and
            objects, which safetensors cannot hold.
        written_bytes: by this rank.
        in_place_bytes: of these, without a copy.
        plan_s, write_s, total_s: up to the first byte; this rank's writing and syncing; all.
    """

    path: str
    files: tuple[str, ...]
    tensors: int
    objects: int
    nbytes: int
    aliases: tuple[tuple[str, str], ...]
    skipped: tuple[str, ...]
    written_bytes: int
    in_place_bytes: int
    plan_s: float
    write_s: float
    total_s: float


def export(
    source: str | os.PathLike[str] | nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    format: Literal["safetensors", "torch"] | None = None,  # noqa: A002 - as torch and HF say
    keys: Iterable[str] | None = None,
    key_map: KeyMap | None = None,
    max_shard_bytes: int | str = "5GB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    config: str | os.PathLike[str] | None = None,
    merge_lora: str | os.PathLike[str] | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    options: WriteOptions | None = None,
) -> ExportReport:
    """Writes the tensors of `source` as one artifact, which other libraries open.

    All ranks of the group make the same call, but for their shards, and compare it before they make
    a file. Each writes its own part straight into the files, and never holds more than
    `options.host_memory_bytes` of other ranks' bytes, or of copies.

    Args:
        source: path of a checkpoint of torch-dcpx or stock DCP, or of files as `load_pretrained`
            takes them; or a module or state dict, whose tensors may be sharded (DTensor).
        path: the file (`*.safetensors`; `*.bin`, `*.pt`, `*.pth`), whose suffix says the format, or
            a directory; for safetensors also the URL of either in a store. Missing directories are
            made. A directory whose name ends in a dot and letters (`out.model`, not `run-1.5`)
            needs `format`. One that holds a checkpoint is refused.
        format: of the files in a directory. "safetensors": `model.safetensors`, or
            `model-00001-of-00002.safetensors` and so on with `model.safetensors.index.json`, as by
            Hugging Face. "torch": `pytorch_model.bin`, a flat dict for
            `torch.load(weights_only=True)`, with plain objects, too. Default None: as the path
            says, for a directory safetensors.
        keys: globs (`fnmatch`) of names in `source`, flattened by dots. Default None: the model's
            tensors without their prefix if the source has parts (a dict with a dict under
            "model"), else all tensors.
        key_map: names and shapes of the source to those of the artifact. Default `KeyMap()`: of a
            module, the names of the plain one inside its wrappers; of what is stored, its names,
            a `module.` included, which `KeyMap(wrappers=True)` leaves out.
        max_shard_bytes: tensor bytes in a file, an int or a text such as "5GB"; a larger tensor has
            a file of its own. Default "5GB". A torch archive is one file.
        dtype: floating tensors are converted to it, as `Tensor.to` does; others stay as they are.
            Default None: none is converted.
        metadata: texts by name for the header of each safetensors file. Default None: only
            "format": "pt", which is always there.
        overwrite: True replaces another export of this name and format, and nothing else.
            Default False: none is there.
        config: a directory whose `*config.json`, tokenizer files and chat templates come to lie
            beside the weights. Default None: none.
        merge_lora: an adapter's directory as peft writes it: of a stored source each weight W
            becomes W + scaling * (B A) as by peft's `merge_and_unload`, names are those of the
            plain model, and `key_map` sees these. Default None: nothing is merged.
        process_group: ranks that export together. Default None: all of them.
        no_dist: exports in this process alone. Default False.
        options: durability, host_memory_bytes, workers, slot_bytes, direct_io, save_timeout_s and
            endpoint of `WriteOptions`. Ranks must agree on the durability alone.

    Returns:
        The report of this rank.

    Raises:
        UnsupportedError: all names that the format cannot hold; to a store, a torch archive, or a
            tensor of a live source that no rank holds whole; another adapter than plain LoRA;
            nothing was written.
        PlanError: ranks make different calls, or contradict each other; a glob or a rule matches
            nothing; two tensors get one name; there is nothing to export; the adapter is of another
            model.
        OptionError: an argument that cannot work, such as a path that is taken.
        ConcurrentSaveError: another export writes to the directory.
        CorruptionError, StorageError, RankError, RankLostError, StoreLostError: of any rank, on
            all; `path` is as it was, but for a single file in a store, which may be replaced
            before another rank fails.
        OutcomeUnknownError: the store does not say if `path` is as it was, or holds the new
            artifact.
    """
    began = time.perf_counter()
    # The whole path is compared with the names: it may have several names.
    call = CallId("export", last_component(path), is_target_compared=False, is_write=True)
    timeout_s = WriteOptions.save_timeout_s
    with exchange_for(process_group, no_dist, timeout_s, "export", call) as exchange:
        check_options("options", options, WriteOptions)
        own_options = options if options is not None else WriteOptions()
        exchange.restart(own_options.save_timeout_s)
        run = _Export(exchange, own_options)
        given = path, format, keys, key_map, max_shard_bytes, dtype, metadata
        checked = partial(checked_arguments, *given, overwrite, config, merge_lora)
        stored = source if isinstance(source, (str, os.PathLike)) else None
        try:
            with being_read(stored):
                run.prepare(source, checked)
                run.plan()
                run.write()
        finally:
            run.close()
    return run.report(time.perf_counter() - began)


class _Export:
    """One rank's part in one export."""

    def __init__(self, exchange: Exchange, options: WriteOptions) -> None:
        self._exchange = exchange
        self._options = options
        self._source: LiveSource | StoredSource
        self._arguments: ExportArguments
        self._tensors: list[ExportTensor] = []
        self._mapped: dict[str, MappedTensor] = {}
        self._objects: list[str] = []
        self._left_out: tuple[str, ...] = ()
        self._records: list[Any] = []  # of a torch archive, on the coordinator
        self._files: ArtifactFiles | ObjectFiles  # on the coordinator
        self._stack = ExitStack()  # removes the files of an export that fails
        self._order: Order
        self._done = Done(0, 0, [])
        self._crc_shares: list[list[int]] = []  # of all ranks, on the coordinator
        self._plan_s = self._write_s = 0.0

    def prepare(self, source: Any, checked: Callable[[], ExportArguments]) -> None:
        """Agrees on the names."""
        began = time.perf_counter()

        def own() -> Names:
            self._arguments = checked()
            self._exchange.place = str(self._arguments.directory)
            has_adapter = self._arguments.adapter is not None
            self._source = source_of(source, self._options, is_changed=has_adapter)
            arguments = {
                "source": self._source.name,
                **self._arguments.told(),
                "durability": self._options.durability,
            }
            call = Call("export", arguments)
            names, part = self._source.entries()
            return Names(names, part, self._source.generation, call, dict(self._source.plain))

        entries, own_part, plain = self._exchange.all_reduce("names", own, agreed_names)
        chosen, part = selected(entries, own_part, self._arguments.keys)
        if self._arguments.keys is None:
            self._left_out = tuple(name for name in entries if name not in chosen)
        if self._arguments.adapter is not None and isinstance(self._source, StoredSource):
            self._source.changes = self._arguments.adapter.changes(entries, own_part)
        found = tensors_of(chosen, part, plain, self._arguments)
        self._tensors, self._mapped, self._objects = found
        if self._exchange.is_coordinator and not plain and self._arguments.key_map.wrappers is None:
            tell_kept(self._mapped)
        self._plan_s = time.perf_counter() - began

    def plan(self) -> None:
        """Agrees on the boxes of each rank; the coordinator makes the files."""
        began = time.perf_counter()

        def own() -> RankPart:
            objects: dict[str, Any] = {}
            if self._arguments.is_torch:
                names = {name: self._mapped[name].sources[0] for name in self._objects}
                objects = self._source.objects(names, is_first=self._exchange.is_coordinator)
                check_objects(objects)
            renamed = b""
            if has_functions(self._arguments.key_map):
                renamed = renamed_digest(self._mapped, self._tensors, self._objects)
            offers = self._source.offers(self._tensors, self._mapped)
            return RankPart(offers, objects, self._source.piece_bytes, renamed)

        self._order = self._exchange.reduce_scatter("plan", own, self._orders)
        self._plan_s += time.perf_counter() - began

    def write(self) -> None:
        """Writes this rank's boxes; the coordinator publishes the artifact."""
        self._exchange.note_phase("writing")

        def own() -> list[int]:
            began = time.perf_counter()
            try:
                return self._write_own()
            finally:
                self._write_s = time.perf_counter() - began
                self._exchange.restart()

        try:
            self._exchange.all_reduce("write", own, self._take)
        except BaseException:  # and so this rank does not take part in the next step
            remove_own(self._order, self._arguments.directory, self._options)
            raise
        self._exchange.all_reduce("publish", self._exchange.restart, self._publish)

    def close(self) -> None:
        """Removes the files of an export that failed."""
        self._stack.close()

    def report(self, total_s: float) -> ExportReport:
        """Returns the report."""
        layout, tensors = self._order.layout, self._order.tensors
        return ExportReport(
            path=str(self._arguments.directory),
            files=tuple(file.name for file in layout.files),
            tensors=len(tensors),
            objects=len(self._objects) if self._arguments.is_torch else 0,
            nbytes=sum(file.nbytes for file in layout.files),
            aliases=tuple((alias, one.name) for one in tensors for alias in one.aliases),
            skipped=(*self._left_out, *(() if self._arguments.is_torch else self._objects)),
            written_bytes=self._done.written_bytes,
            in_place_bytes=self._done.in_place_bytes,
            plan_s=self._plan_s,
            write_s=self._write_s,
            total_s=total_s,
        )

    def _orders(self, parts: list[RankPart]) -> list[Order]:
        """Lays the artifact out and makes empty files. Returns an order for each rank."""
        check_same_tensors(self._tensors, parts)
        arguments, is_shared = self._arguments, self._source.is_shared
        of_ranks = [part.offers for part in parts]
        tensors = tied(self._tensors, of_ranks)
        aliases = {alias for tensor in tensors for alias in tensor.aliases}
        kept = tuple(tensor for tensor in tensors if tensor.name not in aliases)
        boxes = assigned(tensors, of_ranks[:1] if is_shared else of_ranks)
        suffix = "" if arguments.is_torch else ".safetensors"
        file_name = f"{arguments.stem}{suffix}" if arguments.names_file else None
        place, may_replace = arguments.directory, arguments.overwrite
        files = files_of(place, file_name, arguments.stem, suffix, self._options, may_replace)
        self._files = files
        self._stack.callback(files.close)
        if not files.is_replacing:
            refuse_others(arguments.companions, arguments.directory, self._options.endpoint)
        if arguments.is_torch:
            objects = {name: one for part in reversed(parts) for name, one in part.objects.items()}
            layout, self._records = torch_layout(kept, objects, arguments.stem)
        else:
            most, notes = arguments.max_shard_bytes, arguments.notes
            layout = safetensors_layout(kept, arguments.stem, most, notes)
            if len(layout.files) > 1:
                stem = files.shard_stem(arguments.stem)
                layout = safetensors_layout(kept, stem, most, notes)
        files.make(layout)
        places = {tensor.name: number for number, tensor in enumerate(kept)}
        numbers = tuple(places.get(tensor.name, -1) for tensor in tensors)
        piece_bytes = min(part.piece_bytes for part in parts)
        offers = None if is_shared else of_ranks
        own_files = files.assigned(layout, kept, offers, len(of_ranks))
        bare = layout._replace(files=tuple(file._replace(head=b"") for file in layout.files))
        orders = []
        for rank in range(len(of_ranks)):
            own = () if is_shared else tuple(box for box in boxes[rank] if numbers[box[0]] >= 0)
            # Of a directory the coordinator alone writes heads.
            seen = layout if rank == 0 or own_files[rank] else bare
            order = Order(files.export_id, seen, kept, numbers, own, piece_bytes, own_files[rank])
            orders.append(order)
        return orders

    def _write_own(self) -> list[int]:
        """Writes this rank's boxes. Returns its shares of the payloads' checksums."""
        done = write_own(
            self._source,
            self._order,
            self._arguments.directory,
            self._options,
            rank=self._exchange.rank,
            ranks=self._exchange.world_size,
            is_torch=self._arguments.is_torch,
            may_replace=self._arguments.overwrite,
        )
        self._done = done
        return done.crc_shares

    def _take(self, of_ranks: list[list[int]]) -> None:
        """Notes the ranks' shares of checksums."""
        self._crc_shares = of_ranks

    def _publish(self, _: list[None]) -> None:
        """Completes the files, which all ranks have written, and renames them."""
        self._exchange.note_phase("committing")
        order = self._order
        heads = [(number, 0, file.head) for number, file in enumerate(order.layout.files)]
        index = index_of(order.tensors, order.layout) if len(order.layout.files) > 1 else None
        if self._arguments.is_torch:
            crcs = [0] * len(order.tensors)
            for shares in self._crc_shares:
                for number, share in enumerate(shares):
                    crcs[number] ^= share
            heads = torch_patches(self._records, crcs)
        if beside := self._arguments.companions:
            options, directory = self._options, self._arguments.directory
            is_durable = options.durability == "full"
            put_beside(beside, directory, options.endpoint, is_durable=is_durable)
        self._files.publish(heads, index)
