"""The arguments of an export, checked, and what each of them means."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from torch_dcpx.artifacts.sources import LiveSource, StoredSource
from torch_dcpx.checkpoint.call_agreement import Call, check_same_call, told_globs, told_rules
from torch_dcpx.errors import OptionError
from torch_dcpx.keys.rules import KeyRules, checked_map
from torch_dcpx.options import WriteOptions
from torch_dcpx.storage.paths import absolute, checked_path

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
}  # fmt: skip
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_STEMS = {"safetensors": "model", "torch": "pytorch_model.bin"}  # where the path names no file
_PLACES = ("path", "source")  # arguments that are paths
_SIZE = re.compile(r"\s*(\d+)\s*([A-Za-z]*)\s*")


class ExportArguments(NamedTuple):
    """Arguments that were checked."""

    directory: Path
    stem: str
    keys: tuple[str, ...] | None
    key_map: KeyRules
    max_shard_bytes: int
    is_torch: bool

    def told(self) -> dict[str, Any]:
        """Returns what ranks compare of them; small."""
        file_format = "torch" if self.is_torch else "safetensors"
        has_name = self.stem != _STEMS[file_format]
        return {
            "path": absolute(self.directory / self.stem if has_name else self.directory),
            "format": file_format,
            "keys": told_globs(self.keys),
            "key_map": told_rules(self.key_map),
            "max_shard_bytes": self.max_shard_bytes,
        }


def source_of(source: Any, options: WriteOptions) -> LiveSource | StoredSource:
    """Returns where the bytes come from. Raises: OptionError, and what a load raises."""
    if isinstance(source, (nn.Module, Mapping)):
        return LiveSource(source)
    if not isinstance(source, (str, os.PathLike)):
        raise OptionError(
            f"source must be a path, a module or a state dict, got {type(source).__name__}",
            option="source",
            value=source,
        )
    return StoredSource(source, options)


def told_source(source: Any) -> str:
    """Returns what ranks compare of the source: that it is in memory, or where it lies."""
    is_live = isinstance(source, (nn.Module, Mapping))
    return "a module or state dict" if is_live else absolute(source)


def check_same_export(calls: Sequence[Call]) -> None:
    """Compares what ranks ask for; one place may have several names, as a link gives it.

    Args:
        calls: by rank.

    Raises:
        PlanError: ranks ask for different exports; it names them, and how.
    """
    first = calls[0].arguments
    same = [Call(call.name, {**call.arguments, **_same_places(call, first)}) for call in calls]
    check_same_call(same, "torch_dcpx")


def _same_places(call: Call, first: Mapping[str, Any]) -> dict[str, str]:
    """Returns the paths of rank 0 which this rank has by other names."""
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
    file_format: str,
    keys: Iterable[str] | None,
    key_map: KeyRules | None,
    max_shard_bytes: int | str,
) -> ExportArguments:
    """Returns what the arguments say. Raises: OptionError for one that cannot work."""
    if file_format not in ("safetensors", "torch"):
        raise OptionError(
            f"format must be 'safetensors' or 'torch', got {file_format!r}",
            option="format",
            value=file_format,
        )
    is_torch = file_format == "torch"
    globs = None
    if keys is not None:
        globs = tuple(keys) if not isinstance(keys, str) else (keys,)
        if not all(isinstance(glob, str) for glob in globs):
            raise OptionError(f"keys must be globs, got {keys!r}", option="keys", value=keys)
    if not isinstance(path, (str, os.PathLike)) or "://" in os.fspath(path):
        raise OptionError(f"path must be a path, got {path!r}", option="path", value=path)
    checked_path(path, "")
    directory, stem = Path(path), _STEMS[file_format]
    if is_torch and directory.suffix in _TORCH_SUFFIXES:
        directory, stem = directory.parent, directory.name
    elif not is_torch and directory.suffix == ".safetensors":
        directory, stem = directory.parent, directory.stem
    limit = _shard_bytes(max_shard_bytes)
    return ExportArguments(
        directory, stem, globs, checked_map(key_map) or KeyRules(), limit, is_torch
    )


def _shard_bytes(value: int | str) -> int:
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(found[2].upper(), 0) if found else 0
    number = int(found[1]) * unit if found else value
    if type(number) is not int or number < 1:
        raise OptionError(
            f"max_shard_bytes must be bytes, or a text such as '5GB', got {value!r}",
            option="max_shard_bytes",
            value=value,
        )
    return number
