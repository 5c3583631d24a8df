"""`s3://bucket/prefix` and `az://container/prefix` as places: what a `Path` is for a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from torch_dcpx import _mounts
from torch_dcpx._answered_os import path_of
from torch_dcpx.errors import OptionError, UnsupportedError
from torch_dcpx.storage.object_services import SERVICES

_BUCKET = re.compile(r"[A-Za-z0-9._$-]+")
_BEGINS = tuple(f"{scheme}://" for scheme in SERVICES)


class ObjectUrl:
    """The prefix that the objects of a checkpoint share, and where their store is."""

    __slots__ = ("bucket", "endpoint", "key", "scheme")

    def __init__(self, scheme: str, bucket: str, key: str, endpoint: str | None = None) -> None:
        """Takes `key` without slashes at its ends; `endpoint`: None is obstore's own choice."""
        self.scheme, self.bucket, self.key, self.endpoint = scheme, bucket, key, endpoint

    def __truediv__(self, name: str | os.PathLike[str]) -> ObjectUrl:
        key = f"{self.key}/{os.fspath(name)}" if self.key else os.fspath(name)
        return ObjectUrl(self.scheme, self.bucket, key, self.endpoint)

    def __fspath__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    def __str__(self) -> str:
        return self.__fspath__()

    def __repr__(self) -> str:
        return f"ObjectUrl({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectUrl) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[str, str, str, str | None]:
        return self.scheme, self.bucket, self.key, self.endpoint

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def at(self, endpoint: str | None) -> ObjectUrl:
        """Returns the same prefix of the store at `endpoint`; None: as it is."""
        return self if endpoint is None else ObjectUrl(self.scheme, self.bucket, self.key, endpoint)

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> ObjectUrl:
        """The URL without its last name; of a bucket's own objects, the bucket."""
        key = self.key.rpartition("/")[0]
        return ObjectUrl(self.scheme, self.bucket, key, self.endpoint)

    @property
    def parents(self) -> tuple[ObjectUrl, ...]:
        """None: no prefix has to be made."""
        return ()

    def is_absolute(self) -> bool:
        return True

    def is_relative_to(self, other: object) -> bool:
        if not isinstance(other, ObjectUrl):
            return False
        is_one = (self.scheme, self.bucket) == (other.scheme, other.bucket)
        return is_one and f"{self.key}/".startswith(f"{other.key}/")

    def relative_to(self, other: ObjectUrl) -> PurePosixPath:
        """REQUIRES: `is_relative_to(other)`."""
        return PurePosixPath(self.key[len(other.key) :].lstrip("/"))


Location: TypeAlias = Path | ObjectUrl


def is_url(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> bool:
    """Whether a path is an `s3://` or `az://` URL."""
    return os.fsdecode(path).startswith(_BEGINS)


def location_of(
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes], endpoint: str | None = None
) -> Location:
    """Returns what a path means, which was checked before."""
    if isinstance(path, ObjectUrl) or (isinstance(path, Path) and not _mounts.HAS_SHARED):
        return path
    text = os.fsdecode(path)
    if not text.startswith(_BEGINS):
        return path_of(text) if _mounts.HAS_SHARED else Path(text)
    scheme, bucket, key = _parts(text)
    return ObjectUrl(scheme, bucket, key, endpoint)


def check_url(text: str, name: str) -> None:
    """Checks a URL of a store. Its text is no part of an error where it may hold a password.

    Raises:
        OptionError: no bucket, no prefix, or a part that no key may have.
        UnsupportedError: a query or user, which obstore takes from its own settings.
    """
    scheme, bucket, key = _parts(text)
    service = SERVICES[scheme]
    if "@" in (bucket or key) or ":" in bucket:  # a password may have a "/" in it
        raise UnsupportedError(
            f"{name} is an {scheme}:// URL with a user or a password in it: give credentials as "
            f"environment variables, such as {service.credentials}"
        )
    if "?" in text or "#" in text:
        plain = text.partition("?")[0].partition("#")[0]
        raise UnsupportedError(
            f"{name}={plain!r} goes on with a query or a fragment: "
            "settings of a store are environment variables, or `endpoint`"
        )
    parts = key.split("/")
    way = f"{scheme}://{service.container}/prefix"
    if not bucket:
        why = f"names no {service.container}: {way}"
    elif not _BUCKET.fullmatch(bucket):  # which obstore does not survive
        why = f"names no {service.container} that can be: letters, digits, '.', '-', '_'"
    elif parts == [""]:
        why = f"names a whole {service.container}: a checkpoint needs a prefix of its own, {way}"
    elif not all(map(_is_name, parts)):
        why = "has an empty part, '.', '..' or a character that is not printable"
    else:
        return
    raise OptionError(f"{name}={text!r} {why}", option=name, value=text)


def _parts(text: str) -> tuple[str, str, str]:
    """Returns scheme, bucket and key of a URL."""
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    return scheme, bucket, key.rstrip("/")


def _is_name(part: str) -> bool:
    return part not in ("", ".", "..") and part.isprintable()
