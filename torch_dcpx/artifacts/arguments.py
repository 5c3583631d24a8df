"""Checks the arguments of an export, and plans it: its tensors, and the boxes of each rank."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_dcpx._arguments import check_bool, check_choice, check_type, checked_globs
from torch_dcpx._compat import dtype_by_name, dtype_name
from torch_dcpx._integers import plain_int
from torch_dcpx._text import counted
from torch_dcpx.artifacts.layout import ExportTensor, is_name, is_quantized
from torch_dcpx.artifacts.sources import Box, Entry, LiveSource, Offer, StoredSource
from torch_dcpx.checkpoint.same_call import Call, check_same_call, told_globs, told_rules
from torch_dcpx.errors import (
    CorruptionError,
    OptionError,
    PlanError,
    UnsupportedError,
    must_be,
    shown,
)
from torch_dcpx.keys.key_map import KeyMap, checked_map
from torch_dcpx.keys.mapped_tensor import MappedTensor
from torch_dcpx.options import WriteOptions
from torch_dcpx.reader.safetensors_header import DTYPE_CODES
from torch_dcpx.storage.names import TORCH_SUFFIXES
from torch_dcpx.storage.object_url import Location, location_of
from torch_dcpx.storage.paths import absolute, checked_location
from torch_dcpx.tensors.tiling import untiled

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_STEMS = {"safetensors": "model", "torch": "pytorch_model.bin"}  # where the path names no file
_PLACES = ("path", "source")  # arguments that are paths
_MAX_SHOWN = 10  # names in an error
_SIZE = re.compile(r"\s*(\d+)\s*([A-Za-z]*)\s*")


class ExportArguments(NamedTuple):
    """The checked arguments of an export."""

    directory: Location
    stem: str
    keys: tuple[str, ...] | None
    key_map: KeyMap
    max_shard_bytes: int
    is_torch: bool
    dtype: str | None  # of floating tensors in the artifact, by torch's name; None: as they are
    notes: dict[str, str]  # of a safetensors header
    overwrite: bool

    @property
    def names_file(self) -> bool:
        """Whether the path names a file, not a directory."""
        return self.stem != _STEMS["torch" if self.is_torch else "safetensors"]

    def told(self) -> dict[str, Any]:
        """Returns the arguments as ranks compare them; small."""
        file_format = "torch" if self.is_torch else "safetensors"
        return {
            "path": absolute(self.directory / self.stem if self.names_file else self.directory),
            "format": file_format,
            "keys": told_globs(self.keys),
            "key_map": told_rules(self.key_map),
            "max_shard_bytes": self.max_shard_bytes,
            "dtype": self.dtype,
            "metadata": dict(sorted(self.notes.items())),
            "overwrite": self.overwrite,
        }


def source_of(source: Any, options: WriteOptions) -> LiveSource | StoredSource:
    """Returns the source of the bytes. Raises: OptionError, and as a load."""
    if isinstance(source, (nn.Module, Mapping)):
        return LiveSource(source)
    if not isinstance(source, (str, os.PathLike)):
        raise must_be("source", source, "a path, a module or a state dict")
    path = checked_location(source, "mount it, and name the directory", "source")
    return StoredSource(path, options)


def check_same_export(calls: Sequence[Call]) -> None:
    """Raises PlanError unless all ranks, in order, make one call; links may rename its paths."""
    first = calls[0].arguments
    same = [Call(call.name, {**call.arguments, **_same_places(call, first)}) for call in calls]
    check_same_call(same, "torch_dcpx")


def _same_places(call: Call, first: Mapping[str, Any]) -> dict[str, str]:
    """Returns the paths of rank 0 that this rank names otherwise."""
    return {
        name: first[name]
        for name in _PLACES
        if call.arguments[name] != first[name]
        and os.path.isabs(first[name])  # noqa: PTH117 - texts
        and os.path.isabs(call.arguments[name])  # noqa: PTH117
        and os.path.realpath(call.arguments[name]) == os.path.realpath(first[name])
    }


def checked_arguments(
    path: str | os.PathLike[str],
    file_format: str | None,
    keys: Iterable[str] | None,
    key_map: KeyMap | None,
    max_shard_bytes: int | str,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str] | None,
    overwrite: bool,
) -> ExportArguments:
    """Returns the checked arguments. Raises: OptionError for one that cannot work."""
    check_bool("overwrite", overwrite)
    if file_format is not None:
        check_choice("format", file_format, ("safetensors", "torch"))
    globs = None
    if keys is not None:
        globs = (keys,) if isinstance(keys, str) else checked_globs("keys", keys, "['model.*']")
    if isinstance(path, (nn.Module, Mapping)):
        way = "; source and path are swapped: export(source, path)"
        raise must_be("path", path, "a path", way)
    check_type("path", path, (str, os.PathLike), "a path")
    way_out = "an export writes to file systems, s3:// and az://"
    directory = location_of(checked_location(path, way_out))
    by_name = "torch" if directory.suffix in TORCH_SUFFIXES else None
    by_name = "safetensors" if directory.suffix == ".safetensors" else by_name
    if file_format is None and by_name is None and directory.suffix[1:].isalpha():
        raise OptionError(
            f"path '{path}' ends in '{directory.suffix}': a file ends in .safetensors, "
            f"{', '.join(TORCH_SUFFIXES)}; for a directory of this name give the format, too",
            option="path",
            value=os.fspath(path),
        )
    is_torch = (file_format or by_name) == "torch"
    if file_format is not None and by_name not in (None, file_format):
        raise OptionError(
            f"format={file_format!r} contradicts the path '{path}', which names a file of "
            f"{by_name}; leave format out, or name another file",
            option="format",
            value=file_format,
        )
    stem = _STEMS["torch" if is_torch else "safetensors"]
    if by_name is not None:
        directory, stem = directory.parent, directory.name if is_torch else directory.stem
    if any("\ud800" <= one <= "\udfff" for one in stem):
        raise OptionError(
            f"the file's name {stem!r} is no UTF-8, and no index could name its files; a "
            "directory's may be",
            option="path",
            value=path,
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise must_be("dtype", dtype, "None or a floating torch.dtype such as torch.bfloat16")
    limit, names = _shard_bytes(max_shard_bytes), checked_map(key_map) or KeyMap()
    to = None if dtype is None else dtype_name(dtype)
    notes = _notes(metadata, is_torch=is_torch)
    return ExportArguments(directory, stem, globs, names, limit, is_torch, to, notes, overwrite)


def _notes(metadata: Any, *, is_torch: bool) -> dict[str, str]:
    """Returns the texts for a safetensors header. Raises: OptionError."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or not all(
        isinstance(text, str) and not any("\ud800" <= one <= "\udfff" for one in text)
        for pair in metadata.items()
        for text in pair
    ):
        raise must_be("metadata", metadata, f"None or a dict of texts in UTF-8{_no_text(metadata)}")
    if metadata.get("format", "pt") != "pt":
        raise must_be("metadata", metadata, "without a 'format' other than 'pt'")
    if metadata and is_torch:
        raise OptionError(
            "metadata belongs to the header of safetensors; what torch.load gives has no place for "
            "it: export to safetensors, or leave it out",
            option="metadata",
            value=metadata,
        )
    return dict(metadata)


def _no_text(metadata: Any) -> str:
    """Returns the first pair that is not of texts, as an error shows it."""
    if not isinstance(metadata, Mapping):
        return ""
    pairs = (pair for pair in metadata.items() if not all(isinstance(one, str) for one in pair))
    pair = next(pairs, None)
    return "" if pair is None else f", not {shown(pair[0])}: {shown(pair[1])}"


def _shard_bytes(value: int | str) -> int:
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(found[2].upper(), 0) if found else 0
    number = int(found[1]) * unit if found else plain_int(value)
    if type(number) is not int or number < 1:
        raise must_be("max_shard_bytes", value, "bytes, 1 or more, or a text such as '5GB'")
    return number


# ---- The coordinator's plan ----------------------------------------------------------------------


class RankPart(NamedTuple):
    """A rank's part of the artifact, as the coordinator gets it."""

    offers: list[Offer]  # of each tensor
    objects: dict[str, Any]  # by name, of a torch archive
    piece_bytes: int  # the most that it reads at once of a stored source
    renamed: bytes  # a digest of the names that functions made; b"" without functions


def united(of_ranks: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Returns the names of all ranks. Raises: PlanError if ranks contradict each other."""
    entries: dict[str, Entry] = {}
    for rank, own in enumerate(of_ranks):
        for name, entry in own.items():
            if entries.setdefault(name, entry) != entry:
                raise PlanError(
                    f"'{name}' is {_text(entry)} on rank {rank} and {_text(entries[name])} on one "
                    "before",
                    fqn=name,
                )
    return entries


def tensors_of(
    entries: Mapping[str, Entry],
    part: str,
    plain: Mapping[str, str],
    arguments: ExportArguments,
) -> tuple[list[ExportTensor], dict[str, MappedTensor], list[str]]:
    """Returns the artifact's tensors, the source's pieces of each, and the names of objects.

    Raises:
        UnsupportedError: the format cannot hold names, dtypes, or objects that `keys` chose.
        PlanError: the map does not fit, or the artifact would be empty.
    """
    sizes = {name: entry.sizes for name, entry in entries.items()}
    mapped = arguments.key_map.resolve(sizes, part=part, plain=plain)
    tensors, objects = [], []
    for name, entry in mapped.items():
        if entry.sizes is None:
            objects.append(name)
            continue
        dtypes = {_exported(str(entries[source].dtype), arguments) for source in entry.sources}
        if len(dtypes) > 1:
            raise PlanError(f"'{name}' is merged of dtypes {sorted(dtypes)}", fqn=name)
        tensors.append(ExportTensor(name, dtypes.pop(), entry.sizes))
    _check_held(tensors, objects, arguments)
    return tensors, mapped, objects


def _exported(stored: str, arguments: ExportArguments) -> str:
    """Returns the dtype in the artifact of a source's tensor, by torch's names."""
    dtype = dtype_by_name(stored)
    is_floating = dtype is not None and dtype.is_floating_point
    return arguments.dtype if is_floating and arguments.dtype is not None else stored


def _check_held(
    tensors: Sequence[ExportTensor], objects: Sequence[str], arguments: ExportArguments
) -> None:
    is_torch = arguments.is_torch
    names = [repr(one.name) for one in tensors if not is_torch and not is_name(one.name)]
    if names:
        raise UnsupportedError(
            f"safetensors cannot hold {counted(len(names), 'name')}: {_listed(names)}; rename them "
            "by key_map"
        )
    noted = [repr(one.name) for one in tensors if one.name in arguments.notes]
    if noted:
        raise OptionError(
            f"metadata has {counted(len(noted), 'tensor name')}, {_listed(noted)}, which the "
            "header keeps for tied weights",
            option="metadata",
            value=arguments.notes,
        )
    refused = [
        f"'{one.name}' ({one.dtype})"
        for one in tensors
        if is_quantized(one.dtype) or (not is_torch and one.dtype not in DTYPE_CODES)
    ]
    if refused:
        has_quantized = any(is_quantized(tensor.dtype) for tensor in tensors)
        raise UnsupportedError(
            f"{'a torch archive' if is_torch else 'safetensors'} cannot hold "
            f"{counted(len(refused), 'tensor')}: {_listed(refused)}; leave them out by keys, or "
            + ("export what dequantize() gives" if has_quantized else "use format='torch'")
        )
    if objects and arguments.keys is not None and not is_torch:
        shown = _listed([repr(name) for name in objects])
        raise UnsupportedError(
            f"safetensors cannot hold {counted(len(objects), 'object')}: {shown}; leave them out "
            "by keys, or use format='torch'"
        )
    if not tensors and not (is_torch and objects):
        skipped, way = "", "keys= names what to export"
        if objects:
            skipped = f", but {counted(len(objects), 'object')}, which safetensors cannot hold"
            way = "format='torch' keeps objects, too"
        raise PlanError(
            f"export: there is no tensor to export{skipped}; nothing was written; {way}"
        )


def renamed_digest(
    mapped: Mapping[str, MappedTensor], tensors: Sequence[ExportTensor], objects: Sequence[str]
) -> bytes:
    """Returns a digest of the artifact's names and of the pieces of each."""
    names = [*(tensor.name for tensor in tensors), *objects]
    text = repr([(name, mapped[name]) for name in names])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def check_same_tensors(tensors: Sequence[ExportTensor], parts: Sequence[RankPart]) -> None:
    """Raises PlanError unless all ranks offer these tensors, made of the same pieces."""
    names = [tensor.name for tensor in tensors]
    for rank, part in enumerate(parts):
        offered = [offer.name for offer in part.offers]
        if offered == names and part.renamed == parts[0].renamed:
            continue
        pairs = zip(offered, names, strict=False)
        differing = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if differing is not None:
            what = f"'{differing[0]}' where rank 0 has '{differing[1]}'"
        elif len(offered) != len(names):
            what = f"{len(offered)} tensors where rank 0 has {len(names)}"
        else:
            what = "the same names as rank 0, of other tensors or objects"
        raise PlanError(
            f"export: rank {rank} makes {what}: functions in key_map must return the same on every "
            "rank; nothing was written",
            fqn=None if differing is None else differing[0],
        )


def tied(
    tensors: Sequence[ExportTensor], of_ranks: Sequence[Sequence[Offer]]
) -> list[ExportTensor]:
    """Returns the tensors: of those with one memory, the first has the others as aliases.

    An alias keeps its place in the list.
    """
    aliases: dict[str | None, list[str]] = {}
    for number, tensor in enumerate(tensors):
        twins = {offers[number].twin for offers in of_ranks} - {None}
        if len(twins) == 1 and tensor.name not in twins:
            aliases.setdefault(twins.pop(), []).append(tensor.name)
    return [tensor._replace(aliases=tuple(aliases.get(tensor.name, ()))) for tensor in tensors]


def assigned(
    tensors: Sequence[ExportTensor], of_ranks: Sequence[Sequence[Offer]]
) -> list[list[tuple[int, Box]]]:
    """Returns the boxes of each rank: the rank with the least to write takes the next box."""
    ranks: list[list[tuple[int, Box]]] = [[] for _ in of_ranks]
    loads = [0] * len(of_ranks)
    for number, tensor in enumerate(tensors):
        holders: dict[Box, list[int]] = {}
        for rank, offers in enumerate(of_ranks):
            for box in offers[number].boxes:
                holders.setdefault(box, []).append(rank)
        _check_whole(tensor, list(holders))
        for box, able in holders.items():
            rank = min(able, key=loads.__getitem__)
            ranks[rank].append((number, box))
            loads[rank] += math.prod(box[1]) * tensor.itemsize
    return ranks


def _check_whole(tensor: ExportTensor, boxes: Sequence[Box]) -> None:
    """Raises CorruptionError unless the boxes hold each element once."""
    for _, offence, first, second, point in untiled([(tensor.sizes, boxes)]):
        what = f"{offence} of boxes {first} and {second}"
        if offence == "hole":
            what = f"no rank and no chunk holds element {list(point)}"
        raise CorruptionError(
            f"'{tensor.name}' of sizes {list(tensor.sizes)} cannot be exported: {what}",
            fqn=tensor.name,
        )


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return ", ".join(texts[:_MAX_SHOWN]) + more


def _text(entry: Entry) -> str:
    return "an object" if entry.sizes is None else f"{entry.dtype} {list(entry.sizes)}"
