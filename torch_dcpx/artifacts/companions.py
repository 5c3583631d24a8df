"""The files that a server wants beside weights: configs, tokenizer, chat template."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from torch_dcpx.errors import OptionError
from torch_dcpx.storage.directory import Directory, storage_errors
from torch_dcpx.storage.object_place import ObjectPlace
from torch_dcpx.storage.object_uploads import upload
from torch_dcpx.storage.object_url import Location, ObjectUrl
from torch_dcpx.storage.publish import publish

_NAMES = (
    "*config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.spm",
    "*.tiktoken",
)


def companions_in(directory: Path) -> dict[str, bytes]:
    """Returns the contents of such files by name. Raises: OptionError: there is no config."""
    found: dict[str, bytes] = {}
    with storage_errors("read", directory, is_read=True):
        paths = sorted(directory.iterdir()) if directory.is_dir() else []
        for path in paths:
            if any(fnmatchcase(path.name, name) for name in _NAMES) and path.is_file():
                found[path.name] = path.read_bytes()
    if not any(name.endswith("config.json") for name in found):
        why = "it has no config.json" if directory.is_dir() else "there is no such directory"
        raise OptionError(
            f"config='{directory}' must name a directory with a model's or an adapter's config: "
            f"{why}",
            option="config",
            value=os.fspath(directory),
        )
    return found


def refuse_others(files: Mapping[str, bytes], directory: Location, endpoint: str | None) -> None:
    """Raises OptionError: a file of that name, with other content, lies where no export is yet."""
    place = ObjectPlace(directory.at(endpoint)) if isinstance(directory, ObjectUrl) else None
    there = set(place.names()) if place is not None and files else set()
    for name, content in files.items():
        path = directory / name
        if isinstance(path, Path):
            is_other = path.exists() and (not path.is_file() or path.read_bytes() != content)
        else:
            is_other = place is not None and name in there and place.read_small(name) != content
        if is_other:
            raise OptionError(
                f"'{path}' is there, and is not the one that config= names: remove it, or name "
                "another place",
                option="config",
                value=name,
            )


def put_beside(
    files: Mapping[str, bytes], directory: Location, endpoint: str | None, *, is_durable: bool
) -> None:
    """Puts the files into the artifact's directory or store. Raises: StorageError."""
    if isinstance(directory, ObjectUrl):
        place = ObjectPlace(directory.at(endpoint))
        for name, content in files.items():
            upload(
                place.bucket,
                place.key(name),
                len(content),
                partial(iter, [content]),
                part_bytes=max(1, len(content)),
                at_once=1,
                is_replacing=True,
            )
        return
    with Directory(directory) as opened:
        for name, content in files.items():
            publish(opened, name, [content], is_durable=is_durable)
