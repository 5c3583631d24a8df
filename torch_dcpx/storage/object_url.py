"""`s3://bucket/prefix` as a place: what a `Path` is for a directory."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from torch_dcpx.errors import OptionError, UnsupportedError

SCHEME = "s3://"


class ObjectUrl:
    """The prefix that the objects of a checkpoint share, and where their store is."""

    __slots__ = ("bucket", "endpoint", "key")

    def __init__(self, bucket: str, key: str, endpoint: str | None = None) -> None:
        """Takes `key` without slashes at its ends; `endpoint`: None is obstore's own choice."""
        self.bucket, self.key, self.endpoint = bucket, key, endpoint

    def __truediv__(self, name: str | os.PathLike[str]) -> ObjectUrl:
        key = f"{self.key}/{os.fspath(name)}" if self.key else os.fspath(name)
        return ObjectUrl(self.bucket, key, self.endpoint)

    def __fspath__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}"

    def __str__(self) -> str:
        return self.__fspath__()

    def __repr__(self) -> str:
        return f"ObjectUrl({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectUrl) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[str, str, str | None]:
        return self.bucket, self.key, self.endpoint

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def at(self, endpoint: str | None) -> ObjectUrl:
        """Returns the same prefix of the store at `endpoint`; None: as it is."""
        return self if endpoint is None else ObjectUrl(self.bucket, self.key, endpoint)

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> ObjectUrl:
        """The URL without its last name; of a bucket's own objects, the bucket."""
        return ObjectUrl(self.bucket, self.key.rpartition("/")[0], self.endpoint)

    @property
    def parents(self) -> tuple[ObjectUrl, ...]:
        """None: no prefix has to be made."""
        return ()

    def is_absolute(self) -> bool:
        return True

    def is_relative_to(self, other: object) -> bool:
        if not isinstance(other, ObjectUrl):
            return False
        is_below = self.key.startswith(f"{other.key}/")
        return self == other or (self.bucket == other.bucket and is_below)

    def relative_to(self, other: ObjectUrl) -> PurePosixPath:
        """REQUIRES: `is_relative_to(other)`."""
        return PurePosixPath(self.key[len(other.key) :].lstrip("/"))


Location: TypeAlias = Path | ObjectUrl


def is_url(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> bool:
    """Whether a path is an `s3://` URL."""
    return os.fsdecode(path).startswith(SCHEME)


def location_of(
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes], endpoint: str | None = None
) -> Location:
    """Returns what a path means, which was checked before."""
    if isinstance(path, (Path, ObjectUrl)):
        return path
    text = os.fsdecode(path)
    if not text.startswith(SCHEME):
        return Path(text)
    bucket, _, key = text[len(SCHEME) :].partition("/")
    return ObjectUrl(bucket, key.rstrip("/"), endpoint)


def check_url(text: str, name: str) -> None:
    """Checks an `s3://` URL. Its text is no part of an error where it may hold a password.

    Raises:
        OptionError: no bucket, no prefix, or a part that no key may have.
        UnsupportedError: a query or user, which obstore takes from its own settings.
    """
    bucket, _, key = text[len(SCHEME) :].partition("/")
    if "@" in bucket:
        raise UnsupportedError(
            f"{name} is an s3:// URL with a user or a password in it: give credentials as "
            "environment variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if "?" in text or "#" in text:
        plain = text.partition("?")[0].partition("#")[0]
        raise UnsupportedError(
            f"{name}={plain!r} goes on with a query or a fragment: "
            "settings of a store are environment variables, or `endpoint`"
        )
    parts = key.rstrip("/").split("/")
    if not bucket:
        why = "names no bucket: s3://bucket/prefix"
    elif parts == [""]:
        why = "names a whole bucket: a checkpoint needs a prefix of its own, s3://bucket/prefix"
    elif not all(map(_is_name, parts)):
        why = "has an empty part, '.', '..' or a character that is not printable"
    else:
        return
    raise OptionError(f"{name}={text!r} {why}", option=name, value=text)


def _is_name(part: str) -> bool:
    return part not in ("", ".", "..") and part.isprintable()
