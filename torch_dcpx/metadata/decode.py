"""Stock's Metadata out of the columns of our `.metadata`, without any pickle.

The way back of `metadata_encode`. A file whose checksums are right may still be hostile, so every
length, number of a string, sum and range is checked before it is used, and nothing is built whose
size the file's own size does not bound.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from torch_dcpx._compat import TORCH_VERSION
from torch_dcpx.errors import DcpxError, UnsupportedError
from torch_dcpx.metadata.columns import I64_MAX, ColumnReader
from torch_dcpx.storage.names import FileEntry, id_bytes


def _texts(columns: ColumnReader, name: str, count: int | None, strings: list[str]) -> list[str]:
    """The strings that a column of string numbers names."""
    numbers = columns.i64(name, count, high=len(strings) - 1)
    return [strings[number] for number in numbers]


def unknown_constant(columns: ColumnReader, name: str, text: str) -> DcpxError:
    """The error for a constant in column `name` that this torch lacks: written by another torch,
    or by none.
    """
    error = columns.error(f"{text!r} is unknown to torch {TORCH_VERSION}", name)
    writer = columns.header.get("torch")
    if writer == TORCH_VERSION:
        return error
    unsupported = UnsupportedError(f"{error}; torch {writer} wrote it")
    unsupported.__cause__ = error
    return unsupported


def decode_descriptors(columns: ColumnReader) -> list[list[str] | None]:
    """The distinct transform_descriptors, None last so that number -1 finds it."""
    lists = columns.header.get("descriptors")
    if type(lists) is not list or not all(
        type(names) is list and all(type(name) is str for name in names) for names in lists
    ):
        raise columns.error("the descriptors are no list of lists of strings")
    return [*lists, None]


def decode_planner(columns: ColumnReader, strings: list[str]) -> dict[str, tuple[str | int, ...]]:
    """Metadata.planner_data where it is a flatten mapping.

    Raises:
        CorruptionError: columns that contradict each other.
    """
    fqns = _texts(columns, "planner_fqn", None, strings)
    counts = columns.i64("planner_len", len(fqns))
    tags = columns.u8("planner_tag", sum(counts), high=1)
    values = columns.i64("planner_value", len(tags), low=-I64_MAX - 1)
    # Of one tag or the other: a number of a string or the integer itself.
    is_known = range(len(strings)).__contains__
    if not all(tag or is_known(value) for tag, value in zip(tags, values, strict=True)):
        raise columns.error("a value numbers no string", "planner_value")
    keys: list[str | int] = [
        value if tag else strings[value] for tag, value in zip(tags, values, strict=True)
    ]
    mapping = {}
    begin = 0
    for fqn, count in zip(fqns, counts, strict=True):
        mapping[fqn] = tuple(keys[begin : begin + count])
        begin += count
    if len(mapping) != len(fqns):
        raise columns.error("a name is there twice", "planner_fqn")
    return mapping


def decode_files(columns: ColumnReader, strings: list[str]) -> dict[str, FileEntry]:
    """The file table by path.

    Raises:
        CorruptionError: columns that contradict each other.
    """
    paths = _texts(columns, "file_path", None, strings)
    ids = columns.u8("file_id", 16 * len(paths))
    sizes = columns.i64("file_bytes", len(paths))
    crcs = columns.i64("file_crc", len(paths), high=(1 << 32) - 1)
    save_id = id_bytes(columns.header.get("save_id"))
    files = {
        path: FileEntry(path, ids[16 * number : 16 * number + 16], nbytes, crc, save_id)
        for number, (path, nbytes, crc) in enumerate(zip(paths, sizes, crcs, strict=True))
    }
    if len(files) != len(paths):
        raise columns.error("a file is there twice", "file_path")
    return files


def optional_str(columns: ColumnReader, values: dict[str, Any], name: str) -> str | None:
    """Value `name` of the header or a dict in it, which is a string or null.

    Raises:
        CorruptionError: it is missing or of another type.
    """
    value = values.get(name, 0)
    if value is not None and type(value) is not str:
        raise columns.error(f"the header's {name!r} is no string")
    return value


def decode_storage_meta(columns: ColumnReader) -> StorageMeta | None:
    """Metadata.storage_meta.

    Raises:
        CorruptionError: values of another type than stock's.
    """
    values = columns.header.get("storage_meta", 0)
    if values is None:
        return None
    if type(values) is not dict or type(values.get("modules")) is not list:
        raise columns.error("the header's 'storage_meta' is no object with modules")
    if not all(type(name) is str for name in values["modules"]):
        raise columns.error("the header's modules are no strings")
    return StorageMeta(
        optional_str(columns, values, "checkpoint_id"),
        optional_str(columns, values, "save_id"),
        None,
        values["modules"],
    )
