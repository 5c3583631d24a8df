"""Lists what lies directly beneath a prefix of a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch_dcpx.errors import UnsupportedError


class ListedObject(NamedTuple):
    """An object in a listing."""

    nbytes: int
    tag: str
    modified_s: float  # when it was put, in whole seconds since 1970 by the store's clock


class Listing(NamedTuple):
    """Lists what lies directly beneath a prefix."""

    objects: dict[str, ListedObject]  # by name
    prefixes: list[str]  # names of those beneath which there is more


def tag_of(meta: Any, url: str) -> str:
    """Returns the ETag of an object, in quotes. Raises UnsupportedError: the store gives none."""
    tag = meta.get("e_tag")
    if not tag:
        raise UnsupportedError(f"'{url}': the store gives no ETag to tell when it changes")
    return str(tag) if '"' in tag else f'"{tag}"'  # as listings of Azure have it


def listing_of(found: Any, prefix: str, url: Callable[[str], str]) -> Listing:
    """Returns what obstore has listed beneath a prefix."""
    begin = f"{prefix}/" if prefix else ""
    objects = {
        one["path"][len(begin) :]: ListedObject(
            one["size"], tag_of(one, url(one["path"])), one["last_modified"].timestamp()
        )
        for one in found["objects"]
        if one["path"].startswith(begin)  # not the prefix itself, a "folder" of the S3 console
    }
    return Listing(objects, [one[len(begin) :] for one in found["common_prefixes"]])
