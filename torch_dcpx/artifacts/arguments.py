"""Checks the arguments of an export."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_dcpx._answered_os import os, path_of
from torch_dcpx._arguments import check_bool, check_choice, check_type, checked_globs
from torch_dcpx._compat import dtype_name
from torch_dcpx._integers import plain_int
from torch_dcpx.artifacts.companions import companions_in
from torch_dcpx.artifacts.lora import Adapter, base_name
from torch_dcpx.artifacts.sources import LiveSource
from torch_dcpx.artifacts.stored_source import StoredSource
from torch_dcpx.checkpoint.same_call import Call, check_same_call, told_globs, told_rules
from torch_dcpx.errors import (
    OptionError,
    must_be,
    shown,
)
from torch_dcpx.keys.key_map import KeyMap, checked_map
from torch_dcpx.options import WriteOptions
from torch_dcpx.storage.names import TORCH_SUFFIXES
from torch_dcpx.storage.object_url import Location, location_of
from torch_dcpx.storage.paths import absolute, checked_location, checked_path

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
    companions: dict[str, bytes]  # files to put beside, by name
    adapter: Adapter | None  # to merge

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
            "config": _digest(self.companions),
            "merge_lora": None if self.adapter is None else self.adapter.digest,
        }


def source_of(source: Any, options: WriteOptions, *, is_changed: bool) -> LiveSource | StoredSource:
    """Returns the source of the bytes. Raises: OptionError, and as a load."""
    if isinstance(source, (nn.Module, Mapping)):
        if is_changed:
            raise OptionError(
                "merge_lora needs a stored source; of a module in memory peft's "
                "merge_and_unload() makes the one to export",
                option="merge_lora",
            )
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
        and os.path.isabs(first[name])
        and os.path.isabs(call.arguments[name])
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
    config: str | os.PathLike[str] | None = None,
    merge_lora: str | os.PathLike[str] | None = None,
) -> ExportArguments:
    """Returns the checked arguments. Raises: OptionError for one that cannot work."""
    check_bool("overwrite", overwrite)
    if file_format is not None:
        check_choice("format", file_format, ("safetensors", "torch"))
    globs = None
    if keys is not None:
        globs = (keys,) if isinstance(keys, str) else checked_globs("keys", keys, "['model.*']")
    directory = _destination(path)
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
    beside, adapter = _directories(config, merge_lora)
    if adapter is not None:
        names = KeyMap(base_name, *names.rules, wrappers=names.wrappers)
    return ExportArguments(
        directory, stem, globs, names, limit, is_torch, to, notes, overwrite, beside, adapter
    )


def _destination(path: Any) -> Location:
    """Returns the path. Raises: OptionError, UnsupportedError."""
    if isinstance(path, (nn.Module, Mapping)):
        way = "; source and path are swapped: export(source, path)"
        raise must_be("path", path, "a path", way)
    check_type("path", path, (str, os.PathLike), "a path")
    way_out = "an export writes to file systems, s3:// and az://"
    return location_of(checked_location(path, way_out))


def _directories(config: Any, merge_lora: Any) -> tuple[dict[str, bytes], Adapter | None]:
    """Returns what these directories hold. Raises: as `companions_in`, `Adapter`."""
    beside, adapter = {}, None
    if config is not None:
        beside = companions_in(path_of(checked_path(config, "copy it here", "config")))
    if isinstance(merge_lora, nn.Module):
        way = "; export(merge_lora.merge_and_unload(), path) is of a module in memory"
        raise must_be("merge_lora", merge_lora, "an adapter's directory", way)
    if merge_lora is not None:
        adapter = Adapter(path_of(checked_path(merge_lora, "copy it here", "merge_lora")))
    return beside, adapter


def _digest(files: Mapping[str, bytes]) -> str | None:
    """Returns a digest of files by name, as ranks compare them; None: there are none."""
    digest = hashlib.blake2b(digest_size=8)
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogatepass") + content)
    return digest.hexdigest() if files else None


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
